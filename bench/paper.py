"""The paper's own index, its baseline RobustVamana, and our graph with one idea left out at a time.

Owns how queries are shared among a group and turned, or not. `paper`: a RoarGraph for each query
head, trained on that head's queries as they were, all that the file has; a query head attends to
what it found itself. `ours`, `ours-own`, `ours-raw`, `ours-own-raw`: openbook's graph and walk,
trained on the queries of the whole group or of each query head alone (`own`: as many graphs),
rotated to where decoding happens or as they were (`raw`), the number of queries the same; each with
its shortest queue of recall ≥ 0.95, and with `+estimate` too. The estimate of these scores the
centroids a second time; `graph`, which is `ours` as an ingest tunes it, does so once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from contenders import SEARCH_ARRAYS, Found, Ids, array_bytes, seek
from native import load
from numpy.typing import NDArray
from pairs import KEYS, Floats, Training
from rivals import lengthened, narrowed, with_zero
from roargraph import Graph, Lists, RoarGraph, make_graph

from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan
from openbook.worker.capture import NEIGHBOURS, exact_top_k

QUEUES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024, 1536)
VAMANA_LINKS, VAMANA_BEAM, VAMANA_ALPHA = 64, 128, 1.2  # R, L, alpha as OOD-DiskANN has them


class Paper:
    """A RoarGraph for every query head, from that head's queries unrotated."""

    name = "paper"
    variants: ClassVar[tuple[dict[str, Any], ...]] = RoarGraph.variants
    widths: ClassVar[tuple[int, ...]] = RoarGraph.widths
    shares = False

    def __init__(self, *, centred: bool) -> None:
        self._is_centred = centred

    def build(self, keys: Floats, training: Training) -> None:
        """Build one graph after the other; they share the keys."""
        self._keys, self._graphs = keys, []
        for queries in training.all_raw:
            self._graphs.append(RoarGraph(centred=self._is_centred))
            self._graphs[-1].build_on(keys, queries)

    def widen(self, width: int) -> None:
        """Set the length of every queue."""
        for graph in self._graphs:
            graph.widen(width)

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS), each query head's from its own graph."""
        found = [graph.search(queries[g : g + 1]) for g, graph in enumerate(self._graphs)]
        return np.concatenate(found)

    def counted(self) -> tuple[float | None, float]:
        """Return the distances computed."""
        counts = [graph.counted()[0] or 0.0 for graph in self._graphs]
        return sum(counts) / len(counts), 0.0

    def size_bytes(self) -> int:
        """Count the keys once, and every graph."""
        graphs = sum(graph.size_bytes() - self._keys.nbytes for graph in self._graphs)
        return graphs + self._keys.nbytes

    def build_parts_s(self) -> dict[str, float]:
        """Return the seconds of the exact neighbours and of the graphs."""
        parts = [graph.build_parts_s() for graph in self._graphs]
        return {name: sum(part[name] for part in parts) for name in parts[0]}


class RobustVamana(RoarGraph):
    """A Vamana graph of lengthened keys; rotated queries are nodes of it until it is built."""

    name = "robustvamana"
    variants = ({},)

    def __init__(self) -> None:
        super().__init__(centred=True)

    def graph_of(self, keys: Floats, queries: Floats) -> Graph:
        """Make the graph of centred keys; a query is as long as a key, to lie among them."""

        def link(keys: Floats, near: NDArray[np.uint32]) -> Lists:
            points = lengthened(keys)
            lengths = np.linalg.norm(queries, axis=1, keepdims=True)
            asked = with_zero(queries / lengths * np.linalg.norm(points[0]))
            rows = np.ascontiguousarray(np.concatenate([points, asked]), np.float32)
            ids, sizes, entry = load("_vamana").build(
                rows, near, VAMANA_LINKS, VAMANA_BEAM, VAMANA_ALPHA
            )
            starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
            return starts, ids[np.arange(ids.shape[1]) < sizes[:, None]], entry

        return make_graph(keys, queries, name="_vamana", link=link)


