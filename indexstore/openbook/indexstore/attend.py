"""Attention over the middle: one call for every sequence and head of a layer.

Owns the checks, the split over threads and the joining of heads; the loops are in _search.pyx
and _attend.pyx, their NumPy twins in reference.py. It knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore import _attend, _search
from openbook.indexstore.head import AttendRequest, AttendResult, Budget, HeadIndex, HeadPlan

SEEDS_PER_HEAD = 8  # best clusters of each query head whose entries a walk starts from
SLACK_SPREADS = 3.0  # a walk skips keys whose cluster lies this many spreads below the k-th best
LIFT_LOG_MAX = 2.0  # no cluster weighs more than e² times what its mean says, whatever is stored
EXACT_ROWS = 64  # query rows per task of the exact scan: their state stays in L2


@dataclass(frozen=True, slots=True)
class HeadResult:
    """One KV head's part of an AttendResult; arrays are (group, rows, …) or (group, …)."""

    out: NDArray[np.float32]
    lse: NDArray[np.float32]
    estimated_lse: NDArray[np.float32]
    top: NDArray[np.uint32]  # (group, k) each query head's own best keys, best first
    read: NDArray[np.uint32]  # (r,) their union, by id
    logits: NDArray[np.float32]  # (group, r)
    keys_scored: int
    centroids_scored: int


def attend(requests: Sequence[AttendRequest], *, threads: int = 1) -> list[AttendResult]:
    """Attend every request's queries to its middle; releases the GIL while it works.

    One result per request, in order; the numbers do not depend on `threads`. A request without
    heads (a context no longer than its window) is the empty set. Raises ValueError for arrays of
    the wrong shape or type, and for a `keys` budget with more than one row.
    """
    tasks = [
        (request, head, rows)
        for request in requests
        for head in range(_checked_heads(request))
        for rows in _row_chunks(request)
    ]
    if threads > 1 and len(tasks) > 1:
        done = list(_pool(threads).map(_attend_task, tasks))
    else:
        done = [_attend_task(task) for task in tasks]
    results, at = [], 0
    for request in requests:
        count = len(request.heads) * len(_row_chunks(request))
        results.append(_join(request, done[at : at + count]))
        at += count
    return results


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
    request = AttendRequest((head,), queries.reshape(group, 1, d), factor, budget, (plan,))
    _checked_heads(request)
    return _attend_task((request, 0, slice(0, 1)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the process's pool of that size; its threads sleep between calls."""
    return ThreadPoolExecutor(threads, thread_name_prefix="attend")


def _row_chunks(request: AttendRequest) -> list[slice]:
    rows = request.queries.shape[1]
    return [slice(first, min(first + EXACT_ROWS, rows)) for first in range(0, rows, EXACT_ROWS)]


def _checked_heads(request: AttendRequest) -> int:
    """Check one request against its heads; return the number of KV heads."""
    queries, heads = request.queries, request.heads
    if queries.ndim != 3 or queries.dtype != np.float32:
        raise ValueError(f"queries must be float32 (heads, rows, d), got {queries.dtype}")
    if not request.scaling > 0:
        raise ValueError(f"scaling must be positive, got {request.scaling}")
    if not heads:
        return 0
    if queries.shape[0] % len(heads):
        raise ValueError(f"{queries.shape[0]} query heads do not share {len(heads)} KV heads")
    if len(request.plan) != len(heads):
        raise ValueError(f"{len(heads)} KV heads but {len(request.plan)} plans")
    group = queries.shape[0] // len(heads)
    if any(len(plan.lift) not in (0, group) for plan in request.plan):
        raise ValueError(f"a plan's lift is of other than {group} query heads")
    if queries.shape[2] != heads[0].keys.shape[1]:
        raise ValueError(f"queries of {queries.shape[2]}, keys of {heads[0].keys.shape[1]}")
    if request.budget.kind == "keys" and queries.shape[1] != 1:
        raise ValueError(f"a keys budget takes one row, got {queries.shape[1]}")
    return len(heads)


def _attend_task(task: tuple[AttendRequest, int, slice]) -> HeadResult:
    request, number, rows = task
    head = request.heads[number]
    group = request.queries.shape[0] // len(request.heads)
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
        plan, budget = request.plan[number], request.budget
        top, read, logits, centroid_logits, scored = _search.find(
            head, flat, request.scaling, budget.keys, plan.kind == "graph", plan.queue,
            budget.estimate, SEEDS_PER_HEAD, SLACK_SPREADS,
        )  # fmt: skip
        centroids = centroid_logits.shape[1]
        lift = np.array(plan.lift, np.float32) * np.float32(request.scaling**2)  # (group,)
        out, lse, estimated_lse = _attend.attend_read(
            head, read, logits, centroid_logits, budget.estimate,
            lift if plan.lift else None, LIFT_LOG_MAX,
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
    chunks = len(parts) // len(request.heads)
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
        group = query_heads // len(request.heads)
        ids = tuple(part.read.astype(np.int64) for part in first for _ in range(group))
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
