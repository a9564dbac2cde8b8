"""What takes part in the index benchmark: ways to answer one KV head's queries.

Owns what a contender must offer, our own kinds, and the step of an index that only finds ids. All
calls of openbook's search are in `seek`, those of its attention in `Ours`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from native import load
from numpy.typing import NDArray
from pairs import KEYS, Floats, Pair, Training

from openbook.indexstore import _attend, _search
from openbook.indexstore.attend import (
    LIFT_LOG_MAX,
    SEEDS_PER_HEAD,
    SLACK_SPREADS,
    attend,
    find,
)
from openbook.indexstore.head import (
    CODE_ARRAYS,
    EXACT,
    AttendRequest,
    AttendResult,
    Budget,
    HeadIndex,
    HeadPlan,
    LayerIndex,
)

OURS = ("clusters", "graph", "scan", "exact")
SEARCH_ARRAYS = {  # of a HeadIndex, that a kind reads to find keys
    "clusters": (*CODE_ARRAYS, "centroids", "counts"),
    "graph": ("keys_int8", "centre", "scale", "graph", "entries", "centroids", "cluster_of"),
    "scan": ("keys_int8", "centre", "scale"),
    "exact": (),
}
ESTIMATE_ARRAYS = ("centroids", "counts", "value_sums", "cluster_of", "spreads")
Ids = NDArray[Any]
_step = load("_step")


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: ids (G, KEYS), and the keys and centroids that it scored."""

    ids: Ids
    scored: int
    centroids: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One step of one KV head.

    `out` (G, dv): attention over the union of what the group found, with the estimate of the rest
    if it was asked for. `scored`: keys scored, None where a library does not count them.
    `centroids`: those scored.
    """

    out: Floats
    scored: float | None
    centroids: float


class Contender(Protocol):
    """A way to answer the queries of one KV head."""

    setting: str  # what was tuned, for the reader
    build_s: float
    estimates: bool  # whether a step stands in for the keys it does not read
    searches: bool  # whether it has a search that can be timed alone

    def search(self, queries: Floats) -> Ids:
        """Find the best keys of each of the queries (G, d)."""

    def step(self, queries: Floats, *, estimate: bool) -> Answer:
        """Search and attend, as one step of one KV head does."""

    def prepare(self) -> None:
        """Set what other contenders that share an index may have set otherwise; never timed."""

    def size_bytes(self) -> int:
        """Return the bytes held besides the 16-bit keys and values of the KV cache itself."""


def seek(
    head: HeadIndex,
    queries: Floats,
    plan: HeadPlan,
    *,
    budget: Budget,
    slack: float = SLACK_SPREADS,
) -> Found:
    """Find the ids of queries (G, d) as a plan says, without attention.

    `slack` is of a walk: how far below the best a cluster is still looked at.
    """
    scaling = queries.shape[1] ** -0.5
    if plan.kind == "clusters":
        ids, _, _, means, scored = find(head, queries, budget, plan, scaling=scaling)
    else:
        ids, _, _, means, scored = _search.find(
            head, queries, scaling, budget.keys, plan.kind == "graph", plan.queue, False,
            SEEDS_PER_HEAD, slack,
        )  # fmt: skip
    return Found(ids, scored, means.shape[1])


def array_bytes(head: HeadIndex, names: set[str]) -> int:
    """Return the bytes of some arrays of a HeadIndex."""
    return sum(getattr(head, name).nbytes for name in names)


class Ours:
    """One of openbook's own kinds, built and tuned by an ingest: no test query has a say."""

    def __init__(self, pair: Pair, kind: str) -> None:
        self._head, self._kind = pair.head, kind
        self.estimates = self.searches = kind != "exact"
        plans = {str(name): (plan, pair.build_s[name]) for name, plan in pair.plans.items()}
        self._plan, self.build_s = plans.get(kind, (HeadPlan("scan", 0), 0.0))
        self._layer = LayerIndex((self._head,), (self._plan,))
        self._budget = EXACT if kind == "exact" else Budget(keys=KEYS)
        self.keys_read: list[int] = []  # by each step, distinct ones
        self.by_layer = True  # all heads of a layer in one call
        queue, reach = self._plan.queue, self._plan.reach
        words = {"graph": f"queue {queue}", "clusters": f"candidates {queue} reach {reach}"}
        self.setting = words.get(kind, "")

    def prepare(self) -> None:
        """Nothing is shared."""

    def search(self, queries: Floats) -> Ids:
        """Find ids (G, KEYS) without attention, and but for `clusters` without centroids."""
        budget = Budget(keys=KEYS, estimate=False)
        return seek(self._head, queries, self._plan, budget=budget).ids

    def step(self, queries: Floats, *, estimate: bool) -> Answer:
        """Search and attend in openbook's one call."""
        budget = replace(self._budget, estimate=estimate and self.estimates)
        found = _attended(self._layer, queries, budget)
        if estimate == self.estimates:
            self.keys_read.append(found.keys_read)
        return Answer(found.out[:, 0], found.keys_scored, found.centroids_scored)

    @staticmethod
    def as_layer(heads: Sequence[Ours]) -> Callable[[Floats], AttendResult]:
        """Return what answers queries (H, G, d) of these heads in one call, as decoding does."""
        layer = LayerIndex(tuple(one._head for one in heads), tuple(one._plan for one in heads))
        budget = replace(heads[0]._budget, estimate=heads[0].estimates)
        return lambda queries: _attended(layer, queries.reshape(-1, queries.shape[-1]), budget)

    def size_bytes(self) -> int:
        """Count the arrays that the kind reads, those of the estimate with them."""
        names = set(SEARCH_ARRAYS[self._kind])
        return array_bytes(self._head, names | set(ESTIMATE_ARRAYS if self.estimates else ()))


