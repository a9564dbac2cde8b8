"""The plain twins of the build's kernels; those of its codes are in reference_probe.py.

Owns no speed at all; tests compare _build.pyx with these, id by id.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]


def group_sums(
    rows: NDArray[np.float32], cluster_of: NDArray[np.intp], count: int
) -> NDArray[np.float32]:
    """Twin of _build.group_sums."""
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, cluster_of, rows)
    return sums.astype(np.float32)


def companions(
    neighbours: NDArray[np.int32],
    m: int,
    limits: tuple[int, int, int],
    discount: NDArray[np.float32],
) -> Ids:
    """Twin of _build.companions; limits are (width, occurrences_max, span)."""
    width, occurrences_max, span = limits
    s, k = neighbours.shape
    out = np.repeat(np.arange(m, dtype=np.uint32)[:, None], width, axis=1)
    for x in range(m):
        found = [(q, r) for r in range(k) for q in range(s) if neighbours[q, r] == x]
        weights: dict[int, np.float32] = {}
        for q, r in found[:occurrences_max]:
            for y in neighbours[q, max(0, r - span) : r + span + 1]:
                if y != x:
                    weights[int(y)] = np.float32(weights.get(int(y), 0) + discount[y])
        best = sorted(weights, key=lambda y: -weights[y])[:width]  # stable: first met stays first
        out[x, : len(best)] = best
    return out


def near_keys(
    points: NDArray[np.float32], cluster_of: Ids, near_clusters: Ids, width: int, pool_max: int
) -> Ids:
    """Twin of _build.near_keys, from the assignment itself."""
    m = len(points)
    out = np.repeat(np.arange(m, dtype=np.uint32)[:, None], width, axis=1)
    members = [np.flatnonzero(cluster_of == c) for c in range(len(near_clusters))]
    half_norms = (points * points).sum(axis=1) / 2
    for c, mine in enumerate(members):
        for rank, x in enumerate(mine):
            pool: list[int] = []
            for other in near_clusters[c]:
                size = len(members[other])
                pool += [int(members[other][(rank + i) % size]) for i in range(min(size, pool_max))]
            affinity = points[pool] @ points[x] - half_norms[pool]
            order = np.argsort(-affinity, kind="stable")
            best = [pool[i] for i in order if pool[i] != x][:width]
            out[x, : len(best)] = best
    return out


def link(
    wanted: Ids, near: Ids, degree: int, spare: int, firsts: tuple[int, int]
) -> tuple[Ids, NDArray[np.int64]]:
    """Twin of _build.link; firsts are (wanted_first, near_first)."""
    m = len(wanted)
    rows: list[list[int]] = [[] for _ in range(m)]

    def add(x: int, y: int) -> None:
        if x != y and y not in rows[x] and len(rows[x]) < degree - spare:
            rows[x].append(y)

    for x in range(m):
        for y in [*wanted[x, : firsts[0]], *near[x, : firsts[1]]]:
            add(x, int(y))
    for side in (wanted, near):
        for rank in range(side.shape[1]):
            for x in range(m):
                add(int(side[x, rank]), x)
    for x in range(m):
        for y in [*wanted[x], *near[x]]:
            add(x, int(y))
    graph = np.repeat(np.arange(m, dtype=np.uint32)[:, None], degree, axis=1)
    for x, row in enumerate(rows):
        graph[x, : len(row)] = row
    return graph, np.array([len(row) for row in rows], np.int64)


def flood(graph: Ids, start: int, reached: dict[int, None]) -> None:
    """Add to `reached`, in breadth-first order, what `start` leads to."""
    reached[start] = None
    todo = deque([start])
    while todo:
        for key in graph[todo.popleft()]:
            if int(key) not in reached:
                reached[int(key)] = None
                todo.append(int(key))


def repair(graph: Ids, sizes: NDArray[np.int64], near: Ids, entry: int) -> int:
    """Twin of _build.repair: changes `graph` and `sizes`, returns how many keys it linked."""
    degree, repaired = graph.shape[1], 0
    reached: dict[int, None] = {}
    flood(graph, entry, reached)
    for x in range(len(graph)):
        if x in reached:
            continue
        hosts = [int(y) for y in near[x] if int(y) in reached and sizes[y] < degree]
        host = hosts[0] if hosts else next(y for y in reached if sizes[y] < degree)
        graph[host, sizes[host]] = x
        sizes[host] += 1
        repaired += 1
        flood(graph, x, reached)
    return repaired
