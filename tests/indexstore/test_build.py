"""The index of one head: deterministic, whole, honest about degenerate input."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from heads import exact_top, make_head, prefill_queries, structured, tie_aware_recall

from openbook.indexstore import _build, reference_build
from openbook.indexstore.attend import search
from openbook.indexstore.build import IndexParams, build_head, quantise_keys
from openbook.indexstore.clusters import cluster_keys, group_sums, query_metric
from openbook.indexstore.dtypes import to_float32, to_stored
from openbook.indexstore.graph import near_keys, reachable_keys
from openbook.indexstore.head import Budget, HeadIndex, HeadPlan
from openbook.indexstore.plan import force_plan, tune_plan, untuned_plan

GRAPH, SCAN, CLUSTERS = HeadPlan("graph", 112), HeadPlan("scan", 112), untuned_plan()


def is_whole(head: HeadIndex) -> bool:
    return reachable_keys(head.graph, int(head.entries[0])) == head.middle_tokens


def recall(head: HeadIndex, queries: Any, plan: HeadPlan, k: int = 100) -> tuple[float, float]:
    """Return mean tie-aware recall@k and the mean share of keys scored."""
    found = [search(head, query[None], Budget(keys=k), plan) for query in queries]
    recalls = [
        tie_aware_recall(head.keys, query, one.top[0], min(k, head.middle_tokens))
        for query, one in zip(queries, found, strict=True)
    ]
    shares = [one.keys_scored / head.middle_tokens for one in found]
    return float(np.mean(recalls)), float(np.mean(shares))


@pytest.mark.parametrize("m", [1, 2, 3, 17, 40, 500])
def test_every_key_is_reachable_and_every_id_in_range(m: int) -> None:
    head = make_head(structured(np.random.default_rng(m), m, 16))
    assert is_whole(head)
    assert head.graph.max() < m and head.entries.max() < m
    assert head.graph.shape == (m, IndexParams().degree)
    for x, row in enumerate(head.graph.tolist()):
        neighbours = [y for y in row if y != x]
        assert len(set(neighbours)) == len(neighbours), "no edge twice"


def test_same_seed_same_index_and_another_seed_another() -> None:
    keys = structured(np.random.default_rng(0), 600, 16)
    one, two = make_head(keys), make_head(keys)
    other = make_head(keys, params=IndexParams(seed=1))
    for name in (array.name for array in fields(HeadIndex) if array.init):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert not np.array_equal(one.cluster_of, other.cluster_of)


def test_clusters_partition_the_keys_and_their_sums_add_up() -> None:
    head = make_head(structured(np.random.default_rng(3), 700, 16))
    keys, values = to_float32(head.keys), to_float32(head.values)
    assert (np.diff(head.cluster_of.astype(int)) >= 0).all()
    assert np.array_equal(np.bincount(head.cluster_of), head.counts)
    sums = head.value_sums.astype(np.float32)
    np.testing.assert_allclose(sums.sum(axis=0), values.sum(axis=0), atol=0.1)
    for c in range(len(head.counts)):
        mine = head.cluster_of == c
        np.testing.assert_allclose(head.centroids[c], keys[mine].mean(axis=0), atol=4e-3)
        assert head.cluster_of[head.entries[1 + c]] == c


def test_spreads_are_the_scores_own_spread() -> None:
    rng = np.random.default_rng(5)
    keys = structured(rng, 800, 16)
    queries = prefill_queries(rng, keys, 500)
    stored = to_stored(keys, "float32")
    head = build_head(stored, stored, queries, exact_top(stored, queries, 50), params=IndexParams())
    offsets = to_float32(head.keys) - to_float32(head.centroids)[head.cluster_of]
    squares = ((queries @ offsets.T) ** 2).mean(axis=0)  # (m,)
    expected = np.sqrt(np.bincount(head.cluster_of, squares) / head.counts)
    # The metric is shrunk a little towards an even one (16 of 516 parts).
    np.testing.assert_allclose(head.spreads, expected, rtol=0.1, atol=0.1)


def test_query_metric_measures_score_differences() -> None:
    rng = np.random.default_rng(6)
    queries = rng.standard_normal((400, 8)).astype(np.float32) * np.arange(1, 9, dtype=np.float32)
    root, unit = query_metric((queries.T @ queries / 400).astype(np.float32), 1_000_000)
    difference = rng.standard_normal(8).astype(np.float32)
    length = unit * np.linalg.norm(difference @ root)
    assert abs(length - np.sqrt(((queries @ difference) ** 2).mean())) < 0.01 * length
    identity, one = query_metric(np.zeros((8, 8), np.float32), 0)
    assert np.array_equal(identity, np.eye(8)) and one == 1.0


def test_int8_keys_stand_within_half_a_step() -> None:
    keys = structured(np.random.default_rng(7), 300, 16)
    keys[:, 3] = 2.5  # a constant channel
    rounded, centre, scale = quantise_keys(keys)
    assert np.abs(centre + scale * rounded - keys).max() <= 0.51 * scale.max()
    assert (rounded[:, 3] == 0).all()


def test_kernels_equal_their_twins() -> None:
    rng = np.random.default_rng(8)
    keys = structured(rng, 150, 8)
    queries = prefill_queries(rng, keys, 60)
    neighbours = exact_top(keys, queries, 20)
    popularity = np.bincount(neighbours.reshape(-1), minlength=150)
    discount = (np.maximum(popularity, 1) ** -0.25).astype(np.float32)
    wanted = _build.companions(neighbours, 150, 12, 8, 5, discount)
    twin = reference_build.companions(neighbours, 150, (12, 8, 5), discount)
    assert np.array_equal(wanted, twin)
    clusters = cluster_keys(keys, np.eye(8, dtype=np.float32), 10, seed=0)
    near = near_keys(clusters, width=9)
    graph, sizes = _build.link(wanted, near, 16, 2, 6, 4)
    twin_graph, twin_sizes = reference_build.link(wanted, near, 16, 2, (6, 4))
    assert np.array_equal(graph, twin_graph) and np.array_equal(sizes, twin_sizes)
    # Cut the graph in two, so that repair has work to do.
    for rows in (graph, twin_graph):
        rows[rows >= 75] = 0
        rows[75:] = np.arange(75, 150, dtype=np.uint32)[:, None]
    sizes[:] = twin_sizes[:] = 14
    sizes[75:] = twin_sizes[75:] = 0
    repaired = _build.repair(graph, sizes, near, 0)
    assert repaired == reference_build.repair(twin_graph, twin_sizes, near, 0) > 0
    assert np.array_equal(graph, twin_graph)
    assert _build.reachable(graph, 0) == 150


def test_near_keys_equal_their_twin() -> None:
    rng = np.random.default_rng(9)
    points = rng.integers(-4, 5, (120, 6)).astype(np.float32)  # exact in float32
    cluster_of = (np.arange(120) % 7).astype(np.uint32)
    order = np.argsort(cluster_of, kind="stable").astype(np.uint32)
    starts = np.concatenate(([0], np.cumsum(np.bincount(cluster_of)))).astype(np.int64)
    near_clusters = np.array([[c, (c + 1) % 7, (c + 3) % 7] for c in range(7)], np.uint32)
    half_norms = ((points * points).sum(axis=1) / 2).astype(np.float32)
    for pool_max in (5, 128):
        mine = _build.near_keys(points, half_norms, order, starts, near_clusters, 10, pool_max)
        twin = reference_build.near_keys(points, cluster_of, near_clusters, 10, pool_max)
        assert np.array_equal(mine, twin)


def test_forced_plan_keeps_what_was_tuned_and_the_lift() -> None:
    tuned = (HeadPlan("graph", 77, (0.5,)), HeadPlan("clusters", 300, (0.25,), 1.5))
    forced = force_plan(tuned, "graph")
    assert forced == (tuned[0], replace(untuned_plan("graph"), lift=(0.25,)))
    assert force_plan(tuned, "clusters")[1] == tuned[1]
    assert untuned_plan().kind == "clusters"


@pytest.mark.parametrize("field", ["degree", "keys_per_cluster", "clusters_max"])
def test_bad_parameters_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        IndexParams(**{field: 0})


def test_parameters_have_one_fingerprint_each() -> None:
    kinds = [IndexParams(seed=seed, degree=degree) for seed in (0, 1) for degree in (8, 9)]
    assert len({params.fingerprint() for params in kinds}) == 4
    assert IndexParams().fingerprint() == IndexParams().fingerprint()


def test_case_b18_uneven_norms_stay_reachable() -> None:
    rng = np.random.default_rng(18)
    keys = rng.standard_normal((20_000, 64)).astype(np.float32)
    keys[rng.choice(20_000, 400, replace=False)] *= 20
    head = make_head(keys, kv_dtype="float32", train=1000)
    assert is_whole(head)
    queries = rng.standard_normal((50, 64)).astype(np.float32)
    found, scored = recall(head, queries, GRAPH)
    # Unstructured keys are the hard case of a graph.
    tuning = rng.standard_normal((1, 32, 64)).astype(np.float32)
    (plan,) = tune_plan(
        (untuned_plan(),), (head,), tuning, exact_top(head.keys, tuning[0], 100)[None]
    )
    planned, _ = recall(head, queries, plan)
    assert planned >= 0.95
    assert found >= 0.6 and scored < 1


@pytest.mark.parametrize("plan", [CLUSTERS, SCAN, GRAPH])
def test_case_b19_identical_keys(plan: HeadPlan) -> None:
    rng = np.random.default_rng(19)
    distinct = structured(rng, 10_000, 32)
    repeated = distinct.copy()
    repeated[:5_000] = distinct[0]
    begin = time.process_time()
    make_head(distinct)
    between = time.process_time()
    head = make_head(repeated)
    assert time.process_time() - between <= 3 * (between - begin) + 1.0
    assert is_whole(head)
    towards = (repeated[0] - repeated.mean(axis=0))[None]
    assert recall(head, towards, plan)[0] == 1.0
    others = prefill_queries(rng, repeated[5_000:], 20)
    assert recall(head, others, plan)[0] >= (0.85 if plan is GRAPH else 0.97)


@pytest.mark.parametrize("train", [0, 1, 2, 10])
def test_case_b21_few_training_queries(train: int) -> None:
    rng = np.random.default_rng(21)
    keys = structured(rng, 2_000, 32)
    head = make_head(keys, train=train)
    assert is_whole(head)
    assert (head.graph[head.entries[0]] != head.entries[0]).any(), "the entry has out-edges"
    queries = prefill_queries(rng, keys, 20)
    assert recall(head, queries, GRAPH)[0] >= 0.5
    assert recall(head, queries, CLUSTERS)[0] >= 0.9


def test_case_b21_queries_all_in_one_corner() -> None:
    rng = np.random.default_rng(22)
    keys = structured(rng, 2_000, 32)
    corner = np.repeat(prefill_queries(rng, keys, 1), 300, axis=0)
    stored = to_stored(keys, "float16")
    head = build_head(stored, stored, corner, exact_top(stored, corner, 100), params=IndexParams())
    assert is_whole(head)
    for plan in (CLUSTERS, GRAPH):
        assert recall(head, corner[:1], plan)[0] == 1.0


@pytest.mark.parametrize("position", [0, 2_500, 4_999])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_b22_a_key_that_is_no_number_is_refused(position: int, bad: float) -> None:
    keys = structured(np.random.default_rng(22), 5_000, 16)
    keys[position, 3] = bad
    none = np.zeros((0, 16), np.float32)
    with pytest.raises(ValueError, match=f"middle position {position} is not finite"):
        build_head(keys, keys, none, np.zeros((0, 1), np.int32), params=IndexParams())


def test_case_b22_zero_keys_leave_the_others_findable() -> None:
    rng = np.random.default_rng(23)
    keys = structured(rng, 5_000, 32)
    queries = prefill_queries(rng, keys, 20)
    plain = recall(make_head(keys), queries, GRAPH)[0]
    keys[rng.choice(5_000, 100, replace=False)] = 0
    head = make_head(keys)
    assert is_whole(head)
    assert recall(head, queries, GRAPH)[0] >= plain - 0.03


def test_case_b25_more_clusters_than_keys() -> None:
    keys = structured(np.random.default_rng(25), 3, 16)
    head = make_head(keys, params=IndexParams(keys_per_cluster=1, degree=32))
    assert 1 <= len(head.counts) <= 3 and is_whole(head)
    for plan in (CLUSTERS, GRAPH):
        assert recall(head, keys, plan)[0] == 1.0


def test_group_sums_add_rows_by_cluster() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    sums = group_sums(rows, np.array([1, 0, 1, 2, 0, 2]))
    assert np.array_equal(sums, [[10, 12], [4, 6], [16, 18]])
    rng = np.random.default_rng(2)
    rows, of = rng.standard_normal((500, 9)).astype(np.float32), rng.integers(0, 40, 500)
    assert np.array_equal(group_sums(rows, of), reference_build.group_sums(rows, of, of.max() + 1))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((0, 8), (0, 8), (1, 8), (1, 1)), "m ≥ 1"),
        (((5, 8), (4, 8), (1, 8), (1, 1)), "keys"),
        (((5, 8), (5, 8), (1, 4), (1, 1)), "queries"),
        (((5, 8), (5, 8), (2, 8), (1, 1)), "neighbours"),
    ],
)
def test_bad_shapes_are_refused(shapes: Any, message: str) -> None:
    keys, values, queries = (np.ones(shape, np.float32) for shape in shapes[:3])
    with pytest.raises(ValueError, match=message):
        build_head(keys, values, queries, np.zeros(shapes[3], np.int32), params=IndexParams())


def test_neighbour_ids_out_of_range_are_refused() -> None:
    keys = np.ones((5, 8), np.float32)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match="neighbour ids"):
            build_head(keys, keys, keys[:1], np.array([[bad]], np.int32), params=IndexParams())
