"""A head's walk is as long as its queries need, and no head walks where a scan would be sooner."""

from __future__ import annotations

import numpy as np
import pytest
from heads import exact_top, prefill_queries, structured

from openbook.indexstore import plan as plan_module
from openbook.indexstore.attend import search
from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.dtypes import to_float32, to_stored
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan
from openbook.indexstore.plan import QUEUES, RECALL_MIN, needed_queue, tune_plan

KEYS, WIDTH, GROUP, QUERIES, WANTED = 3000, 16, 2, 12, 50


def made(seed: int) -> tuple[HeadIndex, np.ndarray, np.ndarray]:
    """Return a head, queries (group, p, d) that trained nothing, and the keys that they want."""
    rng = np.random.default_rng(seed)
    stored = to_stored(structured(rng, KEYS, WIDTH), "float16")
    train = prefill_queries(rng, to_float32(stored), 400)
    top = exact_top(stored, train, 100)
    head = build_head(stored, stored, train, top, params=IndexParams(degree=12))
    queries = prefill_queries(rng, to_float32(stored), GROUP * QUERIES)
    wanted = exact_top(stored, queries, WANTED)
    return head, queries.reshape(GROUP, QUERIES, -1), wanted.reshape(GROUP, QUERIES, -1)


def recall(head: HeadIndex, queries: np.ndarray, wanted: np.ndarray, queue: int) -> float:
    found = 0
    for number in range(QUERIES):
        asked = np.ascontiguousarray(queries[:, number])
        top = search(head, asked, Budget(keys=WANTED), HeadPlan("graph", queue)).top
        found += sum(
            len(set(mine.tolist()) & set(best.tolist()))
            for mine, best in zip(top, wanted[:, number], strict=True)
        )
    return found / wanted.size


@pytest.mark.parametrize("seed", range(4))
def test_queue_is_the_shortest_that_finds_enough(seed: int) -> None:
    head, queries, wanted = made(seed)
    queue, scored = needed_queue(head, queries, wanted)
    shares = [recall(head, queries, wanted, each) for each in QUEUES]
    enough = [each for each, share in zip(QUEUES, shares, strict=True) if share >= RECALL_MIN]
    assert queue == (enough or QUEUES)[0 if enough else -1], shares
    assert 0 < scored <= KEYS


def test_head_whose_walk_would_be_slower_scans_unless_it_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, queries, wanted = made(0)
    walks = (HeadPlan("graph", 128),)
    _, scored = needed_queue(head, queries, wanted)
    for factor, kind in ((KEYS / scored * 0.99, "graph"), (KEYS / scored * 1.01, "scan")):
        monkeypatch.setattr(plan_module, "WALKED_PER_SCANNED", factor)
        (chosen,) = tune_plan(walks, (head,), queries, wanted)
        assert chosen.kind == kind
    (forced,) = tune_plan(walks, (head,), queries, wanted, may_scan=False)
    assert forced.kind == "graph"


def test_plan_is_the_same_for_any_threads_and_heads_that_scan_are_left_alone() -> None:
    heads, queries, wanted = zip(*(made(seed) for seed in range(3)), strict=True)
    plan = (HeadPlan("graph", 128), HeadPlan("scan", 7, (0.25, 0.5)), HeadPlan("graph", 128))
    given = plan, heads, np.concatenate(queries), np.concatenate(wanted)
    one, two = tune_plan(*given, may_scan=False), tune_plan(*given, may_scan=False, threads=2)
    assert one == two and one[1] == plan[1]
    assert [head.kind for head in one] == ["graph", "scan", "graph"]
