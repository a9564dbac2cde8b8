"""The arrays of one KV head's middle, and how a query may read them.

Owns the in-memory words of the store: HeadIndex, Budget, HeadPlan. It knows nothing of files
(shard.py), of how a graph is made (build.py) or of how it is searched (attend.py).

Shapes: m middle keys, d key size, dv value size, c clusters, e entries. A bfloat16 array is
carried as uint16 bits, because NumPy has no such type; float16 and float32 are themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SINK_TOKENS = 128  # RetrievalAttention §3.3: the first tokens draw attention from every query
RECENT_TOKENS = 512  # RetrievalAttention §3.3: the last tokens of the context
WINDOW_TOKENS = SINK_TOKENS + RECENT_TOKENS
LIFT_MAX = 1.0  # of scores that spread like a bell: 0.5; measured: 0.09 to 0.7 (docs/LOG.md)
DEFAULT_KEYS = 100  # RetrievalAttention §4.1: top-100 per query head

KvDtype = Literal["float16", "bfloat16", "float32"]
PlanKind = Literal["scan", "graph"]
BudgetKind = Literal["exact", "keys"]
Stored = NDArray[Any]  # float16, float32, or uint16 holding bfloat16 bits


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """One KV head's middle: its keys and values, its graph, and the clusters of the estimate.

    Every array is C-contiguous and may be a read-only view of a mapped shard: it lives as long as
    the StoredContext it came from. An int8 key stands for `centre + scale * key`, per channel.
    `graph` row i lists the out-neighbours of key i, padded with i itself. `entries[j]` is the key
    the search starts from when cluster j scores well; every key is reachable from entries[0].
    """

    keys: Stored  # (m, d)
    values: Stored  # (m, dv)
    keys_int8: NDArray[np.int8]  # (m, d)
    centre: NDArray[np.float32]  # (d,)
    scale: NDArray[np.float32]  # (d,)
    graph: NDArray[np.uint32]  # (m, degree)
    entries: NDArray[np.uint32]  # (e,)  e = c + 1: entries[0] is the hub
    centroids: NDArray[np.float32]  # (c, d)  mean of the stored keys of each cluster
    counts: NDArray[np.uint32]  # (c,)
    value_sums: NDArray[np.float32]  # (c, dv)
    cluster_of: NDArray[np.uint32]  # (m,)
    spreads: NDArray[np.float32]  # (c,)  r.m.s. over queries and keys of q·(key - centroid)

    def __post_init__(self) -> None:
        """Check what the kernels trust: dtype, shape and contiguity of every array.

        Raises ValueError or TypeError naming the array. Ids inside the arrays are range-checked
        where they enter: by the builder, and by shard.py when a file is opened.
        """
        m, d = self.keys.shape
        c = self.counts.shape[0]
        if self.keys.dtype.char not in "eHf" or self.values.dtype != self.keys.dtype:
            raise TypeError(f"keys and values share a stored dtype, got {self.keys.dtype}")
        expected: dict[str, tuple[type, tuple[int | None, ...]]] = {
            "keys_int8": (np.int8, (m, d)),
            "centre": (np.float32, (d,)),
            "scale": (np.float32, (d,)),
            "graph": (np.uint32, (m, None)),
            "entries": (np.uint32, (c + 1,)),
            "centroids": (np.float32, (c, d)),
            "counts": (np.uint32, (c,)),
            "value_sums": (np.float32, (c, self.values.shape[1])),
            "cluster_of": (np.uint32, (m,)),
            "spreads": (np.float32, (c,)),
        }
        for name in ("keys", "values", *expected):
            if not getattr(self, name).flags.c_contiguous:
                raise ValueError(f"{name} must be C-contiguous")
        if self.values.shape[0] != m:
            raise ValueError(f"{m} keys but {self.values.shape[0]} values")
        for name, (dtype, shape) in expected.items():
            array = getattr(self, name)
            fits = len(shape) == array.ndim and all(
                want in (None, have) for want, have in zip(shape, array.shape, strict=True)
            )
            if array.dtype != dtype or not fits:
                found = f"{array.dtype} {array.shape}"
                raise ValueError(f"{name} must be {dtype.__name__} {shape}, got {found}")

    @property
    def middle_tokens(self) -> int:
        """The number of middle keys, m."""
        return int(self.keys.shape[0])


@dataclass(frozen=True, slots=True)
class Budget:
    """Which middle keys one step may read.

    `exact` reads all of them. `keys` reads the best `keys` of each query head (a group reads the
    union of what its query heads chose) and, with `estimate`, stands in for the rest by clusters.
    """

    kind: BudgetKind = "keys"
    keys: int = DEFAULT_KEYS
    estimate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "keys"):
            raise ValueError(f"budget kind must be 'exact' or 'keys', got {self.kind!r}")
        if self.keys < 0:
            raise ValueError(f"budget keys must not be negative, got {self.keys}")


EXACT = Budget(kind="exact", estimate=False)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """How one KV head answers a `keys` budget: scan every int8 key, or walk the graph.

    `lift` corrects the estimate, one number per query head of the group (lift.py): e to a
    cluster's mean score is less than its keys' mean of e to the score. Empty: not corrected.
    """

    kind: PlanKind
    queue: int  # nodes a graph search may keep open per query head
    lift: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AttendRequest:
    """One sequence's attention over the middle of one layer.

    `queries` float32 (query heads, rows, d) after RoPE; query head h reads KV head h // group.
    A `keys` budget takes one row: question tokens are attended exactly.
    """

    heads: tuple[HeadIndex, ...]
    queries: NDArray[np.float32]
    scaling: float
    budget: Budget
    plan: tuple[HeadPlan, ...]
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class AttendResult:
    """Attention over the middle, and what it cost.

    `out` float32 (query heads, rows, dv); `lse` float32 (query heads, rows), natural log, -inf for
    an empty middle. `estimated_lse` float32 (query heads, rows): the part of lse that the estimate
    stands for, -inf without one. Counts are summed over KV heads: distinct keys read (values
    touched), distinct keys scored at any precision, centroids scored. With evidence, `ids` and
    `logits` hold per query head the keys read, int64 (count,) and float32 (count,), else empty.
    """

    out: NDArray[np.float32]
    lse: NDArray[np.float32]
    estimated_lse: NDArray[np.float32]
    keys_read: int
    keys_scored: int
    centroids_scored: int
    ids: tuple[NDArray[np.int64], ...] = ()
    logits: tuple[NDArray[np.float32], ...] = ()
