"""Attention over the middle: one call for every sequence and head of a layer.

Owns the checks, the split over threads and the joining of heads; the loops are in _probe.pyx,
_search.pyx and _attend.pyx, their NumPy twins in reference.py. It knows no model and no file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore import _attend, _probe, _search
from openbook.indexstore.head import (
    DEFAULT_KEYS,
    AttendRequest,
    AttendResult,
    Budget,
    HeadIndex,
    HeadPlan,
)

CANDIDATES_PER_KEY = 2  # scored exactly for each key wanted, as codes are coarse
SEEDS_PER_HEAD = 8  # best clusters of each query head whose entries a walk starts from
SLACK_SPREADS = 3.0  # a walk skips keys whose cluster lies this many spreads below the k-th best
LIFT_LOG_MAX = 2.0  # no cluster weighs more than e² times what its mean says, whatever is stored
T = TypeVar("T")
R = TypeVar("R")

_LOCAL = threading.local()  # a workspace of the kernel in each thread
_NOTHING = (np.zeros(0, np.uint32), np.zeros((0, 0), np.float32), 0)
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
    for request in requests:
        _check(request)
    results: dict[int, AttendResult] = {}
    clustered = [n for n, request in enumerate(requests) if _is_by_clusters(request)]
    results |= zip(clustered, _by_clusters([requests[n] for n in clustered], threads), strict=True)
    others = [n for n in range(len(requests)) if n not in results]
    tasks = [
        (requests[n], head, rows)
        for n in others
        for head in range(len(requests[n].heads))
        for rows in _row_chunks(requests[n])
    ]
    done, at = list(_mapped(_attend_task, tasks, threads)), 0
    for n in others:
        count = len(requests[n].heads) * len(_row_chunks(requests[n]))
        results[n] = _join(requests[n], done[at : at + count])
        at += count
    return [results[n] for n in range(len(requests))]


def _mapped(call: Callable[[T], R], items: Sequence[T], threads: int) -> Iterable[R]:
    """Call for every item, in `threads` threads if there is more than one of both."""
    return _pool(threads).map(call, items) if threads > 1 and len(items) > 1 else map(call, items)


def _is_by_clusters(request: AttendRequest) -> bool:
    plans = {plan.kind for plan in request.plan}
    return request.budget.kind == "keys" and plans == {"clusters"} and bool(request.heads)


def _by_clusters(requests: Sequence[AttendRequest], threads: int) -> Iterator[AttendResult]:
    """Answer requests whose heads are all searched by clusters: one call of the kernel a thread."""
    answers = [_Answer(request) for request in requests]
    tasks = [task for answer in answers for task in answer.tasks]
    parts = [tasks[first::threads] for first in range(min(threads, len(tasks)))]
    found: list[tuple[NDArray[np.uint32], NDArray[np.float32], int]] = [_NOTHING] * len(tasks)
    for first, part in enumerate(_mapped(_attend_tasks, parts, threads)):
        found[first :: len(parts)] = part
    at = 0
    for answer in answers:
        yield answer.result(found[at : at + len(answer.tasks)])
        at += len(answer.tasks)


def _attend_tasks(
    tasks: list[tuple[Any, ...]],
) -> list[tuple[NDArray[np.uint32], NDArray[np.float32], int]]:
    return _probe.attend(tasks, _workspace(), LIFT_LOG_MAX)


def _workspace() -> list[NDArray[np.uint8]]:
    """Return this thread's memory for searches."""
    workspace: list[NDArray[np.uint8]] | None = getattr(_LOCAL, "workspace", None)
    if workspace is None:
        workspace = _LOCAL.workspace = []
    return workspace


