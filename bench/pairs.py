"""Read KV heads from a file of captured vectors, and index them as an ingest would.

Owns a Pair: one KV head of one layer with its index, its plan, its test queries and what exact
search and attention say of them. It knows nothing of other indexes, nor of time spent asking.

The file is an .npz with, for each pair i (d numbers a key, G query heads): keys{i}, values{i}
(n, d) float16, the middle; train_queries{i} (G, m, d) with train_positions{i} (G, m);
test_queries{i} (G, t, d) with test_positions{i}; info, a JSON string with tokens, head_dim,
rope_theta and pairs. Queries and keys are after RoPE in the half-split layout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import HeadIndex, HeadPlan, PlanKind
from openbook.indexstore.lift import fit_lift
from openbook.indexstore.plan import tune_plan, untuned_plan
from openbook.worker.capture import (
    DECODE_SPREAD,
    NEIGHBOURS,
    exact_top_k,
    rotated_queries,
    sample_positions,
)
from openbook.worker.indexing import PROBES, TUNING_QUERIES
from openbook.worker.models import Rotation

KEYS = 100  # whose recall is measured: the default budget, and the paper's
ROUNDING = 1e-6  # of |q| |k|: float32 sums of the same products differ by this much
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Training:
    """Training queries of a KV head, a tuple of one array for each query head of its group.

    `rotated` (s, d): those that an ingest trains on, turned to where decoding happens.
    `raw` (s, d): the same as they were. `all_raw` (m, d): all that the file has, as they were.
    """

    rotated: tuple[Floats, ...]
    raw: tuple[Floats, ...]
    all_raw: tuple[Floats, ...]

    @property
    def shared(self) -> Floats:
        """Return the rotated queries of all query heads, (G·s, d)."""
        return np.concatenate(self.rotated)


@dataclass
class Pair:
    """One KV head: its index, its test queries, and what exact search and attention say."""

    name: str
    head: HeadIndex
    plans: dict[PlanKind, HeadPlan]  # as an ingest would tune each
    wide: Floats  # (m, d) the keys as float32, for indexes that hold their own
    training: Training
    tests: Floats  # (t, G, d)
    bars: NDArray[np.float64]  # (t, G) the score of the KEYS-th best key, less rounding
    exact_out: Floats  # (t, G, dv) attention over the whole middle
    scaling: float
    tokens: int
    build_s: dict[PlanKind, float]

    @property
    def group(self) -> int:
        """The number of query heads, G."""
        return int(self.tests.shape[1])

    def recalls(self, query: int, ids: NDArray[Any], *, heads: slice = slice(None)) -> Floats:
        """Return the share of the best KEYS keys among `ids` (g, w) of one test: (g,).

        The ids are of all query heads, or of `heads`. A negative id is none; no id is given twice.
        A tie with the last of the best counts.
        """
        rows = self.wide[ids].astype(np.float64)
        scores = np.einsum("gkd,gd->gk", rows, self.tests[query, heads])
        found = (scores >= self.bars[query, heads, None]) & (ids >= 0)
        return np.minimum(found.sum(axis=1) / KEYS, 1).astype(np.float32)

    def errors(self, query: int, out: Floats) -> Floats:
        """Return the relative L2 distance of `out` (G, dv) to exact attention of one test: (G,)."""
        exact = self.exact_out[query]
        gap = np.linalg.norm(out - exact, axis=1) / np.linalg.norm(exact, axis=1)
        return np.asarray(gap, np.float32)


def read_pairs(path: Path, *, chosen: Sequence[int] | None, queries: int) -> list[Pair]:
    """Read and index the pairs of a file, all of them without `chosen`, `queries` tests each."""
    with np.load(path) as vectors:
        info = json.loads(str(vectors["info"]))
        numbers = range(len(info["pairs"])) if chosen is None else chosen
        return [read_pair(vectors, info, number, queries) for number in numbers]


def read_pair(vectors: Any, info: dict[str, Any], number: int, queries: int) -> Pair:
    """Build the index of pair `number` as an ingest would, and its exact answers."""
    keys, values = vectors[f"keys{number}"], vectors[f"values{number}"]
    tests = np.moveaxis(vectors[f"test_queries{number}"], 0, 1)[:queries].astype(np.float32)
    scaling = info["head_dim"] ** -0.5
    training, spare = training_queries(vectors, info, number)
    wide, shared = torch.from_numpy(to_float32(keys)), training.shared
    plans: dict[PlanKind, HeadPlan] = {}
    build_s: dict[PlanKind, float] = {}
    kinds: tuple[PlanKind, ...] = ("clusters", "scan", "graph")
    for kind in kinds:  # a scan's arrays are made with a graph's
        begin = time.perf_counter()
        near = None
        if kind != "clusters":
            near = exact_top_k(torch.from_numpy(shared), wide, min(NEIGHBOURS, len(keys)))
        head = build_head(keys, values, shared, near, params=IndexParams())
        laid_out = torch.from_numpy(to_float32(head.keys))  # in the order of the head
        plans[kind] = plan_of(head, kind, spare, laid_out, scaling)
        build_s[kind] = time.perf_counter() - begin
    bars, exact_out = exact_answers(tests, head, scaling)
    at = info["pairs"][number]
    return Pair(
        name=f"L{at['layer']} h{at['kv_head']}",
        head=head,
        plans=plans,
        wide=laid_out.numpy(),
        training=training,
        tests=np.ascontiguousarray(tests),
        bars=bars,
        exact_out=exact_out,
        scaling=scaling,
        tokens=info["tokens"],
        build_s=build_s,
    )


def exact_answers(
    tests: Floats, head: HeadIndex, scaling: float
) -> tuple[NDArray[np.float64], Floats]:
    """Return the KEYS-th best score less rounding (t, G), and exact attention (t, G, dv)."""
    keys, values = to_float32(head.keys).astype(np.float64), to_float32(head.values)
    longest = np.linalg.norm(keys, axis=1).max()
    bars, out = [], []
    for asked in tests:  # one at a time: all scores of 128K keys would be 200 MB
        scores = asked @ keys.T  # (G, m)
        rounding = ROUNDING * longest * np.linalg.norm(asked, axis=1)
        bars.append(np.partition(scores, -KEYS, axis=1)[:, -KEYS] - rounding)
        weights = np.exp(scaling * (scores - scores.max(axis=1, keepdims=True)))
        weights = weights.astype(np.float32)
        out.append(weights @ values / weights.sum(axis=1, keepdims=True))
    return np.stack(bars), np.stack(out)


def plan_of(
    head: HeadIndex, kind: PlanKind, spare: torch.Tensor, keys: torch.Tensor, scaling: float
) -> HeadPlan:
    """Tune a kind and fit its lift on queries (G, p, d) that trained nothing, as an ingest does."""
    queries = spare.numpy()
    wanted = exact_top_k(spare.flatten(0, 1), keys, KEYS).reshape(*queries.shape[:2], KEYS)
    (plan,) = tune_plan((untuned_plan(kind),), (head,), queries, wanted)
    probes = spare[:, :: TUNING_QUERIES // PROBES]
    lse = torch.logsumexp(scaling * (probes @ keys.T), dim=2).numpy()
    lift = fit_lift(head, probes.numpy(), lse, plan=plan, scaling=scaling)
    return replace(plan, lift=lift)


def training_queries(
    vectors: Any, info: dict[str, Any], number: int
) -> tuple[Training, torch.Tensor]:
    """Sample and rotate the training queries of all query heads as an ingest does.

    Also TUNING_QUERIES of each query head that are not among them: (G, p, d).
    """
    d, tokens = info["head_dim"], info["tokens"]
    inv_freq = torch.from_numpy(info["rope_theta"] ** -(np.arange(0, d, 2) / d)).float()
    taken, spare, raw, all_raw = [], [], [], []
    for rows, at in zip(
        vectors[f"train_queries{number}"], vectors[f"train_positions{number}"], strict=True
    ):
        # The file holds a sample of all positions: take the nearest to those an ingest takes.
        order = np.argsort(at, kind="stable")
        wanted = np.searchsorted(at[order], sample_positions(tokens)).clip(max=len(at) - 1)
        chosen = order[np.unique(wanted)]
        others = np.setdiff1d(np.arange(len(at)), chosen)
        others = others[np.linspace(0, len(others) - 1, TUNING_QUERIES).astype(int)]
        others = others[np.argsort(at[others], kind="stable")]
        sparse = torch.zeros(1, tokens, d)
        sparse[0, at.astype(np.int64)] = torch.from_numpy(rows.astype(np.float32))
        for part, into in ((chosen, taken), (others, spare)):
            positions = at[part].astype(np.int64)
            turn = Rotation(inv_freq, d)
            into.append(rotated_queries(sparse, positions, turn, spread=DECODE_SPREAD)[0])
        raw.append(rows[chosen].astype(np.float32))
        all_raw.append(rows.astype(np.float32))
    rotated = tuple(queries.numpy() for queries in taken)
    return Training(rotated, tuple(raw), tuple(all_raw)), torch.stack(spare)
