"""Attention over the middle: one call for every sequence and head of a layer.

Owns the checks, and the split over threads and the joining of heads of all that is not searched by
clusters. The loops are in _layer.pyx, _probe.pyx, _search.pyx and _attend.pyx, their NumPy twins in
reference.py and reference_probe.py. It knows no model and no file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore import _attend, _layer, _probe, _search
from openbook.indexstore.head import (
    AttendRequest,
    AttendResult,
    Budget,
    HeadIndex,
    HeadPlan,
    LayerIndex,
)

SEEDS_PER_HEAD = 8  # best clusters of each query head whose entries a walk starts from
SLACK_SPREADS = 3.0  # a walk skips keys whose cluster lies this many spreads below the k-th best
LIFT_LOG_MAX = 2.0  # no cluster weighs more than e² times what its mean says, whatever is stored
EXACT_ROWS = 64  # query rows per task of the exact scan: their state stays in L2
T = TypeVar("T")
R = TypeVar("R")
Floats = NDArray[np.float32]

_LOCAL = threading.local()  # a workspace of the kernel in each thread


@dataclass(frozen=True, slots=True)
class HeadResult:
    """One KV head's part of an AttendResult; arrays are (group, rows, …) or (group, …)."""

    out: NDArray[np.float32]
    lse: NDArray[np.float32]
    estimated_lse: NDArray[np.float32]
    top: NDArray[np.uint32]  # (group, k) each query head's own best keys, best first
    read: NDArray[np.uint32]  # (r,) the keys attended to, by id
    logits: NDArray[np.float32]  # (group, r)
    keys_scored: int
    centroids_scored: int


def attend(requests: Sequence[AttendRequest], *, threads: int = 1) -> list[AttendResult]:
    """Attend every request's queries to its middle; releases the GIL while it works.

    One result per request, in order; the numbers do not depend on `threads`, of which a search by
    clusters uses 256 at most. A request without
    heads (a context no longer than its window) is the empty set. Raises ValueError for arrays of
    the wrong shape or type, for a `keys` budget with more than one row, and for no threads.
    """
    if threads < 1:
        raise ValueError(f"threads must be positive, got {threads}")
    for request in requests:
        _check(request)
    clustered = [n for n, request in enumerate(requests) if _is_by_clusters(request)]
    found = _layer.attend([requests[n] for n in clustered], _workspace(), threads, LIFT_LOG_MAX)
    results = dict(zip(clustered, found, strict=True))
    if len(results) == len(requests):
        return found
    others = [n for n in range(len(requests)) if n not in results]
    tasks = [
        (requests[n], head, rows)
        for n in others
        for head in range(len(requests[n].layer.heads))
        for rows in _row_chunks(requests[n])
    ]
    done, at = _in_threads(_attend_task, tasks, threads), 0
    for n in others:
        count = len(requests[n].layer.heads) * len(_row_chunks(requests[n]))
        results[n] = _join(requests[n], done[at : at + count])
        at += count
    return [results[n] for n in range(len(requests))]


def _in_threads(call: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Call for every item, the first in this thread and the others in a pool of `threads`."""
    if threads == 1 or len(items) < 2:
        return [call(item) for item in items]
    others: list[Future[R]] = []
    with suppress(RuntimeError):  # the system has no more threads: what is left is done in this one
        others += (_pool(threads).submit(call, item) for item in items[1:])
    mine = [call(item) for item in (items[0], *items[1 + len(others) :])]
    return [mine[0], *(other.result() for other in others), *mine[1:]]


def _is_by_clusters(request: AttendRequest) -> bool:
    return request.layer.is_by_clusters and request.budget.kind == "keys"


def _workspace() -> list[NDArray[np.uint8]]:
    """Return the memory for this thread's calls, a block for each worker."""
    workspace: list[NDArray[np.uint8]] | None = getattr(_LOCAL, "workspace", None)
    if workspace is None:
        workspace = _LOCAL.workspace = []
    return workspace


def search(
    head: HeadIndex,
    queries: NDArray[np.float32],
    budget: Budget,
    plan: HeadPlan,
    *,
    scaling: float | None = None,
) -> HeadResult:
    """Find the best keys of one KV head for `queries` (group, d), and attend to them.

    `scaling` is 1/√d if none is given.
    """
    group, d = queries.shape
    factor = 1 / d**0.5 if scaling is None else scaling
    layer = LayerIndex((head,), (plan,))
    request = AttendRequest(layer, queries.reshape(group, 1, d), factor, budget)
    _check(request)
    return _attend_task((request, 0, slice(0, 1)))


def find(
    head: HeadIndex,
    queries: NDArray[np.float32],
    budget: Budget,
    plan: HeadPlan,
    *,
    scaling: float,
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32], int]:
    """Find the best keys of one KV head for checked `queries` (group, d); attend to none.

    Returns the ids of each query head's best (group, k), the keys to read (r,), their logits
    (group, r), centroid logits (group, c), or (group, 0) where nobody needs them, and how many keys
    were scored. To read are the union of the best, and with an estimate all that were scored
    exactly: their weights are known.
    """
    if plan.kind == "clusters":
        candidates = _probe.candidates_of(plan.queue, budget.keys)
        return _probe.find(
            head, queries, scaling, budget.keys, candidates, plan.reach, budget.estimate,
            _workspace(),
        )  # fmt: skip
    walks = plan.kind == "graph" and budget.keys < head.middle_tokens
    return _search.find(
        head, queries, scaling, budget.keys, walks, plan.queue, budget.estimate,
        SEEDS_PER_HEAD, SLACK_SPREADS,
    )  # fmt: skip


