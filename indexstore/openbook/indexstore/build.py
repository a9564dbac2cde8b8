"""Build one KV head's index: clusters, codes of its keys and, if asked for, the graph.

Owns the order of the steps and the checks. Arrays in, arrays out: what a graph is made of, the
exact neighbours of the training queries, comes from the caller, who has the model's device.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from openbook.indexstore.clusters import Clusters, cluster_keys, group_sums, query_metric
from openbook.indexstore.codes import code_keys
from openbook.indexstore.dtypes import fits, to_float32, to_stored
from openbook.indexstore.graph import build_graph
from openbook.indexstore.head import HeadIndex, Stored


@dataclass(frozen=True, slots=True)
class IndexParams:
    """What decides an index besides its data; the index fingerprint is made of it."""

    kind: str = "query-clusters"
    degree: int = 32  # out-neighbours per key, where a graph is built
    keys_per_cluster: int = 16
    clusters_max: int = 4096  # per head; beyond it clusters grow, so that their scan stays small
    seed: int = 0

    def __post_init__(self) -> None:
        if not 4 <= self.degree <= 256:
            raise ValueError(f"degree must be 4 to 256, got {self.degree}")
        for name in ("keys_per_cluster", "clusters_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def fingerprint(self) -> str:
        """Return the SHA-256 of the parameters, 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def build_head(
    keys: Stored,
    values: Stored,
    queries: NDArray[np.float32],
    neighbours: NDArray[np.int32] | None,
    *,
    params: IndexParams,
    query_moment: NDArray[np.float32] | None = None,
) -> HeadIndex:
    """Build the index of one KV head's middle, whose keys and values it puts in cluster order.

    `keys` (m, d) and `values` (m, dv) as stored, m ≥ 1. `queries` (s, d): training queries of all
    query heads of the group, rotated to the decode position. `neighbours` (s, k), the ids of each
    one's best keys by inner product, best first, are what a graph is made of: without them the
    head has none. `query_moment` (d, d) defaults to that of `queries`. Deterministic for
    params.seed. Raises ValueError naming the position of a NaN or infinite key, or the id that is
    out of range.
    """
    keys_wide, values_wide = to_float32(keys), to_float32(values)
    _check(keys_wide, values_wide, queries, neighbours)
    m, d = keys_wide.shape
    if query_moment is None:
        query_moment = queries.T @ queries / np.float32(max(1, len(queries)))  # (d, d)
    metric, unit = query_metric(query_moment, len(queries))
    count = min(-(-m // params.keys_per_cluster), params.clusters_max)
    clusters, members = cluster_keys(keys_wide, metric, count, seed=params.seed).in_order()
    keys, values = np.ascontiguousarray(keys[members]), np.ascontiguousarray(values[members])
    keys_wide, values_wide = to_float32(keys), to_float32(values)
    cluster_ids = clusters.cluster_of.astype(np.intp)
    sizes = clusters.counts[:, None].astype(np.float32)
    centroids = _narrowed(np.asarray(group_sums(keys_wide, cluster_ids) / sizes, np.float32))
    coded = code_keys(keys_wide, to_float32(centroids), clusters, metric, unit, seed=params.seed)
    spreads = clusters.spreads(unit)
    graph = {}
    if neighbours is not None:
        places = np.empty(len(members), np.int32)
        places[members] = np.arange(len(members), dtype=np.int32)
        graph = _graph_arrays(keys_wide, clusters, places[neighbours], params)
    return HeadIndex(
        keys=keys,
        values=values,
        centroids=centroids,
        counts=clusters.counts,
        value_sums=_narrowed(group_sums(values_wide, cluster_ids)),
        cluster_of=clusters.cluster_of,
        spreads=spreads,
        members=members,
        codes=coded.codes,
        codebook=coded.codebook,
        code_basis=coded.basis,
        code_spreads=coded.spreads,
        **graph,
    )


def build_heads(
    build: Callable[[int], HeadIndex], count: int, *, threads: int
) -> tuple[HeadIndex, ...]:
    """Return build(0), …, build(count - 1), which call build_head, made in `threads` threads.

    Each has one thread of BLAS: more would wait for one another, and round otherwise.
    """
    with (
        _ONE_BLAS_THREAD,
        ThreadPoolExecutor(threads) as pool,  # BLAS and the kernels release the GIL
    ):
        return tuple(pool.map(build, range(count)))


class _BlasLimit:
    """Gives BLAS one thread while anyone builds.

    The limit is the process's: each build restoring what it found would end the limit of another
    that goes on. And threadpoolctl heeds the first thread that sets one, for as long as that
    lives, and ignores all others: so all builds have theirs set by one thread.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start as if nobody built."""
        self._lock = threading.Lock()
        self._setter = ThreadPoolExecutor(1, thread_name_prefix="blas-limit")
        self._builds = 0
        self._limits: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._builds == 0:
                limited = self._setter.submit(threadpool_limits, 1, user_api="blas")
                self._limits = limited.result()
            self._builds += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._builds -= 1
            if self._builds == 0:
                self._setter.submit(self._limits.restore_original_limits).result()


_ONE_BLAS_THREAD = _BlasLimit()
if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_ONE_BLAS_THREAD.forget)


def _narrowed(rows: NDArray[np.float32]) -> Stored:
    """Round to float16 what fits it; it is a source of estimates, and is read at every search."""
    return to_stored(rows, "float16" if fits(rows, "float16") else "float32")


def _graph_arrays(
    keys: NDArray[np.float32],
    clusters: Clusters,
    neighbours: NDArray[np.int32],
    params: IndexParams,
) -> dict[str, NDArray[Any]]:
    """Return what a scan and a walk read, by name."""
    popularity = np.bincount(neighbours.reshape(-1), minlength=len(keys))  # (m,)
    entries = _entries(clusters, popularity)
    graph = build_graph(clusters, neighbours, entry=int(entries[0]), degree=params.degree)
    keys_int8, centre, scale = quantise_keys(keys)
    return {
        "keys_int8": keys_int8,
        "centre": centre,
        "scale": scale,
        "graph": graph,
        "entries": entries,
    }


def quantise_keys(
    keys: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """Round keys (m, d) to int8: `centre + scale * int8`, a scale per channel.

    The centre adds the same to every score of a query, so a search may leave it out.
    """
    low, high = keys.min(axis=0), keys.max(axis=0)
    centre = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    largest = np.abs(keys - centre).max(axis=0)
    scale = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    rounded = np.clip(np.rint((keys - centre) / scale), -127, 127).astype(np.int8)
    return np.ascontiguousarray(rounded), centre, scale


def _check(
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    queries: NDArray[np.float32],
    neighbours: NDArray[np.int32] | None,
) -> None:
    if keys.ndim != 2 or keys.shape[0] == 0 or values.shape[:1] != keys.shape[:1]:
        raise ValueError(f"keys (m, d) and values (m, dv), m ≥ 1: {keys.shape}, {values.shape}")
    for name, rows in (("key", keys), ("value", values)):
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            raise ValueError(f"{name} at middle position {bad[0]} is not finite")
    if queries.ndim != 2 or queries.shape[1] != keys.shape[1]:
        raise ValueError(f"queries must be (s, {keys.shape[1]}), got {queries.shape}")
    if neighbours is None:
        return
    if neighbours.ndim != 2 or neighbours.shape[0] != queries.shape[0]:
        raise ValueError(f"{queries.shape[0]} queries but neighbours {neighbours.shape}")
    if neighbours.size and not (0 <= neighbours.min() and neighbours.max() < keys.shape[0]):
        raise ValueError(f"neighbour ids must be in [0, {keys.shape[0]})")


def _entries(clusters: Clusters, popularity: NDArray[np.intp]) -> NDArray[np.uint32]:
    """Return the hub, then each cluster's key that training queries want most, (c + 1,)."""
    # Sort by cluster, then by falling popularity, then by id: the first of each run is its entry.
    order = np.lexsort((np.arange(len(popularity)), -popularity, clusters.cluster_of))
    first = np.searchsorted(clusters.cluster_of[order], np.arange(len(clusters.counts)))
    hub = int(popularity.argmax())
    return np.concatenate(([hub], order[first])).astype(np.uint32)
