"""The query-aware graph of one head: whom training queries want together, and who is alike.

Owns what an edge is. Two kinds: *companions*, keys that the same training queries want (the
bipartite projection of RetrievalAttention §3.2, with every list merged instead of the last one
kept), and *near* keys in the metric of the queries, which serve the keys no training query wanted.
The loops are in _build.pyx.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore import _build
from openbook.indexstore.clusters import TILE_FLOATS, Clusters

SPARE_SLOTS = 2  # per key, so that repair always finds a host: each repaired key brings its own
OCCURRENCES_MAX = 64  # lists looked at per key; more of a popular key's lists say the same
RANK_SPAN = 32  # ranks either side in a list; keys further apart are wanted by chance
POPULARITY_POWER = 0.25  # a companion's weight falls with this power of how often it is wanted
NEAR_CLUSTERS = 8  # clusters searched for near keys
POOL_MAX = 128  # members of one cluster that a key looks at: bounds identical keys


def build_graph(
    clusters: Clusters, neighbours: NDArray[np.int32], *, entry: int, degree: int
) -> NDArray[np.uint32]:
    """Return the graph (m, degree): row i lists out-neighbours of key i, padded with i.

    `neighbours` (s, k) are the ids of each training query's best keys, best first; s may be 0.
    Every key is reachable from `entry`. Deterministic: ties go to the lower id or earlier rank.
    """
    m = len(clusters.points)
    popularity = np.bincount(neighbours.reshape(-1), minlength=m)  # (m,)
    discount = np.maximum(popularity, 1).astype(np.float64) ** -POPULARITY_POWER
    wanted = _build.companions(
        np.ascontiguousarray(neighbours, np.int32), m, degree, OCCURRENCES_MAX, RANK_SPAN,
        discount.astype(np.float32),
    )  # fmt: skip
    near = near_keys(clusters, width=degree * 3 // 4)
    graph, sizes = _build.link(wanted, near, degree, SPARE_SLOTS, degree // 2 - 2, degree // 4)
    _build.repair(graph, sizes, near, entry)
    return graph


def near_keys(clusters: Clusters, *, width: int) -> NDArray[np.uint32]:
    """Return for each key its nearest others (m, width) by L2 of `clusters.points`."""
    points, cluster_of = clusters.points, clusters.cluster_of
    order = np.argsort(cluster_of, kind="stable").astype(np.uint32)
    starts = np.concatenate(([0], np.cumsum(clusters.counts, dtype=np.int64)))
    half_norms = ((points * points).sum(axis=1) / 2).astype(np.float32)
    return _build.near_keys(
        points, half_norms, order, starts, _near_clusters(clusters.centres), width, POOL_MAX
    )


def reachable_keys(graph: NDArray[np.uint32], entry: int) -> int:
    """Count the keys that a walk from `entry` can reach, itself included."""
    return _build.reachable(graph, entry)


def _near_clusters(centres: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return each cluster followed by the nearest others, (c, NEAR_CLUSTERS or fewer)."""
    count = min(NEAR_CLUSTERS, len(centres))
    half_norms = (centres * centres).sum(axis=1) / 2
    tile = max(1, TILE_FLOATS // len(centres))
    near = np.empty((len(centres), count), np.uint32)
    for first in range(0, len(centres), tile):
        rows = np.arange(first, min(first + tile, len(centres)))
        distance = half_norms - centres[rows] @ centres.T  # (tile, c)
        distance[rows - first, rows] = -np.inf
        near[rows] = np.argsort(distance, axis=1, kind="stable")[:, :count]
    return near
