"""What each head does under a `keys` budget, found out at ingest on queries that trained nothing.

Owns the choice between scanning a head and walking its graph, and how far a walk goes. A walk that
goes far finds more of what a query wants and scores more keys for it; heads differ tenfold in how
far they need. The plan is stored in the manifest, so that every worker answers alike; it depends on
counts and never on a clock, so that the same document gives the same plan. A forced plan is for
measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.attend import search
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan, PlanKind

GRAPH_KEYS_MIN = 16_384  # below it a scan has been the faster for every head (docs/LOG.md)
QUEUE_NODES = 128  # expanded per query head, where nothing is known of the head
QUEUES = (48, 64, 80, 96, 112, 128, 160, 192, 256, 384)  # what a head's walk may have instead
RECALL_MIN = 0.965  # of the best keys, in the mean over the tuning queries; others get 0.95 or so
WALKED_PER_SCANNED = 12  # a key that a walk scores takes as long as so many that a scan scores


def plan_head(middle_tokens: int) -> HeadPlan:
    """Choose how one KV head of `middle_tokens` keys answers, as far as its size tells."""
    kind: PlanKind = "graph" if middle_tokens >= GRAPH_KEYS_MIN else "scan"
    return HeadPlan(kind=kind, queue=QUEUE_NODES)


def force_plan(plan: Sequence[HeadPlan], kind: PlanKind) -> tuple[HeadPlan, ...]:
    """Return `plan` with every head scanning, or every head walking its graph."""
    return tuple(replace(head, kind=kind) for head in plan)


def tune_plan(
    plan: Sequence[HeadPlan],
    heads: Sequence[HeadIndex],
    queries: NDArray[np.float32],
    wanted: NDArray[np.int32],
    *,
    may_scan: bool = True,
    threads: int = 1,
) -> tuple[HeadPlan, ...]:
    """Return the plan of a layer with each walk as long as its head needs.

    `queries` (query heads, p, d) trained no index; `wanted` (query heads, p, k) are the ids of
    each one's best keys. A head whose walk would take longer than a scan scans, if it may. The
    same for any number of threads.
    """
    group = len(queries) // max(1, len(heads))

    def tuned(number: int) -> HeadPlan:
        own = plan[number]
        if own.kind == "scan":
            return own
        mine = slice(number * group, (number + 1) * group)
        queue, scored = needed_queue(heads[number], queries[mine], wanted[mine])
        is_slower = scored * WALKED_PER_SCANNED > heads[number].middle_tokens
        return replace(own, kind="scan" if may_scan and is_slower else "graph", queue=queue)

    with ThreadPoolExecutor(threads) as pool:  # the kernels release the GIL
        return tuple(pool.map(tuned, range(len(heads))))


def needed_queue(
    head: HeadIndex, queries: NDArray[np.float32], wanted: NDArray[np.int32]
) -> tuple[int, float]:
    """Return the shortest of QUEUES whose walks find enough, and the keys they score, in the mean.

    `queries` (group, p, d), `wanted` (group, p, k). Where none finds enough, the longest.
    """
    low, high = 0, len(QUEUES) - 1
    walked = {}
    while low < high:  # a longer walk finds more
        middle = (low + high) // 2
        walked[middle] = _walked(head, queries, wanted, QUEUES[middle])
        recall, _ = walked[middle]
        low, high = (low, middle) if recall >= RECALL_MIN else (middle + 1, high)
    _, scored = walked.get(low) or _walked(head, queries, wanted, QUEUES[low])
    return QUEUES[low], scored


def _walked(
    head: HeadIndex, queries: NDArray[np.float32], wanted: NDArray[np.int32], queue: int
) -> tuple[float, float]:
    """Return the share of the wanted keys that walks find, and the keys they score, in the mean."""
    _, count, k = wanted.shape
    plan, found, scored = HeadPlan("graph", queue), 0, 0
    for number in range(count):
        asked = np.ascontiguousarray(queries[:, number])
        result = search(head, asked, Budget(keys=k, estimate=False), plan)
        scored += result.keys_scored
        for top, best in zip(result.top, wanted[:, number], strict=True):
            found += len(np.intersect1d(top, best, assume_unique=True))
    return found / wanted.size, scored / count