def _lift(plan: HeadPlan, scaling: float) -> Floats | None:
    """Return what a squared spread of logits is multiplied with, (group,), if anything."""
    return np.array(plan.lift, np.float32) * np.float32(scaling**2) if plan.lift else None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the process's pool of that size; its threads sleep between calls."""
    return ThreadPoolExecutor(threads, thread_name_prefix="attend")


os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads are the parent's


def _row_chunks(request: AttendRequest) -> list[slice]:
    rows = request.queries.shape[1]
    return [slice(first, min(first + EXACT_ROWS, rows)) for first in range(0, rows, EXACT_ROWS)]


def _check(request: AttendRequest) -> None:
    """Check one request against its layer. Raises ValueError."""
    queries, layer = request.queries, request.layer
    heads = layer.heads
    if queries.ndim != 3 or queries.dtype != np.float32:
        found = f"{queries.dtype} {queries.shape}"
        raise ValueError(f"queries must be float32 (heads, rows, d), got {found}")
    if not 0 < request.scaling < np.inf:
        raise ValueError(f"scaling must be positive and finite, got {request.scaling}")
    if not heads:
        return
    query_heads, rows, d = queries.shape
    group, left = divmod(query_heads, len(heads))
    if left or not group:
        raise ValueError(f"{query_heads} query heads do not share {len(heads)} KV heads")
    if layer.lifted and layer.lifted != {group}:
        raise ValueError(f"a plan's lift is of other than {group} query heads")
    if d != heads[0].keys.shape[1]:
        raise ValueError(f"queries of {d}, keys of {heads[0].keys.shape[1]}")
    if rows != 1 and request.budget.kind == "keys":
        raise ValueError(f"a keys budget takes one row, got {rows}")


def _attend_task(task: tuple[AttendRequest, int, slice]) -> HeadResult:
    request, number, rows = task
    heads = request.layer.heads
    head, group = heads[number], request.queries.shape[0] // len(heads)
    queries = np.ascontiguousarray(request.queries[number * group : (number + 1) * group, rows])
    flat = queries.reshape(-1, queries.shape[2])  # (group * rows, d)
    none = np.zeros(0, np.uint32)
    if request.budget.kind == "exact":
        out, lse = _attend.attend_exact(head, flat, request.scaling)
        estimated_lse = np.full_like(lse, -np.inf)
        top, read, logits = none.reshape(1, 0), none, np.zeros((group, 0), np.float32)
        scored, centroids = head.middle_tokens, 0
        if request.evidence:
            read = np.arange(head.middle_tokens, dtype=np.uint32)
    else:
        plan, budget = request.layer.plan[number], request.budget
        top, read, logits, centroid_logits, scored = find(
            head, flat, budget, plan, scaling=request.scaling
        )
        centroids = centroid_logits.shape[1]
        out, lse, estimated_lse = _attend.attend_read(
            head, read, logits, centroid_logits, budget.estimate,
            _lift(plan, request.scaling), LIFT_LOG_MAX,
        )  # fmt: skip
    shape = queries.shape[:2]
    return HeadResult(
        out.reshape(*shape, -1), lse.reshape(shape), estimated_lse.reshape(shape),
        top, read, logits, scored, centroids,
    )  # fmt: skip


def _join(request: AttendRequest, parts: list[HeadResult]) -> AttendResult:
    """Put the parts, heads outermost, then row chunks, back into one array per request."""
    query_heads, rows, _ = request.queries.shape
    if not parts:
        # Without a middle the value size is the caller's to know: an empty set has none.
        empty = np.full((query_heads, rows), -np.inf, np.float32)
        return AttendResult(np.zeros((query_heads, rows, 0), np.float32), empty, empty, 0, 0, 0)
    heads = request.layer.heads
    chunks = len(parts) // len(heads)
    first = parts[::chunks]

    def joined(name: str) -> NDArray[np.float32]:
        by_head = [
            np.concatenate([getattr(part, name) for part in parts[at : at + chunks]], axis=1)
            for at in range(0, len(parts), chunks)
        ]
        return np.concatenate(by_head)

    exact = request.budget.kind == "exact"
    ids: tuple[NDArray[np.int64], ...] = ()
    logits: tuple[NDArray[np.float32], ...] = ()
    if request.evidence:
        group = query_heads // len(heads)
        ids = tuple(
            head.places(part.read)
            for head, part in zip(heads, first, strict=True)
            for _ in range(group)
        )
        logits = tuple(row for part in first for row in part.logits)
    return AttendResult(
        out=joined("out"),
        lse=joined("lse"),
        estimated_lse=joined("estimated_lse"),
        keys_read=sum(p.keys_scored if exact else len(p.read) for p in first),
        keys_scored=sum(part.keys_scored for part in first),
        centroids_scored=sum(part.centroids_scored for part in first),
        ids=ids,
        logits=logits,
    )
