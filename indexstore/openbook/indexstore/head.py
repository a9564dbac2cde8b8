"""The arrays of one KV head's middle, and how a query may read them.

Owns the in-memory words of the store: HeadIndex, LayerIndex, Budget, HeadPlan. It knows nothing of
files (shard.py), of how a graph is made (build.py) or of how it is searched (attend.py).

Shapes: m middle keys, d key size, dv value size, c clusters, e entries. A bfloat16 array is
carried as uint16 bits, because NumPy has no such type; float16 and float32 are themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore._head import Borrowed, BorrowedLayer

SINK_TOKENS = 128  # RetrievalAttention §3.3: the first tokens draw attention from every query
RECENT_TOKENS = 512  # RetrievalAttention §3.3: the last tokens of the context
WINDOW_TOKENS = SINK_TOKENS + RECENT_TOKENS
LIFT_MAX = 1.0  # of scores that spread like a bell: 0.5; measured: 0.09 to 0.7 (docs/LOG.md)
REACH_MAX = 100.0  # spreads; no key lies so far from its centroid
DEFAULT_KEYS = 100  # RetrievalAttention §4.1: top-100 per query head
CANDIDATES_PER_KEY = 2  # scored exactly for each key wanted, at least: codes are coarse
KEYS_MAX = 2**31 - 1  # of a budget: no context has more tokens

KvDtype = Literal["float16", "bfloat16", "float32"]
PlanKind = Literal["clusters", "scan", "graph"]
BudgetKind = Literal["exact", "keys"]
Stored = NDArray[Any]  # float16, float32, or uint16 holding bfloat16 bits

CODE_ARRAYS = ("members", "codes", "codebook", "code_basis", "code_spreads")
_WIDE = (np.float16, np.float32)  # in the machine's order of bytes
GRAPH_ARRAYS = ("keys_int8", "centre", "scale", "graph", "entries")


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """One KV head's middle: its keys and values, its clusters, and how its keys are found.

    Every array is C-contiguous and may be a read-only view of a mapped shard: it lives as long as
    the StoredContext it came from. Keys and values stand in cluster order, and `members` says which
    of the text's middle each is; in a head of format 1, which has no codes, they stand in text
    order. Ids are places in `keys`. The codes serve a `clusters` plan.
    The arrays from `keys_int8` on serve a `scan` or a `graph` and are there only where one was
    asked for: an int8 key stands for `centre + scale * key`, per channel; `graph` row i lists the
    out-neighbours of key i, padded with i itself; `entries[j]` is the key the search starts from
    when cluster j scores well, and every key is reachable from entries[0].

    p = ⌈d / 2⌉ codes a key, r = ⌈p / 4⌉ rows a block of 16 keys (codes.py).
    """

    keys: Stored  # (m, d)
    values: Stored  # (m, dv)
    centroids: NDArray[Any]  # (c, d)  mean of the stored keys of each cluster, float16 or float32
    counts: NDArray[np.uint32]  # (c,)
    value_sums: NDArray[Any]  # (c, dv)  float16 or float32
    cluster_of: NDArray[np.uint32]  # (m,)
    spreads: NDArray[np.float32]  # (c,)  root mean square of query · (key - centroid)
    members: NDArray[np.uint32] | None = None  # (m,)  where each key stood in the text
    codes: NDArray[np.uint8] | None = None  # (blocks, r, 32)
    codebook: NDArray[np.float32] | None = None  # (p, 16, 2)
    code_basis: NDArray[np.float32] | None = None  # (2 p, d)
    code_spreads: NDArray[np.float32] | None = None  # (2 p,)
    keys_int8: NDArray[np.int8] | None = None  # (m, d)
    centre: NDArray[np.float32] | None = None  # (d,)
    scale: NDArray[np.float32] | None = None  # (d,)
    graph: NDArray[np.uint32] | None = None  # (m, degree)
    entries: NDArray[np.uint32] | None = None  # (e,)  e = c + 1: entries[0] is the hub
    borrowed: Borrowed = field(init=False, repr=False, compare=False)  # what the kernels see

    def __post_init__(self) -> None:
        """Check what the kernels trust: dtype, shape and contiguity of every array.

        Raises ValueError or TypeError naming the array. Ids inside the arrays are range-checked
        where they enter: by the builder, and by shard.py when a file is opened.
        """
        m, d = self.keys.shape
        c, pairs = self.counts.shape[0], -(-d // 2)
        if self.keys.dtype not in (*_WIDE, np.uint16) or self.values.dtype != self.keys.dtype:
            raise TypeError(f"keys and values share a stored dtype, got {self.keys.dtype}")
        for name in ("centroids", "value_sums"):
            if getattr(self, name).dtype not in _WIDE:
                raise TypeError(f"{name} are float16 or float32, got {getattr(self, name).dtype}")
        expected: dict[str, tuple[Any, tuple[int | None, ...]]] = {
            "keys": (self.keys.dtype, (m, d)),
            "values": (self.keys.dtype, (m, None)),
            "centroids": (self.centroids.dtype, (c, d)),
            "counts": (np.uint32, (c,)),
            "value_sums": (self.value_sums.dtype, (c, self.values.shape[1])),
            "cluster_of": (np.uint32, (m,)),
            "spreads": (np.float32, (c,)),
            "members": (np.uint32, (m,)),
            "codes": (np.uint8, (-(-m // 16), -(-pairs // 4), 32)),
            "codebook": (np.float32, (pairs, 16, 2)),
            "code_basis": (np.float32, (2 * pairs, d)),
            "code_spreads": (np.float32, (2 * pairs,)),
            "keys_int8": (np.int8, (m, d)),
            "centre": (np.float32, (d,)),
            "scale": (np.float32, (d,)),
            "graph": (np.uint32, (m, None)),
            "entries": (np.uint32, (c + 1,)),
        }
        for part in (CODE_ARRAYS, GRAPH_ARRAYS):
            if len({getattr(self, name) is None for name in part}) > 1:
                raise ValueError(f"{', '.join(part)}: all of them or none")
        for name, (dtype, shape) in expected.items():
            array = getattr(self, name)
            if array is None:
                continue
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be C-contiguous")
            fits = len(shape) == array.ndim and all(
                want in (None, have) for want, have in zip(shape, array.shape, strict=True)
            )
            if array.dtype != dtype or not fits:
                found = f"{array.dtype} {array.shape}"
                raise ValueError(f"{name} must be {np.dtype(dtype).name} {shape}, got {found}")
        object.__setattr__(self, "borrowed", Borrowed(self))

    def serves(self, kind: PlanKind) -> bool:
        """Whether the arrays that a plan of this kind reads are there."""
        return (self.codes if kind == "clusters" else self.graph) is not None

    def places(self, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return where the keys of these ids stood in the text's middle."""
        return (ids if self.members is None else self.members[ids]).astype(np.int64)

    def in_text_order(self, rows: Stored) -> Stored:
        """Return `rows` (m, …), one for each key, as the keys stood in the text."""
        if self.members is None:
            return rows
        ordered = np.empty_like(rows)
        ordered[self.members] = rows
        return ordered

    def array(self, name: str) -> NDArray[Any]:
        """Return one of the arrays that not every head has. Raises ValueError without it."""
        array: NDArray[Any] | None = getattr(self, name)
        if array is None:
            raise ValueError(f"the head was built without {name}")
        return array

    @property
    def middle_tokens(self) -> int:
        """The number of middle keys, m."""
        return int(self.keys.shape[0])


