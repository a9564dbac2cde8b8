"""What each head does under a `keys` budget, found out at ingest on queries that trained nothing.

Owns how far a search goes: how many spreads above a cluster's centroid a key is still looked for
and how many candidates are scored exactly, or how long a walk is. A search that goes far finds more
of what a query wants and scores more keys for it; heads differ tenfold in how far they need. The
plan is stored in the manifest, so that every worker answers alike; it depends on counts and never
on a clock, so that the same document gives the same plan. A head is searched by its clusters; a
forced plan, of a scan or a walk, is for measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.attend import find
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan, PlanKind

CANDIDATES = (200, 300, 400, 600, 1000)  # scored exactly per query head, for a hundred wanted
REACHES = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 5.0)
SCORED_PER_CANDIDATE = 15  # codes are looked up in the time that one candidate takes
QUEUES = (48, 64, 80, 96, 112, 128, 160, 192, 256, 384)  # what a head's walk may have
QUEUE_NODES = 128  # of a walk, where nothing is known of the head
UNTUNED_CANDIDATES, UNTUNED_REACH = 300, 3.0  # enough for most heads: nothing is known of this one
RECALL_MIN = 0.96  # of the best keys, in the mean over the tuning queries; others get 0.95 or so

_UNTUNED = {
    "clusters": HeadPlan("clusters", UNTUNED_CANDIDATES, reach=UNTUNED_REACH),
    "scan": HeadPlan("scan", 0),
    "graph": HeadPlan("graph", QUEUE_NODES),
}


def untuned_plan(kind: PlanKind = "clusters") -> HeadPlan:
    """Return how a KV head of which nothing is known answers."""
    return _UNTUNED[kind]


def force_plan(plan: Sequence[HeadPlan], kind: PlanKind) -> tuple[HeadPlan, ...]:
    """Return `plan` with every head searched in one way; what each has for it stays."""
    return tuple(
        head if head.kind == kind else replace(untuned_plan(kind), lift=head.lift) for head in plan
    )


def tune_plan(
    plan: Sequence[HeadPlan],
    heads: Sequence[HeadIndex],
    queries: NDArray[np.float32],
    wanted: NDArray[np.int32],
    *,
    threads: int = 1,
) -> tuple[HeadPlan, ...]:
    """Return the plan of a layer with each head's search as long as it needs to be.

    `queries` (query heads, p, d) trained no index; `wanted` (query heads, p, k) are the ids of
    each one's best keys. The same for any number of threads.
    """
    group = len(queries) // max(1, len(heads))

    def tuned(number: int) -> HeadPlan:
        own, head = plan[number], heads[number]
        mine = slice(number * group, (number + 1) * group)
        if own.kind == "clusters":
            return cheapest_plan(head, own, queries[mine], wanted[mine])
        if own.kind == "graph":
            steps = [replace(own, queue=queue) for queue in QUEUES]
            return first_enough(
                steps, lambda step: measured(head, step, queries[mine], wanted[mine])
            )
        return own

    with ThreadPoolExecutor(threads) as pool:  # the kernels release the GIL
        return tuple(pool.map(tuned, range(len(heads))))


def cheapest_plan(
    head: HeadIndex, own: HeadPlan, queries: NDArray[np.float32], wanted: NDArray[np.int32]
) -> HeadPlan:
    """Return the cheapest of CANDIDATES and REACHES that finds enough; the widest if none does.

    A search costs the keys whose codes it looks up and SCORED_PER_CANDIDATE for each that it scores
    exactly. `queries` (group, p, d), `wanted` (group, p, k).
    """
    known: dict[HeadPlan, tuple[float, float]] = {}

    def found(step: HeadPlan) -> tuple[float, float]:
        if step not in known:
            known[step] = measured(head, step, queries, wanted)
        return known[step]

    def cost(step: HeadPlan) -> float:
        return found(step)[1] + SCORED_PER_CANDIDATE * step.queue

    best: HeadPlan | None = None
    for candidates in CANDIDATES:
        if best is not None and SCORED_PER_CANDIDATE * candidates >= cost(best):
            break
        steps = [replace(own, queue=candidates, reach=reach) for reach in REACHES]
        step = first_enough(steps, found)
        is_enough = found(step)[0] >= RECALL_MIN
        if is_enough and (best is None or cost(step) < cost(best)):
            best = step
    return step if best is None else best


def first_enough(
    steps: Sequence[HeadPlan], found: Callable[[HeadPlan], tuple[float, float]]
) -> HeadPlan:
    """Return the first of `steps`, each of which finds more, that finds enough, or the last."""
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        recall, _ = found(steps[middle])
        low, high = (low, middle) if recall >= RECALL_MIN else (middle + 1, high)
    return steps[low]


def measured(
    head: HeadIndex, plan: HeadPlan, queries: NDArray[np.float32], wanted: NDArray[np.int32]
) -> tuple[float, float]:
    """Return the share of the wanted keys that searches find, and the keys they score, in the mean.

    `queries` (group, p, d), `wanted` (group, p, k).
    """
    _, count, k = wanted.shape
    budget, hits, scored = Budget(keys=k, estimate=False), 0, 0
    for number in range(count):
        asked = np.ascontiguousarray(queries[:, number])
        top, _, _, _, touched = find(head, asked, budget, plan, scaling=1.0)
        scored += touched
        for mine, best in zip(top, wanted[:, number], strict=True):
            is_wanted = np.zeros(head.middle_tokens, bool)
            is_wanted[best] = True
            hits += int(np.count_nonzero(is_wanted[mine]))
    return hits / wanted.size, scored / count
