"""A cluster index in the manner of RetroInfer (arXiv 2505.02922), with openbook's kernels.

Owns its clusters and its step. Centred keys of a segment of the document are put into clusters of
16 by spherical k-means and stored cluster after cluster. A query head retrieves the clusters whose
mean key scores best, whole: no key is chosen from them. All other clusters are estimated, where the
original estimates the next 23% and drops the rest: in its favour. `width` is the clusters that each
query head retrieves; the group attends to the union.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from contenders import ESTIMATE_ARRAYS, Answer, Ids, Rival, array_bytes
from native import load
from numpy.typing import NDArray
from pairs import Floats, Pair, Training
from rivals import centred, narrowed

from openbook.indexstore import _attend
from openbook.indexstore.clusters import group_sums
from openbook.indexstore.head import HeadIndex, Stored

SEGMENT_KEYS = 8192  # clustered by themselves; of the paper
KEYS_PER_CLUSTER = 16  # of the paper
ITERATIONS = 10  # of its released code
RETRIEVED_SHARE = 0.018  # of the clusters; the paper's budget
_step = load("_step")


def spherical_clusters(keys: Floats, count: int, *, seed: int) -> NDArray[np.intp]:
    """Return the cluster of each of some keys (m, d): `count` or fewer, by the angle of keys."""
    lengths = np.linalg.norm(keys, axis=1, keepdims=True)
    units = keys / np.maximum(lengths, np.finfo(np.float32).tiny)
    rng = np.random.default_rng(seed)
    means = units[np.sort(rng.choice(len(units), count, replace=False))]
    cluster_of = (units @ means.T).argmax(axis=1)
    for _ in range(ITERATIONS):
        used, cluster_of = np.unique(cluster_of, return_inverse=True)
        means = group_sums(units, cluster_of)
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-20)
        cluster_of = (units @ means.T).argmax(axis=1)
    return np.unique(cluster_of, return_inverse=True)[1]


class RetroStep(Rival):
    """The index with the values beside its keys, and its own estimate."""

    def __init__(self, pair: Pair, index: RetroInfer, **more: Any) -> None:
        super().__init__(pair, index, **(more | {"estimates": True}))
        self._retro = index
        self._retro.take_values(pair.head.values)

    def step(self, queries: Floats, *, estimate: bool) -> Answer:
        """Retrieve whole clusters and attend to them, the others estimated if asked."""
        retro, scaling = self._retro, self._pair.scaling
        read, means = retro.retrieve(queries, scaling)
        logits = _step.score(retro.head, queries, read, scaling)
        out, _, _ = _attend.attend_read(retro.head, read, logits, means, estimate)
        scored, centroids = retro.counted()
        return Answer(out, scored, centroids)

    def size_bytes(self) -> int:
        """Count its own clusters; ours are not used."""
        return self._retro.size_bytes()


class RetroInfer:
    """Clusters of one KV head's keys, retrieved whole."""

    name = "retroinfer"
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    widths: ClassVar[tuple[int, ...]] = (8, 16, 24, 36, 48, 64, 96, 128, 192, 256, 384, 512, 768)
    shares = True
    contender = RetroStep
    head: HeadIndex

    def build(self, keys: Floats, training: Training) -> None:
        """Cluster the keys (m, d); the queries teach it nothing."""
        m, d = keys.shape
        around = centred(keys)
        clusters, count = np.empty(m, np.intp), 0
        for first in range(0, m, SEGMENT_KEYS):
            part = around[first : first + SEGMENT_KEYS]
            mine = spherical_clusters(part, -(-len(part) // KEYS_PER_CLUSTER), seed=first)
            clusters[first : first + SEGMENT_KEYS] = mine + count
            count += int(mine.max()) + 1
        self._order = np.argsort(clusters, kind="stable")
        cluster_of = clusters[self._order]
        rows = np.ascontiguousarray(keys[self._order])
        counts = np.bincount(cluster_of)
        self._starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        stored = narrowed(rows)
        self.head = HeadIndex(
            keys=stored,
            values=stored,  # until take_values
            centroids=narrowed(group_sums(rows, cluster_of) / counts[:, None].astype(np.float32)),
            counts=counts.astype(np.uint32),
            value_sums=np.zeros((count, d), np.float32),
            cluster_of=cluster_of.astype(np.uint32),
            spreads=np.zeros(count, np.float32),
        )
        self.usual_width = round(RETRIEVED_SHARE * count)
        self._width, self._scored = self.usual_width, 0.0

    def take_values(self, values: Stored) -> None:
        """Lay the values (m, dv) beside the keys, and sum them by cluster."""
        rows = np.ascontiguousarray(values[self._order])
        sums = group_sums(rows.astype(np.float32), self.head.cluster_of.astype(np.intp))
        self.head = replace(self.head, values=rows, value_sums=narrowed(sums))

    def widen(self, width: int) -> None:
        """Set how many clusters a query head retrieves."""
        self._width = width

    def retrieve(self, queries: Floats, scaling: float) -> tuple[NDArray[np.uint32], Floats]:
        """Return the keys of the best clusters, in its own order (r,), and centroid logits."""
        means = _step.score_centroids(self.head, queries, scaling)
        read = _step.keys_of_best(means, self._starts, self._width)
        self._scored = float(len(read))
        return read, means

    def search(self, queries: Floats) -> Ids:
        """Return the ids (G, r) of all keys that the group retrieves."""
        read, _ = self.retrieve(queries, queries.shape[1] ** -0.5)
        return self.ids_of(read, len(queries))

    def ids_of(self, read: NDArray[np.uint32], group: int) -> Ids:
        """Return the ids of keys in its own order for each of a group: (group, r)."""
        return np.broadcast_to(self._order[read], (group, len(read)))

    def counted(self) -> tuple[float | None, float]:
        """Return the distinct keys that the group retrieved, and all centroids."""
        return self._scored, float(len(self.head.counts))

    def size_bytes(self) -> int:
        """Count the clusters and where they start; the keys are the KV cache's, in its order."""
        arrays = set(ESTIMATE_ARRAYS) - {"spreads"}
        return array_bytes(self.head, arrays) + int(self._starts.nbytes + self._order.nbytes)

    def build_parts_s(self) -> dict[str, float]:
        """Only the whole is known."""
        return {}


CLUSTERS = {RetroInfer.name: RetroInfer}
