"""Attention over the middle: one call for every sequence and head of a layer.

Owns the checks, the split over threads and the joining of heads; the loops are in _probe.pyx,
_search.pyx and _attend.pyx, their NumPy twins in reference.py and reference_probe.py. It knows no
model and no file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TypeVar

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
    Step,
)

CANDIDATES_PER_KEY = 2  # scored exactly for each key wanted, as codes are coarse
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

    One result per request, in order; the numbers do not depend on `threads`. A request without
    heads (a context no longer than its window) is the empty set. Raises ValueError for arrays of
    the wrong shape or type, for a `keys` budget with more than one row, and for no threads.
    """
    if threads < 1:
        raise ValueError(f"threads must be positive, got {threads}")
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
    done, at = _in_threads(_attend_task, tasks, threads), 0
    for n in others:
        count = len(requests[n].heads) * len(_row_chunks(requests[n]))
        results[n] = _join(requests[n], done[at : at + count])
        at += count
    return [results[n] for n in range(len(requests))]


def _in_threads(call: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Call for every item, the first in this thread and the others in a pool of `threads`."""
    if threads == 1 or len(items) < 2:
        return [call(item) for item in items]
    others = [_pool(threads).submit(call, item) for item in items[1:]]
    return [call(items[0]), *(other.result() for other in others)]


def _is_by_clusters(request: AttendRequest) -> bool:
    plans = {plan.kind for plan in request.plan}
    return request.budget.kind == "keys" and plans == {"clusters"} and bool(request.heads)


def _by_clusters(requests: Sequence[AttendRequest], threads: int) -> list[AttendResult]:
    """Answer requests whose heads are all searched by clusters: one call of the kernel a thread."""
    steps = [_step_of(request) for request in requests]
    found = _in_threads(_run, _shared_out(steps, threads), threads)
    evidence = iter([row for rows in found for row in rows])
    return [_result_of(step, evidence) for step in steps]


def _shared_out(steps: Sequence[Step], threads: int) -> list[list[tuple[Step, int, int]]]:
    """Split the KV heads of all steps evenly into `threads` lists of (step, first, stop)."""
    total = sum(len(step.heads) for step in steps)
    bounds = [total * n // threads for n in range(threads + 1)]
    shares: list[list[tuple[Step, int, int]]] = []
    for begin, end in pairwise(bounds):
        share, at = [], 0
        for step in steps:
            first, stop = max(begin - at, 0), min(end - at, len(step.heads))
            if first < stop:
                share.append((step, first, stop))
            at += len(step.heads)
        if share:
            shares.append(share)
    return shares


def _run(share: list[tuple[Step, int, int]]) -> list[tuple[NDArray[np.uint32], Floats]]:
    return _probe.attend(share, _workspace(), LIFT_LOG_MAX)


def _workspace() -> list[NDArray[np.uint8]]:
    """Return this thread's memory for searches."""
    workspace: list[NDArray[np.uint8]] | None = getattr(_LOCAL, "workspace", None)
    if workspace is None:
        workspace = _LOCAL.workspace = []
    return workspace


def _step_of(request: AttendRequest) -> Step:
    """Return a request by clusters as the kernel takes it."""
    query_heads, _, _ = request.queries.shape
    candidates, reaches, lifts = _tuned(request.plan, request.budget.keys, request.scaling)
    return Step(
        heads=request.heads,
        queries=np.ascontiguousarray(request.queries[:, 0]),
        scaling=request.scaling,
        keys=request.budget.keys,
        candidates=candidates,
        reaches=reaches,
        lifts=lifts,
        estimate=request.budget.estimate,
        evidence=request.evidence,
        out=np.empty((query_heads, 1, request.heads[0].values.shape[1]), np.float32),
        lse=np.empty((query_heads, 1), np.float32),
        estimated_lse=np.empty((query_heads, 1), np.float32),
        counts=np.empty((len(request.heads), 3), np.int64),
    )


def _result_of(step: Step, evidence: Iterator[tuple[NDArray[np.uint32], Floats]]) -> AttendResult:
    """Return what the kernel wrote, and the next of the `evidence` of all heads."""
    ids: list[NDArray[np.int64]] = []
    logits: list[Floats] = []
    if step.evidence:
        for head, (read, rows) in zip(step.heads, evidence, strict=False):
            ids += [head.places(read)] * len(rows)
            logits.extend(rows)
    read_counts, scored, centroids = zip(*step.counts.tolist(), strict=True)
    return AttendResult(
        out=step.out,
        lse=step.lse,
        estimated_lse=step.estimated_lse,
        keys_read=sum(read_counts),
        keys_scored=sum(scored),
        centroids_scored=sum(centroids),
        ids=tuple(ids),
        logits=tuple(logits),
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

    Returns the ids of each query head's best (group, k), the keys to read (r,), their logits
    (group, r), centroid logits (group, c), or (group, 0) where nobody needs them, and how many keys
    were scored. To read are the union of the best, and with an estimate all that were scored
    exactly: their weights are known.
    """
    if plan.kind == "clusters":
        candidates = _candidates(plan, budget.keys)
        return _probe.find(
            head, queries, scaling, budget.keys, candidates, plan.reach, budget.estimate,
            _workspace(),
        )  # fmt: skip
    walks = plan.kind == "graph" and budget.keys < head.middle_tokens
    return _search.find(
        head, queries, scaling, budget.keys, walks, plan.queue, budget.estimate,
        SEEDS_PER_HEAD, SLACK_SPREADS,
    )  # fmt: skip


@lru_cache(maxsize=4096)  # a layer's is asked for at every step
def _tuned(
    plan: tuple[HeadPlan, ...], keys: int, scaling: float
) -> tuple[NDArray[np.int64], Floats, tuple[Floats | None, ...]]:
    """Return the candidates (H,), the reaches (H,) and the lifts of a layer's heads."""
    candidates = np.array([_candidates(head, keys) for head in plan], np.int64)
    reaches = np.array([head.reach for head in plan], np.float32)
    return candidates, reaches, tuple(_lift(head, scaling) for head in plan)


def _candidates(plan: HeadPlan, keys: int) -> int:
    """Return how many keys a search by clusters scores exactly for each query head.

    The plan says it for the default budget.
    """
    return max(-(-plan.queue * keys // DEFAULT_KEYS), CANDIDATES_PER_KEY * keys)


def _lift(plan: HeadPlan, scaling: float) -> Floats | None:
    """Return what a squared spread of logits is multiplied with, (group,), if anything."""
    return np.array(plan.lift, np.float32) * np.float32(scaling**2) if plan.lift else None


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
    d, dv = heads[0].keys.shape[1], heads[0].values.shape[1]
    if queries.shape[2] != d:
        raise ValueError(f"queries of {queries.shape[2]}, keys of {d}")
    if any(head.keys.shape[1] != d or head.values.shape[1] != dv for head in heads):
        raise ValueError("the heads differ in the size of a key or of a value")
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