@dataclass(frozen=True, slots=True)
class Budget:
    """Which middle keys one step may read.

    `exact` reads all of them. `keys` reads the best `keys` of each query head, and a group reads
    the union of what its query heads found. With `estimate` every key is read that the search
    scored exactly (by clusters two to ten for each that is wanted, as the plan says), and clusters
    stand in for the rest.
    """

    kind: BudgetKind = "keys"
    keys: int = DEFAULT_KEYS
    estimate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "keys"):
            raise ValueError(f"budget kind must be 'exact' or 'keys', got {self.kind!r}")
        if not 0 <= self.keys <= KEYS_MAX:
            raise ValueError(f"budget keys must be from 0 to {KEYS_MAX}, got {self.keys}")


EXACT = Budget(kind="exact", estimate=False)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """How one KV head answers a `keys` budget: by its clusters, by a scan, or along its graph.

    `clusters` reads the codes of the clusters that may hold one of the best keys, `scan` every
    int8 key, `graph` walks. `lift` corrects the estimate, one number per query head of the group
    (lift.py): e to a cluster's mean score is less than its keys' mean of e to the score. Empty: not
    corrected.
    """

    kind: PlanKind
    queue: int  # per query head: candidates for DEFAULT_KEYS wanted, or nodes a walk may keep open
    lift: tuple[float, ...] = ()
    reach: float = 0.0  # of `clusters`: spreads above its centroid where a key is still looked for


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """The KV heads of a layer and the plan of each: made once, asked at every step.

    Without heads it is that of a context no longer than its window.
    """

    heads: tuple[HeadIndex, ...]
    plan: tuple[HeadPlan, ...]
    is_by_clusters: bool = field(init=False, repr=False, compare=False)  # all heads are
    lifted: frozenset[int] = field(init=False, repr=False, compare=False)  # group sizes of lifts
    borrowed: BorrowedLayer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the plans are of these heads. Raises ValueError."""
        heads, plan = self.heads, self.plan
        object.__setattr__(self, "borrowed", BorrowedLayer(heads, plan))  # as many plans as heads
        if not all(one.kind in get_args(PlanKind) for one in plan):
            raise ValueError(f"a plan's kind is none of {', '.join(get_args(PlanKind))}")
        if not all(head.serves(one.kind) for head, one in zip(heads, plan, strict=True)):
            raise ValueError("a head was not built for its plan")
        if len({(head.keys.shape[1], head.values.shape[1]) for head in heads}) > 1:
            raise ValueError("the heads differ in the size of a key or of a value")
        is_by_clusters = bool(heads) and {one.kind for one in plan} == {"clusters"}
        object.__setattr__(self, "is_by_clusters", is_by_clusters)
        lifted = frozenset(len(one.lift) for one in plan if one.lift)
        object.__setattr__(self, "lifted", lifted)


class AttendRequest(NamedTuple):
    """One sequence's attention over the middle of one layer.

    `queries` float32 (query heads, rows, d) after RoPE; query head h reads KV head h // group.
    A `keys` budget takes one row: question tokens are attended exactly.
    """

    layer: LayerIndex
    queries: NDArray[np.float32]
    scaling: float
    budget: Budget
    evidence: bool = False


class AttendResult(NamedTuple):
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
