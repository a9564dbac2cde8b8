"""The plain twins of attend.py, _attend.pyx and _search.pyx, in NumPy and Python loops.

Owns no speed at all. Tests compare the kernels with these; nothing else calls them. The twins of
_build.pyx are in reference_build.py, those of _probe.pyx in reference_probe.py.
Integers (int8 scores, ids, edges) agree to the bit; floats up to rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.attend import LIFT_LOG_MAX, SEEDS_PER_HEAD, SLACK_SPREADS
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import (
    CANDIDATES_PER_KEY,
    DEFAULT_KEYS,
    AttendRequest,
    AttendResult,
    HeadIndex,
    HeadPlan,
)
from openbook.indexstore.reference_probe import dot, probe

Floats = NDArray[np.float32]
LIGHTEST = 0.1  # of the whole: what the clusters that are not fetched come to, at most
SPARE = 4  # one more candidate is re-scored per 4 wanted


def softmax_partial(logits: Floats, values: Floats) -> tuple[Floats, float]:
    """Attend one query: logits (m,), values (m, dv) -> out (dv,), lse. Empty: zeros and -inf."""
    if len(logits) == 0:
        return np.zeros(values.shape[1], np.float32), -np.inf
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max())
    out = (weights @ values.astype(np.float64)) / weights.sum()
    return out.astype(np.float32), float(wide.max() + np.log(weights.sum()))


def attend(request: AttendRequest) -> AttendResult:
    """Do what attend.attend does for one request, one query head and row at a time."""
    query_heads, rows, _ = request.queries.shape
    group = query_heads // max(1, len(request.layer.heads))
    dv = request.layer.heads[0].values.shape[1] if request.layer.heads else 0
    out = np.zeros((query_heads, rows, dv), np.float32)
    lse = np.full((query_heads, rows), -np.inf, np.float32)
    estimated = lse.copy()
    read_count = scored = centroids = 0
    ids: list[NDArray[np.int64]] = []
    logits: list[Floats] = []
    for number, head in enumerate(request.layer.heads):
        mine = slice(number * group, (number + 1) * group)
        keys, values = to_float32(head.keys), to_float32(head.values)
        if request.budget.kind == "exact":
            read = np.arange(len(keys))
            scored += len(keys)
        else:
            _, read, touched = find(request, number)
            scored += touched
            kind = request.layer.plan[number].kind
            walks = kind == "graph" and request.budget.keys > 0
            if request.budget.estimate or walks or kind == "clusters":
                centroids += len(head.counts)
        read_count += len(read)
        for h in range(mine.start, mine.stop):
            for row in range(rows):
                z = request.scaling * (keys[read] @ request.queries[h, row])
                rest = None
                if request.budget.kind == "keys" and request.budget.estimate:
                    rest = estimate(head, read, request.scaling * request.queries[h, row])
                    if request.layer.plan[number].lift:
                        lift = request.layer.plan[number].lift[h - mine.start]
                        rest = lifted(head, rest, read, z, lift * request.scaling**2)
                out[h, row], lse[h, row], estimated[h, row] = combine(
                    z, values[read], rest, len(head.counts)
                )
            ids.append(head.places(read.astype(np.uint32)))
            logits.append(z)
    evidence = request.evidence and request.layer.heads
    return AttendResult(
        out, lse, estimated, read_count, scored, centroids,
        tuple(ids) if evidence else (), tuple(logits) if evidence else (),
    )  # fmt: skip


def estimate(
    head: HeadIndex, read: NDArray[np.intp], query: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return (logits, counts, value sums) of the clusters' keys that were not read.

    The values of those are taken to be what the values of the whole cluster are in the mean.
    """
    counts = head.counts.astype(np.float32)
    for key in read:
        counts[head.cluster_of[key]] -= 1
    left = counts > 0
    shares = np.asarray(counts / head.counts, np.float32)
    sums = to_float32(head.value_sums) * shares[:, None]
    return to_float32(head.centroids)[left] @ query, counts[left], sums[left]


def lifted(
    head: HeadIndex,
    rest: tuple[Floats, Floats, Floats],
    read: NDArray[np.intp],
    logits: Floats,
    lift: float,
) -> tuple[Floats, Floats, Floats]:
    """Return the rest with its scores corrected: of the keys that are left, and by their spread."""
    cluster_logits, counts, sums = rest
    left = np.bincount(head.cluster_of[read], minlength=len(head.counts)) < head.counts
    taken = np.bincount(head.cluster_of[read], weights=logits, minlength=len(head.counts))
    means = (head.counts[left] * cluster_logits.astype(np.float64) - taken[left]) / counts
    more = np.minimum(lift * head.spreads[left].astype(np.float64) ** 2, LIFT_LOG_MAX)
    return (means + more).astype(np.float32), counts, sums


def combine(
    logits: Floats, values: Floats, rest: tuple[Floats, Floats, Floats] | None, clusters: int
) -> tuple[Floats, float, float]:
    """Join the keys read with the rest of `clusters`: out, lse, and the clusters' part of lse."""
    if rest is None or len(rest[0]) == 0:
        out, lse = softmax_partial(logits, values)
        return out, lse, -np.inf
    cluster_logits, counts, sums = rest
    peak = float(max(logits.max(initial=-np.inf), cluster_logits.max()))
    weights = np.exp(logits.astype(np.float64) - peak)
    cluster_weights = np.exp(cluster_logits.astype(np.float64) - peak)
    mass = float(cluster_weights @ counts)
    total = weights.sum() + mass
    # Only what weighs is fetched; the values of the light ones are taken to be like the others'.
    heavy = cluster_weights * counts >= total * LIGHTEST / clusters
    fetched = total - cluster_weights[~heavy] @ counts[~heavy]
    out = (weights @ values + cluster_weights[heavy] @ sums[heavy]) / fetched
    return out.astype(np.float32), peak + np.log(total), peak + np.log(mass)


