"""Measure the index on captured vectors: recall, keys scored, time, output error, per head.

    python bench/index.py --vectors FILE [--heads 0,1,…] [--out FILE.json]

FILE is an .npz with, for each pair i (one KV head of one layer; d numbers a key, G query heads):
keys{i}, values{i} (n, d) float16, the middle; train_queries{i} (G, m, d) with train_positions{i}
(G, m); test_queries{i} (G, t, d) with test_positions{i}; info, a JSON string with tokens and
rope_theta. Queries and keys are after RoPE in the half-split layout.

The index, its plan and its lift are made exactly as an ingest makes them, from training queries;
the plan is tuned and the lift fitted on others of the training part. Times are medians over
alternating rounds, the heads taken round robin so that keys come from memory, one thread. The last
line is one JSON object. `scored` counts distinct keys touched per KV head, `centroids` those of the
estimate, both as shares of all tokens; errors are relative L2 to exact attention over the middle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from openbook.indexstore.attend import HeadResult, search
from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan
from openbook.indexstore.lift import fit_lift
from openbook.indexstore.plan import QUEUE_NODES, tune_plan
from openbook.worker.capture import (
    DECODE_SPREAD,
    NEIGHBOURS,
    exact_top_k,
    rotated_queries,
    sample_positions,
)
from openbook.worker.indexing import PROBES, TUNING_QUERIES
from openbook.worker.models import Rotation

KEYS = 100
ROUNDS = 5
Floats = NDArray[np.float32]
KINDS = ("graph", "scan")


@dataclass
class Pair:
    """One KV head: its index, its test queries, and what exact search and attention say."""

    name: str
    head: HeadIndex
    plan: HeadPlan  # of a walk; its kind is what an ingest would choose
    tests: Floats  # (t, G, d)
    bars: Floats  # (t, G) the score of the KEYS-th best key
    exact_out: Floats  # (t, G, dv) attention over the whole middle
    build_s: float


def main() -> None:
    """Parse the arguments, measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--heads", help="comma-separated pair numbers; all without it")
    parser.add_argument("--queries", type=int, default=128, help="test queries per query head")
    parser.add_argument("--out", type=Path, help="also write the JSON here, per head too")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with np.load(arguments.vectors) as vectors:
        info = json.loads(str(vectors["info"]))
        chosen = range(len(info["pairs"]))
        if arguments.heads:
            chosen = [int(number) for number in arguments.heads.split(",")]
        pairs = [read_pair(vectors, info, number, arguments.queries) for number in chosen]
    print(f"{'head':>12} {'kind':>6} {'recall':>7} {'scored':>7} {'centr.':>7} {'us':>8}"
          f" {'build s':>8} {'error':>7} {'plain':>7}")  # fmt: skip
    times = measure_times(pairs)
    rows = [
        {"head": pair.name, "kind": kind, **measure(pair, kind, info["tokens"]), "us": us}
        for pair, row in zip(pairs, times, strict=True)
        for kind, us in zip(KINDS, row, strict=True)
    ]
    for row in rows:
        print(line(row))
    print(
        "an ingest would walk", sum(pair.plan.kind == "graph" for pair in pairs), "of", len(pairs)
    )
    names = ("recall", "scored", "centroids", "us", "build_s", "error", "error_plain")
    mean = {
        kind: {n: statistics.fmean(r[n] for r in rows if r["kind"] == kind) for n in names}
        for kind in KINDS
    }
    for kind in KINDS:
        print(line({"head": "mean", "kind": kind, **mean[kind]}))
    if arguments.out:
        arguments.out.write_text(json.dumps({"heads": rows, "mean": mean}, indent=1) + "\n")
    print(json.dumps({"mean": mean}))


def read_pair(vectors: Any, info: dict[str, Any], number: int, queries: int) -> Pair:
    """Build the index of pair `number` as an ingest would, and its exact answers."""
    keys, values = vectors[f"keys{number}"], vectors[f"values{number}"]
    tests = np.moveaxis(vectors[f"test_queries{number}"], 0, 1)[:queries].astype(np.float32)
    begin = time.perf_counter()
    training, spare = training_queries(vectors, info, number)
    wide = torch.from_numpy(to_float32(keys))
    neighbours = exact_top_k(training, wide, min(NEIGHBOURS, len(keys)))
    head = build_head(keys, values, training.numpy(), neighbours, params=IndexParams())
    plan = plan_of(head, spare, wide, info["head_dim"] ** -0.5)
    build_s = time.perf_counter() - begin
    scores = tests @ to_float32(keys).T  # (t, G, n)
    bars = np.partition(scores, -KEYS, axis=2)[..., -KEYS] - 1e-6
    logits = scores / info["head_dim"] ** 0.5
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    exact_out = weights @ to_float32(values) / weights.sum(axis=2, keepdims=True)
    at = info["pairs"][number]
    name = f"L{at['layer']} h{at['kv_head']}"
    return Pair(name, head, plan, np.ascontiguousarray(tests), bars, exact_out, build_s)


