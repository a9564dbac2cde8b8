"""Clusters of one head's keys: where a search looks, and what stands for the keys not read.

Owns the metric of the queries, k-means, the order by cluster and the spreads. Keys that queries
cannot tell apart belong together, so distances are taken after K Σ^½, Σ the second moment of the
queries (docs/LOG.md: far fewer clusters do the work of plain L2 ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore import _build

RIDGE_MIN = 1e-3  # share of an even metric: keeps directions that no training query used
ITERATIONS = 4  # Lloyd steps; later ones move the error by less than its spread over seeds
SAMPLE_PER_CLUSTER = 8  # keys that the Lloyd steps look at; the last assignment takes all
TILE_FLOATS = 1 << 20  # 4 MiB of distances at a time


@dataclass(frozen=True, slots=True)
class Clusters:
    """A partition of m keys into c non-empty clusters."""

    cluster_of: NDArray[np.uint32]  # (m,)
    counts: NDArray[np.uint32]  # (c,)
    points: NDArray[np.float32]  # (m, d) the keys in the metric of the queries
    centres: NDArray[np.float32]  # (c, d) cluster means of `points`

    def in_order(self) -> tuple[Clusters, NDArray[np.uint32]]:
        """Return the same with the keys of a cluster side by side, and which key is where (m,)."""
        members = np.argsort(self.cluster_of, kind="stable").astype(np.uint32)
        points = np.ascontiguousarray(self.points[members])
        return Clusters(self.cluster_of[members], self.counts, points, self.centres), members

    def spreads(self, unit: float) -> NDArray[np.float32]:
        """Return (c,): how far scores of a cluster's keys lie from their mean's, root mean square.

        `unit` is the length that `query_metric` divided out.
        """
        squares = ((self.points - self.centres[self.cluster_of]) ** 2).sum(axis=1, keepdims=True)
        sums = group_sums(squares, self.cluster_of.astype(np.intp))[:, 0]
        return (np.sqrt(sums / self.counts) * unit).astype(np.float32)


def query_metric(moment: NDArray[np.float32], samples: int) -> tuple[NDArray[np.float32], float]:
    """Return Σ^½ / unit (d, d) of a second moment Σ (d, d) of `samples` queries, and its unit.

    Σ is shrunk towards an even metric that weighs as much as d queries: a few queries say little.

    A difference of keys, times unit Σ^½ / unit, has the length of the root mean square of its
    scores over the queries. A zero moment (no queries) gives the identity and a unit of one.
    """
    d = moment.shape[0]
    symmetric = (moment.astype(np.float64) + moment.T) / 2
    mean = np.trace(symmetric) / d
    if not mean > 0:
        return np.eye(d, dtype=np.float32), 1.0
    even = max(RIDGE_MIN, d / (d + samples))
    eigenvalues, vectors = np.linalg.eigh((1 - even) * symmetric / mean + even * np.eye(d))
    root = (vectors * np.sqrt(np.maximum(eigenvalues, even))) @ vectors.T
    return np.ascontiguousarray(root.astype(np.float32)), float(np.sqrt(mean))


def cluster_keys(
    keys: NDArray[np.float32], metric: NDArray[np.float32], count: int, *, seed: int
) -> Clusters:
    """Partition `keys` (m, d) into at most `count` clusters by k-means; deterministic for a seed.

    A cluster that loses its last key disappears, so identical keys make fewer clusters.
    """
    m = keys.shape[0]
    count = min(count, m)
    points = np.ascontiguousarray((keys - keys.mean(axis=0)) @ metric)
    rng = np.random.default_rng(seed)
    sample = points[np.sort(rng.choice(m, min(m, count * SAMPLE_PER_CLUSTER), replace=False))]
    centres = sample[np.sort(rng.choice(len(sample), count, replace=False))]
    for _ in range(ITERATIONS):
        centres, _ = _means(sample, nearest(sample, centres))
    centres, cluster_of = _means(points, nearest(points, centres))
    counts = np.bincount(cluster_of).astype(np.uint32)
    return Clusters(cluster_of.astype(np.uint32), counts, points, centres)


def nearest(points: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return for each point (m, d) the nearest centre (c, d) by L2, the lower id on a tie."""
    half_norms = (centres * centres).sum(axis=1) / 2  # (c,)
    tile = max(1, TILE_FLOATS // max(1, centres.shape[0]))
    chosen = np.empty(points.shape[0], np.intp)
    for first in range(0, points.shape[0], tile):
        affinity = points[first : first + tile] @ centres.T  # (tile, c)
        affinity -= half_norms
        chosen[first : first + tile] = affinity.argmax(axis=1)
    return chosen


def group_sums(rows: NDArray[np.float32], cluster_of: NDArray[np.intp]) -> NDArray[np.float32]:
    """Sum `rows` (m, d) by cluster, in double precision; ids from 0 to the largest."""
    return _build.group_sums(rows, cluster_of, int(cluster_of.max()) + 1)


def _means(
    points: NDArray[np.float32], cluster_of: NDArray[np.intp]
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Drop empty clusters, then return the means and the renumbered assignment."""
    used, renumbered = np.unique(cluster_of, return_inverse=True)
    counts = np.bincount(renumbered, minlength=len(used))
    means = group_sums(points, renumbered) / counts[:, None].astype(np.float32)
    return np.asarray(means, np.float32), renumbered