def _attended(layer: LayerIndex, queries: Floats, budget: Budget) -> AttendResult:
    """Answer one step of queries (query heads, d)."""
    (result,) = attend([AttendRequest(layer, queries[:, None], queries.shape[1] ** -0.5, budget)])
    return result


class Index(Protocol):
    """An index that finds the best keys by inner product: a library's, or a paper's.

    `variants` are what a build may be told; `widths`, rising, what a search may be told without
    another build. `shares`: whether a query head attends to what all its group found, as ours do.
    """

    name: ClassVar[str]
    variants: ClassVar[tuple[dict[str, Any], ...]]
    widths: ClassVar[tuple[int, ...]]
    shares: ClassVar[bool]

    def build(self, keys: Floats, training: Training) -> None:
        """Build the index."""

    def widen(self, width: int) -> None:
        """Set how much of the index a search looks at."""

    def search(self, queries: Floats) -> Ids:
        """Return the best ids (G, KEYS) of queries (G, d), int64, negative where none."""

    def counted(self) -> tuple[float | None, float]:
        """Return keys and centroids that the last search scored, per query of it."""

    def size_bytes(self) -> int:
        """Return the bytes of all that it holds, its own copy of the keys with them."""

    def build_parts_s(self) -> dict[str, float]:
        """Return the seconds of the build by its parts; nothing where only the whole is known."""


class Rival:
    """An index at one width, with the step around it: our attention, and our estimate if asked.

    Like our own kinds, a query head attends to all keys that its group found.
    """

    searches = True

    def __init__(
        self, pair: Pair, index: Index, *, width: int | None, setting: str, build_s: float,
        estimates: bool = False,
    ) -> None:  # fmt: skip
        self._pair, self._index, self._width = pair, index, width
        self.setting, self.build_s, self.estimates = setting, build_s, estimates
        self._lift = np.array(pair.plans["clusters"].lift, np.float32) * np.float32(pair.scaling**2)

    def with_estimate(self) -> Rival:
        """Return the same index whose steps take our clusters for the keys not read."""
        return Rival(
            self._pair, self._index, width=self._width, setting=self.setting, build_s=self.build_s,
            estimates=True,
        )  # fmt: skip

    def prepare(self) -> None:
        """Set the width."""
        if self._width is not None:
            self._index.widen(self._width)

    def search(self, queries: Floats) -> Ids:
        """Find ids (G, KEYS)."""
        return self._index.search(queries)

    def step(self, queries: Floats, *, estimate: bool) -> Answer:
        """Search, then attend to the union, or each query head to its own."""
        ids = self._index.search(queries)
        scored, centroids = self._index.counted()
        if self._index.shares:
            out, means = self._attended(queries, ids, slice(None), estimate=estimate)
        else:
            rows = [slice(head, head + 1) for head in range(len(queries))]
            parts = [self._attended(queries[r], ids[r], r, estimate=estimate) for r in rows]
            out, means = np.concatenate([part for part, _ in parts]), parts[0][1]
        return Answer(out, scored, centroids + means)

    def _attended(
        self, queries: Floats, ids: Ids, rows: slice, *, estimate: bool
    ) -> tuple[Floats, int]:
        """Attend to all of `ids` (g, w) with queries (g, d) of the query heads `rows`.

        Returns out (g, dv) and the number of centroids scored.
        """
        head, scaling = self._pair.head, self._pair.scaling
        read = _step.union(np.ascontiguousarray(ids, np.int64), head.middle_tokens)
        logits = _step.score(head, queries, read, scaling)
        means = np.zeros((len(queries), 0), np.float32)
        lift = None
        if estimate:
            means = _step.score_centroids(head, queries, scaling)
            lift = self._lift[rows] if len(self._lift) else None
        out, _, _ = _attend.attend_read(head, read, logits, means, estimate, lift, LIFT_LOG_MAX)
        return out, means.shape[1]

    def size_bytes(self) -> int:
        """Count the index, and our clusters where its steps use them."""
        ours = array_bytes(self._pair.head, set(ESTIMATE_ARRAYS)) if self.estimates else 0
        return self._index.size_bytes() + ours