class OurGraph:
    """openbook's graph, trained on the queries of a group together, rotated: nothing left out."""

    name = "ours"
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    widths: ClassVar[tuple[int, ...]] = QUEUES
    shares = True
    is_rotated, is_own = True, False

    def build(self, keys: Floats, training: Training) -> None:
        """Build one graph, or one for every query head; their clusters are those of an ingest."""
        parts = training.rotated if self.is_rotated else training.raw
        moment = training.shared.T @ training.shared / np.float32(len(training.shared))
        self._heads = [
            graph_of(keys, queries, moment)
            for queries in (parts if self.is_own else (np.concatenate(parts),))
        ]
        self._width, self._scored = KEYS, 0.0

    def widen(self, width: int) -> None:
        """Set the length of the queue."""
        self._width = width

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        asked = np.split(queries, len(self._heads))  # one query each, or all
        found = [
            walk(head, part, self._width) for head, part in zip(self._heads, asked, strict=True)
        ]
        # Keys of one graph are distinct ones of the group; of several, one query head's.
        self._scored = sum(part.scored for part in found) / len(found)
        self._centroids = sum(part.centroids for part in found) / len(found)
        pairs = zip(self._heads, found, strict=True)
        return np.concatenate([head.places(part.ids) for head, part in pairs])

    def counted(self) -> tuple[float | None, float]:
        """Return the keys scored, and the centroids, by one walk."""
        return self._scored, self._centroids

    def size_bytes(self) -> int:
        """Count what walks read; graphs and entries for each, the rest once."""
        once = set(SEARCH_ARRAYS["graph"]) - {"graph", "entries"}
        graphs = sum(array_bytes(head, {"graph", "entries"}) for head in self._heads)
        return graphs + array_bytes(self._heads[0], once)

    def build_parts_s(self) -> dict[str, float]:
        """Only the whole is known."""
        return {}


def graph_of(keys: Floats, queries: Floats, moment: Floats) -> HeadIndex:
    """Build an index as an ingest does from queries (s, d), with clusters of another moment."""
    stored = narrowed(keys)
    near = exact_top_k(
        torch.from_numpy(queries), torch.from_numpy(keys), min(NEIGHBOURS, len(keys))
    )
    # The values are never read: the step has its own.
    return build_head(stored, stored, queries, near, params=IndexParams(), query_moment=moment)


def walk(head: HeadIndex, queries: Floats, queue: int) -> Found:
    """Walk the graph of a head for queries (g, d)."""
    plan, budget = HeadPlan("graph", queue), Budget(keys=KEYS, estimate=False)
    return seek(head, np.ascontiguousarray(queries), plan, budget=budget)


class OursOwn(OurGraph):
    """A graph for each query head."""

    name, is_own = "ours-own", True


class OursRaw(OurGraph):
    """Queries as they were."""

    name, is_rotated = "ours-raw", False


class OursOwnRaw(OurGraph):
    """Both, as the paper has it."""

    name, is_own, is_rotated = "ours-own-raw", True, False


class OurClusters:
    """What an ingest builds: clusters and codes, at rising reach with as many candidates."""

    name = "ours-clusters"
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    widths: ClassVar[tuple[int, ...]] = tuple(range(0, 325, 25))  # hundredths of a spread
    shares = True
    candidates = 300

    def build(self, keys: Floats, training: Training) -> None:
        """Build on the rotated queries of the whole group."""
        stored = narrowed(keys)
        self._head = build_head(stored, stored, training.shared, None, params=IndexParams())
        self._reach, self._counted = 0.0, (0.0, 0.0)

    def widen(self, width: int) -> None:
        """Set how many hundredths of a spread above its centroid a key is looked for."""
        self._reach = width / 100

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS), those of the keys as they were given."""
        plan = HeadPlan("clusters", self.candidates, reach=self._reach)
        budget = Budget(keys=KEYS, estimate=False)
        found = seek(self._head, queries, plan, budget=budget)
        self._counted = float(found.scored), float(found.centroids)
        return self._head.places(found.ids)

    def counted(self) -> tuple[float | None, float]:
        """Return the keys whose codes were looked up by any of the group, and the centroids."""
        return self._counted

    def size_bytes(self) -> int:
        """Count what a search reads."""
        return array_bytes(self._head, set(SEARCH_ARRAYS["clusters"]))

    def build_parts_s(self) -> dict[str, float]:
        """Only the whole is known."""
        return {}


PAPERS = {
    kind.name: kind
    for kind in (Paper, RobustVamana, OurGraph, OursOwn, OursRaw, OursOwnRaw, OurClusters)
}