class _Answer:
    """One request by clusters: the arrays that the kernel writes, and its tasks, one a KV head."""

    def __init__(self, request: AttendRequest) -> None:
        query_heads, _, _ = request.queries.shape
        queries = np.ascontiguousarray(request.queries[:, 0])  # (query heads, d)
        group, budget = query_heads // len(request.heads), request.budget
        self._request, self._group = request, group
        self._out = np.empty((query_heads, 1, request.heads[0].values.shape[1]), np.float32)
        self._lse = np.empty((query_heads, 1), np.float32)
        self._estimated = np.empty((query_heads, 1), np.float32)
        self.tasks: list[tuple[Any, ...]] = []
        for number, (head, plan) in enumerate(zip(request.heads, request.plan, strict=True)):
            mine = slice(number * group, (number + 1) * group)
            task = (  # as _probe.attend has it
                head, queries[mine], request.scaling, budget.keys, _candidates(budget, plan),
                plan.reach, budget.estimate, _lift(plan.lift, request.scaling),
                self._out[mine], self._lse[mine], self._estimated[mine],
            )  # fmt: skip
            self.tasks.append(task)

    def result(
        self, found: Sequence[tuple[NDArray[np.uint32], NDArray[np.float32], int]]
    ) -> AttendResult:
        """Return what the kernel wrote, with what it `found` for each KV head."""
        ids: tuple[NDArray[np.int64], ...] = ()
        logits: tuple[NDArray[np.float32], ...] = ()
        if self._request.evidence:
            ids = tuple(
                head.places(read)
                for head, (read, _, _) in zip(self._request.heads, found, strict=True)
                for _ in range(self._group)
            )
            logits = tuple(row for _, rows, _ in found for row in rows)
        return AttendResult(
            out=self._out,
            lse=self._lse,
            estimated_lse=self._estimated,
            keys_read=sum(len(read) for read, _, _ in found),
            keys_scored=sum(scored for _, _, scored in found),
            centroids_scored=sum(len(head.counts) for head in self._request.heads),
            ids=ids,
            logits=logits,
        )


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

    Returns the ids of each query head's best (group, k), their union (r,), its logits (group, r),
    centroid logits (group, c), or (group, 0) where nobody needs them, and the keys scored.
    """
    if plan.kind == "clusters":
        candidates = _candidates(budget, plan)
        return _probe.find(
            head, queries, scaling, budget.keys, candidates, plan.reach, _workspace()
        )
    return _search.find(
        head, queries, scaling, budget.keys, plan.kind == "graph", plan.queue,
        budget.estimate, SEEDS_PER_HEAD, SLACK_SPREADS,
    )  # fmt: skip


def _candidates(budget: Budget, plan: HeadPlan) -> int:
    """Return how many keys a search by clusters scores exactly: the plan's are for DEFAULT_KEYS."""
    tuned = -(-plan.queue * budget.keys // DEFAULT_KEYS)
    return max(tuned, CANDIDATES_PER_KEY * budget.keys)


@lru_cache(maxsize=65_536)  # a head's is asked for at every step
def _lift(lift: tuple[float, ...], scaling: float) -> NDArray[np.float32] | None:
    """Return what a squared spread of logits is multiplied with, (group,), if anything."""
    return np.array(lift, np.float32) * np.float32(scaling**2) if lift else None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the process's pool of that size; its threads sleep between calls."""
    return ThreadPoolExecutor(threads, thread_name_prefix="attend")


def _row_chunks(request: AttendRequest) -> list[slice]:
    rows = request.queries.shape[1]
    return [slice(first, min(first + EXACT_ROWS, rows)) for first in range(0, rows, EXACT_ROWS)]


def _check(request: AttendRequest) -> None:
    """Check one request against its heads. Raises ValueError."""
    queries, heads = request.queries, request.heads
    if queries.ndim != 3 or queries.dtype != np.float32:
        raise ValueError(f"queries must be float32 (heads, rows, d), got {queries.dtype}")
    if not request.scaling > 0:
        raise ValueError(f"scaling must be positive, got {request.scaling}")
    if not heads:
        return
    if queries.shape[0] % len(heads):
        raise ValueError(f"{queries.shape[0]} query heads do not share {len(heads)} KV heads")
    if len(request.plan) != len(heads):
        raise ValueError(f"{len(heads)} KV heads but {len(request.plan)} plans")
    if not all(head.serves(plan.kind) for head, plan in zip(heads, request.plan, strict=True)):
        raise ValueError("a head was not built for its plan")
    group = queries.shape[0] // len(heads)
    if any(len(plan.lift) not in (0, group) for plan in request.plan):
        raise ValueError(f"a plan's lift is of other than {group} query heads")
    if queries.shape[2] != heads[0].keys.shape[1]:
        raise ValueError(f"queries of {queries.shape[2]}, keys of {heads[0].keys.shape[1]}")
    if request.budget.kind == "keys" and queries.shape[1] != 1:
        raise ValueError(f"a keys budget takes one row, got {queries.shape[1]}")


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
        top, read, logits, centroid_logits, scored = find(
            head, flat, budget, plan, scaling=request.scaling
        )
        centroids = centroid_logits.shape[1]
        out, lse, estimated_lse = _attend.attend_read(
            head, read, logits, centroid_logits, budget.estimate,
            _lift(plan.lift, request.scaling), LIFT_LOG_MAX,
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
        ids = tuple(
            head.places(part.read)
            for head, part in zip(request.heads, first, strict=True)
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
