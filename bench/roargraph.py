"""RoarGraph, whose projection of queries the paper borrows, as an index of the benchmark.

Owns its parameters, the exact neighbours of its training queries, and two ways to search its graph:
as released (float32, one sorted queue per query), and with openbook's kernels and layout (int8
keys, fixed degree, the group together). Both are trained on the same rotated queries of all query
heads as openbook's graph, in their favour: the paper does neither. The loops are in _roargraph.pyx.
A build takes most of a minute, so that graphs are kept in bench/out with the seconds they took.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from contenders import Ids, seek
from native import OUT, load, sources_of
from numpy.typing import NDArray
from pairs import KEYS, Floats, Training
from rivals import centred, narrowed

from openbook.indexstore.build import quantise_keys
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan
from openbook.worker.capture import exact_top_k

LISTED, LINKS, BEAM = 100, 35, 500  # N_q, M and L as released
WIDTHS = (100, 120, 140, 170, 200, 250, 300, 400, 500, 600, 800, 1200, 1600, 2400)
NO_BOUND = 1e9  # spreads: no key is skipped for its cluster


@dataclass(frozen=True)
class Graph:
    """Key i's out-neighbours are ids[starts[i]:starts[i + 1]]; every search starts at `entry`."""

    starts: NDArray[np.int64]  # (n + 1,)
    ids: NDArray[np.uint32]
    entry: int
    parts_s: dict[str, float]

    def padded(self) -> NDArray[np.uint32]:
        """Return the graph (n, most neighbours), a short list padded with the key itself."""
        sizes = np.diff(self.starts)
        rows = np.repeat(np.arange(len(sizes), dtype=np.uint32), max(1, int(sizes.max())))
        out = rows.reshape(len(sizes), -1)
        out[np.arange(out.shape[1]) < sizes[:, None]] = self.ids
        return out


Lists = tuple[NDArray[np.int64], NDArray[np.uint32], int]  # starts, ids, entry of a Graph


def roargraph_lists(keys: Floats, near: NDArray[np.uint32]) -> Lists:
    """Link keys (n, d) by the exact neighbours (s, LISTED) of training queries."""
    entry = int(((keys - keys.mean(axis=0)) ** 2).sum(axis=1).argmin())
    starts, ids = load("_roargraph").build(keys, near, LINKS, BEAM, entry)
    return starts, ids, entry


def make_graph(
    keys: Floats,
    queries: Floats,
    *,
    name: str = "_roargraph",
    link: Callable[[Floats, NDArray[np.uint32]], Lists] = roargraph_lists,
) -> Graph:
    """Build the graph of keys (n, d) from training queries (s, d), or read it from bench/out.

    `link` makes the lists from the keys and the queries' exact neighbours, with the loops of
    bench/<name>.pyx; a change of these builds anew.
    """
    digest = hashlib.sha256()
    for source in sources_of(name):
        digest.update(source.read_bytes())
    for part in (keys, queries, np.array([LISTED, LINKS, BEAM])):
        digest.update(np.ascontiguousarray(part).data)
    kept = OUT / f"{name}-{digest.hexdigest()[:24]}.npz"
    if kept.exists():
        with np.load(kept) as held:
            parts = {"neighbours": float(held["seconds"][0]), "graph": float(held["seconds"][1])}
            return Graph(held["starts"], held["ids"], int(held["entry"]), parts)
    begin = time.perf_counter()
    near = exact_top_k(torch.from_numpy(queries), torch.from_numpy(keys), min(LISTED, len(keys)))
    middle = time.perf_counter()
    starts, ids, entry = link(keys, near.astype(np.uint32))
    seconds = (middle - begin, time.perf_counter() - middle)
    OUT.mkdir(exist_ok=True)
    np.savez(kept, starts=starts, ids=ids, entry=entry, seconds=seconds)
    return Graph(starts, ids, entry, {"neighbours": seconds[0], "graph": seconds[1]})


class RoarGraph:
    """As released: float32, a sorted queue and stamps of who was visited, one query at a time.

    Also with the mean key taken off: it ranks the same, but other keys occlude each other.
    """

    name = "roargraph"
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"centred": False}, {"centred": True})
    widths: ClassVar[tuple[int, ...]] = WIDTHS
    shares = True

    def __init__(self, *, centred: bool) -> None:
        self._is_centred = centred
        self._loops = load("_roargraph")
        self._stamp, self._width, self._scored = np.uint32(1), KEYS, 0.0

    def build(self, keys: Floats, training: Training) -> None:
        """Build the graph on the rotated queries of all query heads."""
        self.build_on(keys, training.shared)

    def build_on(self, keys: Floats, queries: Floats) -> None:
        """Build the graph on given queries (s, d)."""
        self._keys = centred(keys) if self._is_centred else keys
        self._graph = self.graph_of(self._keys, queries)
        self._stamps = np.zeros(len(keys), np.uint32)

    def graph_of(self, keys: Floats, queries: Floats) -> Graph:
        """Make the graph."""
        return make_graph(keys, queries)

    def widen(self, width: int) -> None:
        """Set the length of the queue."""
        self._width = width

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        ids, scored = self._loops.search(
            self._keys, self._graph.starts, self._graph.ids, self._graph.entry, queries, KEYS,
            self._width, self._stamps, self._stamp,
        )  # fmt: skip
        self._stamp += np.uint32(len(queries))
        self._scored = scored / len(queries)
        return np.asarray(ids)

    def counted(self) -> tuple[float | None, float]:
        """Return the distances computed."""
        return self._scored, 0.0

    def size_bytes(self) -> int:
        """Count float32 keys, the lists and the stamps."""
        arrays = (self._keys, self._graph.starts, self._graph.ids, self._stamps)
        return sum(array.nbytes for array in arrays)

    def build_parts_s(self) -> dict[str, float]:
        """Return the seconds of the exact neighbours and of the graph."""
        return self._graph.parts_s


class RoarGraphInt8(RoarGraph):
    """The same graph in openbook's layout, walked by openbook's kernels from its one entry."""

    name = "roargraph-int8"

    def build_on(self, keys: Floats, queries: Floats) -> None:
        """Build the graph, then lay it out as a head whose keys are all in one cluster."""
        super().build_on(keys, queries)
        n, d = keys.shape
        stored = narrowed(keys)
        keys_int8, centre, scale = quantise_keys(keys)
        self._head = HeadIndex(
            keys=stored,
            values=stored,  # never read: the step has its own
            keys_int8=keys_int8,
            centre=centre,
            scale=scale,
            graph=self._graph.padded(),
            entries=np.full(2, self._graph.entry, np.uint32),
            centroids=keys.mean(axis=0, keepdims=True, dtype=np.float32),
            counts=np.array([n], np.uint32),
            value_sums=np.zeros((1, d), np.float32),
            cluster_of=np.zeros(n, np.uint32),
            spreads=np.ones(1, np.float32),
        )

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        plan, budget = HeadPlan("graph", self._width), Budget(keys=KEYS, estimate=False)
        found = seek(self._head, queries, plan, budget=budget, slack=NO_BOUND)
        self._scored = float(found.scored)  # distinct keys of the group, like ours
        return found.ids.astype(np.int64)

    def size_bytes(self) -> int:
        """Count int8 keys, the padded graph and what else a walk reads; exact keys are the KV's."""
        head = self._head
        arrays = (head.keys_int8, head.centre, head.scale, head.graph, head.cluster_of)
        return sum(array.nbytes for array in arrays)


ROARGRAPHS = {kind.name: kind for kind in (RoarGraph, RoarGraphInt8)}
