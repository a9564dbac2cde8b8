"""A head's search goes as far as its queries need, and no further than that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from heads import exact_top, prefill_queries, structured

from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.dtypes import to_float32, to_stored
from openbook.indexstore.head import HeadIndex, HeadPlan
from openbook.indexstore.plan import (
    CANDIDATES,
    QUEUES,
    REACHES,
    RECALL_MIN,
    SCORED_PER_CANDIDATE,
    measured,
    tune_plan,
    untuned_plan,
)

KEYS, WIDTH, GROUP, QUERIES, WANTED = 3000, 16, 2, 12, 50


def made(seed: int) -> tuple[HeadIndex, np.ndarray, np.ndarray]:
    """Return a head, queries (group, p, d) that trained nothing, and the keys that they want."""
    rng = np.random.default_rng(seed)
    stored = to_stored(structured(rng, KEYS, WIDTH), "float16")
    train = prefill_queries(rng, to_float32(stored), 400)
    top = exact_top(stored, train, 100)
    head = build_head(stored, stored, train, top, params=IndexParams(degree=12))
    queries = prefill_queries(rng, to_float32(stored), GROUP * QUERIES)
    wanted = exact_top(head.keys, queries, WANTED)
    return head, queries.reshape(GROUP, QUERIES, -1), wanted.reshape(GROUP, QUERIES, -1)


@pytest.mark.parametrize("seed", range(4))
def test_walk_is_the_shortest_that_finds_enough(seed: int) -> None:
    head, queries, wanted = made(seed)
    (chosen,) = tune_plan((untuned_plan("graph"),), (head,), queries, wanted)
    steps = [replace(chosen, queue=queue) for queue in QUEUES]
    enough = [step for step in steps if measured(head, step, queries, wanted)[0] >= RECALL_MIN]
    assert chosen == (enough[0] if enough else steps[-1])


@pytest.mark.parametrize("seed", range(4))
def test_search_by_clusters_is_the_cheapest_that_finds_enough(seed: int) -> None:
    head, queries, wanted = made(seed)
    (chosen,) = tune_plan((untuned_plan(),), (head,), queries, wanted)
    recall, scored = measured(head, chosen, queries, wanted)
    assert recall >= RECALL_MIN
    for candidates in CANDIDATES:
        for reach in REACHES:
            other = HeadPlan("clusters", candidates, reach=reach)
            found, touched = measured(head, other, queries, wanted)
            costs = touched + SCORED_PER_CANDIDATE * candidates
            if found >= RECALL_MIN:
                assert costs >= scored + SCORED_PER_CANDIDATE * chosen.queue, other


def test_head_that_finds_too_little_is_searched_as_widely_as_there_is() -> None:
    head, queries, wanted = made(0)
    strangers = np.roll(wanted, 1, axis=1)  # no search finds what other queries want
    (chosen,) = tune_plan((untuned_plan(),), (head,), queries, strangers)
    assert (chosen.queue, chosen.reach) == (CANDIDATES[-1], REACHES[-1])


def test_plan_is_the_same_for_any_threads_and_heads_that_scan_are_left_alone() -> None:
    heads, queries, wanted = zip(*(made(seed) for seed in range(3)), strict=True)
    plan = (HeadPlan("graph", 128), HeadPlan("scan", 7, (0.25, 0.5)), untuned_plan())
    given = plan, heads, np.concatenate(queries), np.concatenate(wanted)
    one, two = tune_plan(*given), tune_plan(*given, threads=2)
    assert one == two and one[1] == plan[1]
    assert [head.kind for head in one] == ["graph", "scan", "clusters"]