def plan_of(head: HeadIndex, spare: torch.Tensor, keys: torch.Tensor, scaling: float) -> HeadPlan:
    """Tune a walk and fit its lift on queries (G, p, d) that trained nothing, as an ingest does."""
    queries = spare.numpy()
    wanted = exact_top_k(spare.flatten(0, 1), keys, KEYS).reshape(*queries.shape[:2], KEYS)
    (plan,) = tune_plan((HeadPlan("graph", QUEUE_NODES),), (head,), queries, wanted)
    probes = spare[:, :: TUNING_QUERIES // PROBES]
    lse = torch.logsumexp(scaling * (probes @ keys.T), dim=2).numpy()
    lift = fit_lift(head, probes.numpy(), lse, plan=plan, scaling=scaling)
    return HeadPlan(plan.kind, plan.queue, lift)


def training_queries(
    vectors: Any, info: dict[str, Any], number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample and rotate the training queries of all query heads as an ingest does: (s, d).

    Also TUNING_QUERIES of each query head that are not among them: (G, p, d).
    """
    d, tokens = info["head_dim"], info["tokens"]
    inv_freq = torch.from_numpy(info["rope_theta"] ** -(np.arange(0, d, 2) / d)).float()
    taken, spare = [], []
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
    return torch.cat(taken), torch.stack(spare)


def ask(pair: Pair, query: int, kind: str, *, estimate: bool = True) -> HeadResult:
    """Search and attend for all query heads of one test position."""
    plan = HeadPlan("graph" if kind == "graph" else "scan", pair.plan.queue, pair.plan.lift)
    return search(pair.head, pair.tests[query], Budget(keys=KEYS, estimate=estimate), plan)


def measure(pair: Pair, kind: str, tokens: int) -> dict[str, float]:
    """Return recall, shares scored and output errors of one head, means over its queries."""
    keys = to_float32(pair.head.keys)
    recalls, scored, centroids = [], [], []
    errors: dict[bool, list[float]] = {True: [], False: []}
    for query in range(len(pair.tests)):
        for estimate in (True, False):
            found = ask(pair, query, kind, estimate=estimate)
            gap = np.linalg.norm(found.out[:, 0] - pair.exact_out[query], axis=1)
            errors[estimate].extend(gap / np.linalg.norm(pair.exact_out[query], axis=1))
            if estimate:
                scores = np.einsum("gkd,gd->gk", keys[found.top], pair.tests[query])
                recalls.extend((scores >= pair.bars[query][:, None]).mean(axis=1))
                scored.append(found.keys_scored / tokens)
                centroids.append(found.centroids_scored / tokens)
    return {
        "recall": float(np.mean(recalls)),
        "scored": float(np.mean(scored)),
        "centroids": float(np.mean(centroids)),
        "build_s": pair.build_s,
        "error": float(np.mean(errors[True])),
        "error_plain": float(np.mean(errors[False])),
    }


def measure_times(pairs: list[Pair]) -> list[list[float]]:
    """Return microseconds per query head for each pair and kind: median of alternating rounds."""
    spent = np.zeros((ROUNDS, len(pairs), len(KINDS)))
    count = len(pairs[0].tests)
    for turn in range(ROUNDS):
        for kind_number, kind in enumerate(KINDS):
            for query in range(turn, count, ROUNDS):
                for number, pair in enumerate(pairs):
                    begin = time.perf_counter()
                    ask(pair, query, kind)
                    spent[turn, number, kind_number] += time.perf_counter() - begin
        spent[turn] *= 1e6 / len(range(turn, count, ROUNDS)) / pairs[0].tests.shape[1]
    medians: list[list[float]] = np.median(spent, axis=0).tolist()
    return medians


def line(row: dict[str, Any]) -> str:
    """Format one row of the table."""
    return (
        f"{row['head']:>12} {row['kind']:>6} {row['recall']:7.4f} {row['scored']:7.4f}"
        f" {row['centroids']:7.4f} {row['us']:8.1f} {row['build_s']:8.2f} {row['error']:7.4f}"
        f" {row['error_plain']:7.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
