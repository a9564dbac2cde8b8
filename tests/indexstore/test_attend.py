"""Attention over the middle equals full attention, and the kernels equal their twins."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from heads import make_head, prefill_queries, structured, tie_aware_recall
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.indexstore import reference
from openbook.indexstore.attend import LIFT_LOG_MAX, attend, search
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import (
    EXACT,
    AttendRequest,
    Budget,
    HeadIndex,
    HeadPlan,
    LayerIndex,
    PlanKind,
)
from openbook.indexstore.plan import QUEUE_NODES

SCAN, GRAPH = HeadPlan("scan", QUEUE_NODES), HeadPlan("graph", QUEUE_NODES)
CLUSTERS = HeadPlan("clusters", 200, reach=1.5)
ARRAYS = [array.name for array in fields(HeadIndex) if array.init]


def request_of(heads: tuple[HeadIndex, ...], queries: Any, **changes: Any) -> AttendRequest:
    layer = LayerIndex(heads, changes.pop("plan", (CLUSTERS,) * len(heads)))
    return AttendRequest(layer, queries, 0.125, **{"budget": Budget(), **changes})


def two_heads(m: int, d: int, **options: Any) -> tuple[tuple[HeadIndex, ...], Any]:
    rng = np.random.default_rng(m + d)
    keys = [structured(rng, m, d) for _ in range(2)]
    heads = tuple(make_head(k, seed=i, **options) for i, k in enumerate(keys))
    queries = np.concatenate([prefill_queries(rng, k, 3) for k in keys])  # (6, d), group 3
    return heads, queries[:, None, :]


def full_attention(request: AttendRequest) -> tuple[Any, Any]:
    group = request.queries.shape[0] // len(request.layer.heads)
    out, lse = [], []
    for h, rows in enumerate(request.queries):
        head = request.layer.heads[h // group]
        for row in rows:
            logits = request.scaling * (to_float32(head.keys).astype(np.float64) @ row)
            weights = np.exp(logits - logits.max())
            out.append(weights @ to_float32(head.values) / weights.sum())
            lse.append(logits.max() + np.log(weights.sum()))
    shape = request.queries.shape[:2]
    return np.reshape(out, (*shape, -1)), np.reshape(lse, shape)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("m", [1, 31, 32, 33, 700])
@pytest.mark.parametrize("d", [8, 20, 64])
def test_exact_equals_full_attention(kv_dtype: str, m: int, d: int) -> None:
    heads, queries = two_heads(m, d, kv_dtype=kv_dtype)
    queries = np.repeat(queries, 3, axis=1) * np.linspace(0.5, 1, 3, dtype=np.float32)[:, None]
    request = request_of(heads, queries, budget=EXACT)
    (result,) = attend([request])
    out, lse = full_attention(request)
    np.testing.assert_allclose(result.out, out, atol=2e-5)
    np.testing.assert_allclose(result.lse, lse, atol=2e-5)
    assert result.keys_read == result.keys_scored == 2 * m
    assert np.isneginf(result.estimated_lse).all()


def test_exact_is_the_same_for_any_rows_and_threads() -> None:
    heads, queries = two_heads(300, 16)
    rng = np.random.default_rng(1)
    many = rng.standard_normal((6, 130, 16)).astype(np.float32)
    whole = attend([request_of(heads, many, budget=EXACT)], threads=2)[0]
    alone = attend([request_of(heads, many[:, :64].copy(), budget=EXACT)])[0]
    assert np.array_equal(whole.out[:, :64], alone.out)
    assert np.array_equal(whole.lse[:, :64], alone.lse)


@pytest.mark.parametrize("plan", [CLUSTERS, SCAN, GRAPH])
@pytest.mark.parametrize("estimate", [True, False])
@pytest.mark.parametrize("keys", [0, 1, 10, 100])
def test_keys_budget_equals_its_twin(plan: HeadPlan, estimate: bool, keys: int) -> None:
    heads, queries = two_heads(900, 16)
    budget = Budget(keys=keys, estimate=estimate)
    request = request_of(heads, queries, budget=budget, plan=(plan, plan), evidence=True)
    (result,) = attend([request])
    twin = reference.attend(request)
    for mine, theirs in zip(result.ids, twin.ids, strict=True):
        assert np.array_equal(mine, theirs)
    np.testing.assert_allclose(result.out, twin.out, atol=2e-5)
    np.testing.assert_allclose(result.lse, twin.lse, atol=2e-5)
    np.testing.assert_allclose(result.estimated_lse, twin.estimated_lse, atol=2e-5)
    assert result.keys_read == twin.keys_read
    assert result.keys_scored == twin.keys_scored
    assert result.centroids_scored == twin.centroids_scored


LIFTS = (0.0, 0.3, 1.0)


@pytest.mark.parametrize("plan", [CLUSTERS, SCAN, GRAPH])
@pytest.mark.parametrize("keys", [0, 1, 10, 100])
def test_lifted_estimate_equals_its_twin(plan: HeadPlan, keys: int) -> None:
    heads, queries = two_heads(900, 16)
    plans = (replace(plan, lift=LIFTS), replace(plan, lift=LIFTS[::-1]))
    request = request_of(heads, queries, budget=Budget(keys=keys), plan=plans)
    (result,) = attend([request])
    twin = reference.attend(request)
    np.testing.assert_allclose(result.out, twin.out, atol=2e-5)
    np.testing.assert_allclose(result.lse, twin.lse, atol=2e-5)
    np.testing.assert_allclose(result.estimated_lse, twin.estimated_lse, atol=2e-5)
    (plain,) = attend([request_of(heads, queries, budget=Budget(keys=keys), plan=(plan, plan))])
    assert np.abs(result.estimated_lse - plain.estimated_lse).min() > 1e-3 or keys == 0


def test_lift_changes_nothing_where_nothing_is_estimated() -> None:
    heads, queries = two_heads(300, 16)
    for budget in (EXACT, Budget(keys=20, estimate=False), Budget(keys=300)):
        lifted, plain = (
            attend([request_of(heads, queries, budget=budget, plan=(plan, plan))])[0]
            for plan in (replace(SCAN, lift=LIFTS), SCAN)
        )
        assert np.array_equal(lifted.out, plain.out) and np.array_equal(lifted.lse, plain.lse)


def test_lift_without_keys_read_adds_at_most_its_limit() -> None:
    heads, queries = two_heads(900, 16)
    wild = tuple(replace(head, spreads=np.full_like(head.spreads, 1e30)) for head in heads)
    none = Budget(keys=0)
    lifted, plain = (
        attend([request_of(wild, queries, budget=none, plan=(plan, plan))])[0]
        for plan in (replace(SCAN, lift=(1.0, 1.0, 1.0)), SCAN)
    )
    np.testing.assert_allclose(lifted.lse - plain.lse, LIFT_LOG_MAX, atol=1e-5)
    np.testing.assert_allclose(lifted.out, plain.out, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), m=st.integers(1, 160), d=st.sampled_from([4, 8, 17]),
    keys=st.integers(0, 40), kind=st.sampled_from(["clusters", "scan", "graph"]),
    rows_are=st.sampled_from(["random", "equal", "zero"]),
)  # fmt: skip
def test_random_heads_equal_their_twins(
    seed: int, m: int, d: int, keys: int, kind: PlanKind, rows_are: str
) -> None:
    rng = np.random.default_rng(seed)
    rows = structured(rng, m, d)
    if rows_are == "equal":
        rows[: m // 2] = rows[0]
    elif rows_are == "zero":
        rows[:] = 0
    heads = (make_head(rows, seed=seed, train=20),)
    queries = rng.standard_normal((2, 1, d)).astype(np.float32)
    lift = (0.0, 0.4) if seed % 2 else ()
    plan = (HeadPlan(kind, 24, lift, reach=1.5),)
    request = request_of(heads, queries, budget=Budget(keys=keys), plan=plan, evidence=True)
    (result,) = attend([request])
    twin = reference.attend(request)
    keys_in_order = to_float32(heads[0].in_text_order(heads[0].keys))
    logits = 0.125 * (keys_in_order @ queries[:, 0].T).T
    for mine, theirs, row in zip(result.ids, twin.ids, logits, strict=True):
        # The same keys, or others of the same score.
        np.testing.assert_allclose(np.sort(row[mine]), np.sort(row[theirs]), atol=1e-5)
    np.testing.assert_allclose(result.lse, twin.lse, atol=1e-4)
    assert np.isfinite(result.out).all()


def test_all_keys_read_leave_nothing_to_the_estimate() -> None:
    heads, queries = two_heads(80, 16)
    request = request_of(heads, queries, budget=Budget(keys=100))
    (result,) = attend([request])
    out, lse = full_attention(request)
    assert np.isneginf(result.estimated_lse).all()
    np.testing.assert_allclose(result.out, out, atol=2e-5)
    np.testing.assert_allclose(result.lse, lse, atol=2e-5)


def test_estimate_lowers_the_error_of_few_keys() -> None:
    heads, queries = two_heads(3000, 32)
    out, _ = full_attention(request_of(heads, queries))
    error = {
        estimate: np.linalg.norm(
            attend([request_of(heads, queries, budget=Budget(keys=20, estimate=estimate))])[0].out
            - out
        )
        for estimate in (True, False)
    }
    assert error[True] < 0.5 * error[False]


def test_walk_finds_what_a_scan_finds() -> None:
    heads, queries = two_heads(4000, 32, train=2000)
    for number, head in enumerate(heads):
        mine = np.ascontiguousarray(queries[number * 3 : number * 3 + 3, 0])
        found = search(head, mine, Budget(), GRAPH)
        recalls = [
            tie_aware_recall(head.keys, q, top, 100) for q, top in zip(mine, found.top, strict=True)
        ]
        assert np.mean(recalls) >= 0.9
        assert found.keys_scored < 4000


@pytest.mark.parametrize("plan", [CLUSTERS, SCAN, HeadPlan("graph", 20)])
def test_case_b02_all_keys_wanted_are_all_keys_read(plan: HeadPlan) -> None:
    heads, queries = two_heads(300, 16)
    for keys in (300, 301, 2**31 - 1):
        request = request_of(heads, queries, budget=Budget(keys=keys), plan=(plan, plan))
        (result,) = attend([request])
        assert result.keys_read == 600


def test_evidence_gives_ids_and_logits_of_what_was_read() -> None:
    heads, queries = two_heads(400, 16)
    request = request_of(heads, queries, budget=Budget(keys=7), evidence=True)
    (result,) = attend([request])
    assert len(result.ids) == len(result.logits) == 6
    for h, (ids, logits) in enumerate(zip(result.ids, result.logits, strict=True)):
        head = heads[h // 3]
        keys = to_float32(head.in_text_order(head.keys))
        expected = 0.125 * (keys[ids] @ queries[h, 0])
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_read_only_arrays_are_accepted() -> None:
    heads, queries = two_heads(200, 16)
    for head in heads:
        for name in ARRAYS:
            getattr(head, name).flags.writeable = False
    queries.flags.writeable = False
    for plan in (CLUSTERS, SCAN, GRAPH):
        (result,) = attend([request_of(heads, queries, plan=(plan, plan))])
        assert np.isfinite(result.out).all()


def test_a_batch_equals_its_requests_alone_for_any_threads() -> None:
    kinds = [(CLUSTERS, CLUSTERS), (SCAN, GRAPH), (CLUSTERS, SCAN), (CLUSTERS, CLUSTERS)]
    requests = [
        request_of(*two_heads(m, 16), plan=plan, evidence=True)
        for m, plan in zip((150, 400, 90, 1), kinds, strict=True)
    ]
    requests.insert(1, request_of(*two_heads(70, 16), budget=EXACT))
    alone = [attend([request])[0] for request in requests]
    for threads in (1, 2, 4, 16):
        for mine, theirs in zip(attend(requests, threads=threads), alone, strict=True):
            for name in ("out", "lse", "estimated_lse", "ids", "logits"):
                for one, other in zip(getattr(mine, name), getattr(theirs, name), strict=True):
                    assert np.array_equal(one, other), name
            assert mine.keys_read == theirs.keys_read
            assert mine.keys_scored == theirs.keys_scored


@pytest.mark.parametrize("number", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("plan", [CLUSTERS, SCAN, GRAPH])
def test_query_that_is_no_number_gives_no_number_that_looks_like_one(
    plan: HeadPlan, number: float
) -> None:
    (head, _), good = two_heads(700, 16)
    queries = np.full((3, 16), number, np.float32)
    for _ in range(5):  # the memory that it works in has been used for other numbers before
        search(head, good[:3, 0], Budget(keys=5), plan)
        found = search(head, queries, Budget(keys=5), plan)
        assert not np.isfinite(found.lse).any()
        assert not np.isfinite(found.out).any() or (found.out == 0).all()


def test_no_heads_are_the_empty_set() -> None:
    queries = np.ones((6, 2, 16), np.float32)
    (result,) = attend([AttendRequest(LayerIndex((), ()), queries, 0.125, EXACT)])
    assert np.isneginf(result.lse).all() and result.out.shape == (6, 2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": np.ones((5, 1, 16), np.float32)}, "5 query heads"),
        ({"queries": np.ones((0, 1, 16), np.float32)}, "0 query heads"),
        ({"queries": np.ones((6, 1, 8), np.float32)}, "queries of 8"),
        ({"queries": np.ones((6, 2, 16), np.float32)}, "one row"),
        ({"queries": np.ones((6, 1, 16), np.float64)}, "float32"),
        ({"scaling": 0.0}, "scaling"),
        ({"scaling": np.inf}, "finite"),
        ({"plan": (HeadPlan("other", 0),) * 2}, "kind"),
        ({"plan": (SCAN,)}, "1 plans"),
        ({"plan": (SCAN, replace(SCAN, lift=(0.5, 0.5)))}, "other than 3 query heads"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    heads, queries = two_heads(60, 16)
    fields = {"queries": queries, "scaling": 0.125, "plan": (SCAN, SCAN), **changes}
    with pytest.raises(ValueError, match=message):
        layer = LayerIndex(heads, fields.pop("plan"))
        attend([AttendRequest(layer, budget=Budget(), **fields)])


@pytest.mark.parametrize(("kind", "keys"), [("all", 10), ("keys", -1)])
def test_bad_budgets_are_refused(kind: Any, keys: int) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget(kind=kind, keys=keys)


def test_head_index_refuses_arrays_the_kernels_cannot_trust() -> None:
    (head, _), _ = two_heads(60, 16)
    arrays = {name: getattr(head, name) for name in ARRAYS}
    with pytest.raises(ValueError, match="graph"):
        HeadIndex(**{**arrays, "graph": head.graph[:-1]})
    with pytest.raises(ValueError, match="contiguous"):
        HeadIndex(**{**arrays, "keys_int8": np.asfortranarray(head.keys_int8)})
    with pytest.raises(TypeError, match="stored dtype"):
        HeadIndex(**{**arrays, "keys": head.keys.astype(np.float64)})


def test_case_b02_more_keys_wanted_than_stored() -> None:
    for m in (1, 2, 100, 101):
        heads, queries = two_heads(m, 16)
        for plan in (CLUSTERS, SCAN, GRAPH):
            request = request_of(heads, queries, plan=(plan, plan), evidence=True)
            (result,) = attend([request])
            out, lse = full_attention(request)
            if m <= 100:
                assert all(np.array_equal(np.sort(ids), np.arange(m)) for ids in result.ids)
                np.testing.assert_allclose(result.out, out, atol=2e-5)
            np.testing.assert_allclose(result.lse, lse, atol=2e-2)