def find(request: AttendRequest, number: int) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Return (each query head's own best keys, the keys read by id, keys scored) of one KV head."""
    layer, wanted = request.layer, request.budget.keys
    head, plan = layer.heads[number], layer.plan[number]
    group = request.queries.shape[0] // len(layer.heads)
    queries = request.queries[number * group : (number + 1) * group, 0]
    keys = to_float32(head.keys)
    k = min(wanted, len(keys))
    if k == 0:
        return np.zeros((group, 0), np.intp), np.zeros(0, np.intp), 0
    capacity = min(len(keys), _candidates(plan, wanted, k))
    if plan.kind == "clusters":
        found, touched = probe(
            head, queries, request.scaling, candidates=capacity, reach=plan.reach
        )
    elif plan.kind == "graph" and wanted < len(keys):
        scores = int8_scores(head, queries)  # (group, m)
        found, touched = walk(head, queries, scores, request.scaling, (k, capacity, plan))
    else:
        scores = int8_scores(head, queries)
        found = [best_first(np.arange(len(keys)), row, capacity) for row in scores]
        touched = len(keys)
    pool = np.unique(np.concatenate(found))
    exact = np.stack([dot(keys[pool], query) for query in queries])  # (group, pool)
    top = np.array([pool[best_first(np.arange(len(pool)), row, k)] for row in exact])
    return top, pool if request.budget.estimate else np.unique(top), touched


def _candidates(plan: HeadPlan, wanted: int, k: int) -> int:
    """Return how many keys are scored exactly for each query head."""
    if plan.kind == "clusters":
        return max(-(-plan.queue * wanted // DEFAULT_KEYS), CANDIDATES_PER_KEY * wanted)
    return max(k + k // SPARE, plan.queue if plan.kind == "graph" else 0)


def best_first(ids: NDArray[np.intp], scores: NDArray[np.generic], count: int) -> NDArray[np.intp]:
    """Return the best `count` of `ids` by `scores[ids]`, the lower id first on a tie."""
    order = np.lexsort((ids, -scores[ids].astype(np.float64)))
    return ids[order[:count]]


def quantise_queries(head: HeadIndex, queries: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Fold the key scales into queries (group, d) in 16 bits; also the integer units per score."""
    limit = min(32767, 2147483647 // (128 * queries.shape[1]))
    folded = queries * head.array("scale")
    largest = np.abs(folded).max(axis=1)
    inverse = np.zeros(len(queries), np.float32)
    np.divide(np.float32(limit), largest, out=inverse, where=largest > 0)
    return np.rint(folded * inverse[:, None]).astype(np.int64), inverse


def int8_scores(head: HeadIndex, queries: Floats) -> NDArray[np.int64]:
    """Score every key (m,) of every query head (group,) in integers: (group, m)."""
    quantised, _ = quantise_queries(head, queries)
    return quantised @ head.array("keys_int8").astype(np.int64).T


def walk(
    head: HeadIndex,
    queries: Floats,
    scores: NDArray[np.int64],
    scaling: float,
    limits: tuple[int, int, HeadPlan],
) -> tuple[list[NDArray[np.intp]], int]:
    """Walk the graph as the kernel does, query heads in turn: candidates and keys scored."""
    k, capacity, plan = limits
    group = len(queries)
    logits = np.float32(scaling) * (queries @ to_float32(head.centroids).T)  # (group, c)
    _, inverse = quantise_queries(head, queries)
    base = queries @ head.array("centre")
    bounds = (
        logits / np.float32(scaling) - base[:, None] + np.float32(SLACK_SPREADS) * head.spreads
    ) * inverse[:, None]
    seeds = [int(head.array("entries")[0])]
    for g in range(group):
        best = best_first(np.arange(len(head.counts)), logits[g], SEEDS_PER_HEAD)
        seeds += [int(head.array("entries")[1 + c]) for c in best]
    visited: set[int] = set()
    queues: list[list[int]] = [[] for _ in range(group)]
    expanded: list[set[int]] = [set() for _ in range(group)]
    thresholds = np.full(group, -np.inf)
    scored = 0

    def visit(ids: list[int]) -> int:
        new = [key for key in dict.fromkeys(ids) if key not in visited]
        visited.update(new)
        kept = [key for key in new if (bounds[:, head.cluster_of[key]] > thresholds).any()]
        for g in range(group):
            everyone = np.array(queues[g] + kept, np.intp)
            queues[g] = [int(key) for key in best_first(everyone, scores[g], capacity)]
        return len(kept)

    scored += visit(seeds)
    while True:
        moved = False
        for g in range(group):
            todo = [key for key in queues[g][: plan.queue] if key not in expanded[g]]
            if not todo:
                continue
            moved = True
            expanded[g].add(todo[0])
            for h in range(group):
                if len(queues[h]) >= k:
                    thresholds[h] = scores[h][queues[h][k - 1]]
            scored += visit([int(key) for key in head.array("graph")[todo[0]]])
        if not moved:
            return [np.array(queue, np.intp) for queue in queues], scored
