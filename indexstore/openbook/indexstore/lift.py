"""How much the estimate of a head must be lifted, found out on its stored probe queries.

Owns the fit. A cluster's score is the mean of its keys' scores, and e to a mean is less than the
mean of e to each: the more the scores spread, the less. So attend.py adds lift · spread² to it,
spread being stored with the cluster, after the keys read are out of the mean. The lift of a query
head is the one under which, over its probes, the estimate stands for just the attention that the
keys not read have.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.attend import LIFT_LOG_MAX, search
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import LIFT_MAX, Budget, HeadIndex, HeadPlan
from openbook.indexstore.layer import LayerRecords

FITTED_KEYS = 16  # of the budget: one that reads few leaves most to the estimate
HALVINGS = 14  # of [0, LIFT_MAX]: to 0.0001, far below what few probes can tell
DIGITS = 4
UNREAD_MIN = 1e-4  # less attention than this, over all probes, is rounding and teaches nothing
LIFT_UNTAUGHT = 0.25  # then: the median over the demo model's heads (docs/LOG.md)

Floats = NDArray[np.float32]


def lift_plan(
    plan: Sequence[HeadPlan], records: LayerRecords, *, scaling: float, threads: int = 1
) -> tuple[HeadPlan, ...]:
    """Return the plan of a layer with each head's lift, fitted to the layer's probes.

    The same for any number of threads. Without probes there is no lift.
    """
    group = len(records.probe_queries) // max(1, len(records.heads))

    def lifted(head: int) -> HeadPlan:
        mine = slice(head * group, (head + 1) * group)
        queries, lse = records.probe_queries[mine], records.probe_lse[mine]
        lift = fit_lift(records.heads[head], queries, lse, plan=plan[head], scaling=scaling)
        return replace(plan[head], lift=lift)

    with ThreadPoolExecutor(threads) as pool:  # the kernels release the GIL
        return tuple(pool.map(lifted, range(len(records.heads))))


def fit_lift(
    head: HeadIndex, queries: Floats, lse: Floats, *, plan: HeadPlan, scaling: float
) -> tuple[float, ...]:
    """Return the lift of each query head, (group,), or none without probes.

    `queries` (group, p, d) read FITTED_KEYS by `plan`; `lse` (group, p) is that of their
    exact attention. The lift lies in [0, LIFT_MAX].
    """
    group, probes, _ = queries.shape
    if not probes:
        return ()
    variances = (scaling * head.spreads.astype(np.float64)) ** 2  # (c,)
    unread = np.zeros(group)
    scores, counts = [], []
    for probe in range(probes):
        asked = np.ascontiguousarray(queries[:, probe])  # (group, d)
        found = search(head, asked, Budget(keys=FITTED_KEYS), plan, scaling=scaling)
        own = lse[:, probe, None].astype(np.float64)  # (group, 1)
        unread += np.maximum(0, 1 - np.exp(found.logits - own).sum(axis=1))
        means, left = rest_means(head, asked * np.float32(scaling), found.read, found.logits)
        scores.append(means - own)
        counts.append(left)
    stacked, held = np.stack(scores), np.stack(counts)[:, None]  # (p, group, c), (p, 1, c)
    low, high = np.zeros(group), np.full(group, LIFT_MAX)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        more = np.minimum(middle[:, None] * variances, LIFT_LOG_MAX)  # (group, c)
        is_low = (held * np.exp(stacked + more)).sum(axis=(0, 2)) < unread
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    lifts = np.where(unread < UNREAD_MIN, LIFT_UNTAUGHT, (low + high) / 2)
    return tuple(round(float(lift), DIGITS) for lift in lifts)


def rest_means(
    head: HeadIndex, queries: Floats, read: NDArray[np.uint32], logits: Floats
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the mean score of each cluster's keys not read (group, c), and how many they are (c,).

    `queries` (group, d) with the scaling in them; `logits` (group, r) of the keys `read` (r,). A
    cluster of which all were read has a mean of -inf.
    """
    of, clusters = head.cluster_of[read].astype(np.intp), len(head.counts)
    left = head.counts.astype(np.int64) - np.bincount(of, minlength=clusters)  # (c,)
    taken = np.stack([np.bincount(of, weights=row, minlength=clusters) for row in logits])
    sums = (
        head.counts * (queries @ to_float32(head.centroids).T).astype(np.float64) - taken
    )  # (group, c)
    return np.divide(sums, left, out=np.full_like(sums, -np.inf), where=left > 0), left
