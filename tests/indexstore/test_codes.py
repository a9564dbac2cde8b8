"""The codes of keys, and the search that reads them, equal their plain twins to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from heads import exact_top, make_head, prefill_queries, structured

from openbook.indexstore import _build, _probe
from openbook.indexstore.build import IndexParams
from openbook.indexstore.codes import train_codebook
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import HeadIndex
from openbook.indexstore.reference_probe import decode, dot, encode, probe, train

REACHES = (0.0, 1.0, 2.0, 50.0)
WORKSPACE: list[np.ndarray] = []  # one for all, as in a thread: nothing of a search may be left


def assert_as_its_twin(
    head: HeadIndex, queries: np.ndarray, scaling: float, candidates: int, reach: float
) -> None:
    """Compare ids, exact logits and the number of keys scored, for one search."""
    wanted = max(1, candidates // 2)
    top, read, logits, centroid_logits, scored = _probe.find(
        head, queries, scaling, wanted, candidates, reach, False, WORKSPACE
    )
    same, pool_read, pool_logits, same_centroids, same_scored = _probe.find(
        head, queries, scaling, wanted, candidates, reach, True, WORKSPACE
    )
    best, twin_scored = probe(head, queries, scaling, candidates=candidates, reach=reach)
    pool = np.unique(np.concatenate(best))
    keys, factor = to_float32(head.keys), np.float32(scaling)
    expected = np.zeros(len(keys), bool)
    for g, query in enumerate(queries):
        exact = factor * dot(keys[pool], query)
        order = np.lexsort((pool, -exact.astype(np.float64)))[: min(wanted, len(keys))]
        np.testing.assert_array_equal(top[g], pool[order])
        expected[pool[order]] = True
        np.testing.assert_array_equal(logits[g], factor * dot(keys[read], query))
        np.testing.assert_array_equal(pool_logits[g], exact)
        np.testing.assert_array_equal(
            centroid_logits[g], factor * dot(to_float32(head.centroids), query)
        )
    np.testing.assert_array_equal(read, np.flatnonzero(expected))
    np.testing.assert_array_equal(same, top)
    np.testing.assert_array_equal(pool_read, pool)
    np.testing.assert_array_equal(same_centroids, centroid_logits)
    assert scored == same_scored == twin_scored


@pytest.mark.parametrize("m", [1, 15, 16, 17, 100, 1003])
@pytest.mark.parametrize("d", [5, 8, 16, 64, 80, 128])
def test_search_equals_its_twin(m: int, d: int) -> None:
    rng = np.random.default_rng(m * d)
    keys = structured(rng, m, d)
    head = make_head(keys, kv_dtype="float32" if d == 5 else "float16")
    for group, reach in zip((1, 2, 3, 64), REACHES, strict=True):
        queries = prefill_queries(rng, keys, group)
        for candidates in (1, 20, 200):
            assert_as_its_twin(head, queries, d**-0.5, candidates, reach)


@pytest.mark.parametrize("name", ["alike", "zero", "huge", "two", "one channel"])
def test_degenerate_keys_and_queries_are_searched_as_the_twin_does(name: str) -> None:
    rng = np.random.default_rng(3)
    keys = {
        "alike": np.full((300, 16), 1.5, np.float32),
        "zero": np.zeros((300, 16), np.float32),
        "huge": structured(rng, 300, 16) * 5000,
        "two": np.repeat(structured(rng, 2, 16), 150, axis=0),
        "one channel": np.pad(rng.standard_normal((300, 1)).astype("f4"), ((0, 0), (0, 15))),
    }[name]
    head = make_head(np.ascontiguousarray(keys))
    queries = rng.standard_normal((3, 16)).astype(np.float32)
    for asked in (queries, np.zeros_like(queries), queries * 1e4, queries * 1e-20):
        for reach in REACHES:
            assert_as_its_twin(head, np.ascontiguousarray(asked), 0.25, 40, reach)


def random_case(rng: np.random.Generator) -> tuple[HeadIndex, np.ndarray]:
    """Return a small head of some shape, one in four of them degenerate, and queries."""
    m, d = int(rng.integers(1, 260)), int(rng.choice([2, 3, 7, 8, 16, 24, 33, 64]))
    keys = structured(rng, m, d)
    match int(rng.integers(12)):
        case 0:
            keys[:] = keys[0]
        case 1:
            keys[rng.integers(0, m, m // 2)] = keys[0]
        case 2:
            keys *= np.float32(10.0 ** rng.integers(-6, 4))
    kv_dtype = ("float16", "bfloat16", "float32")[int(rng.integers(3))]
    params = IndexParams(keys_per_cluster=int(rng.integers(1, 40)), seed=int(rng.integers(9)))
    head = make_head(keys, kv_dtype=kv_dtype, train=int(rng.integers(0, 60)), params=params)
    queries = rng.standard_normal((int(rng.integers(1, 6)), d)).astype(np.float32)
    return head, queries * np.float32(10.0 ** rng.integers(-3, 3))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_heads_are_searched_as_the_twin_does(cases: int) -> None:
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        head, queries = random_case(rng)
        reach, candidates = float(rng.uniform(0, 4)), int(rng.integers(1, 120))
        assert_as_its_twin(head, queries, float(rng.uniform(0.05, 1)), candidates, reach)


def test_more_sums_than_sixteen_bits_can_count_are_chosen_from_as_the_twin_does() -> None:
    rng = np.random.default_rng(6)
    clusters, each = 600, 1000
    keys = rng.standard_normal((clusters * each, 2), np.float32)
    grouped = keys.reshape(clusters, each, 2)
    centroids = np.ascontiguousarray(grouped.mean(axis=1))
    away = (grouped - centroids[:, None]).reshape(1, -1, 2)
    points = np.ascontiguousarray(np.moveaxis(away, 2, 1))  # (1, 2, m)
    codebook = train_codebook(points[:, :, :1000].copy())
    head = HeadIndex(
        keys=keys,
        values=keys,
        centroids=centroids,
        counts=np.full(clusters, each, np.uint32),
        value_sums=centroids * each,
        cluster_of=np.repeat(np.arange(clusters, dtype=np.uint32), each),
        spreads=np.ones(clusters, np.float32),
        members=np.arange(len(keys), dtype=np.uint32),
        codes=_build.encode(points, codebook),
        codebook=codebook,
        code_basis=np.eye(2, dtype=np.float32),
        code_spreads=np.ones(2, np.float32),
    )
    queries = rng.standard_normal((1, 2), np.float32)  # one: two would choose all keys
    for candidates in (1, 580_000):
        assert_as_its_twin(head, queries, 0.5, candidates, 100.0)


def test_a_far_reach_finds_nearly_all_and_all_candidates_find_all() -> None:
    rng = np.random.default_rng(5)
    keys = structured(rng, 2000, 64)
    head = make_head(keys)
    queries = prefill_queries(rng, keys, 3)
    best = exact_top(head.keys, queries, 100)

    def recall(candidates: int, reach: float) -> float:
        top = _probe.find(head, queries, 0.125, 100, candidates, reach, False, [])[0]
        return float(np.mean([np.isin(a, b).mean() for a, b in zip(top, best, strict=True)]))

    assert recall(2000, 0) == 1
    assert recall(300, 50) >= 0.97
    assert recall(300, 0) <= recall(300, 2) <= recall(300, 50)


def test_encoding_equals_its_twin() -> None:
    rng = np.random.default_rng(7)
    for m, pairs in ((1, 1), (16, 4), (33, 5), (200, 32)):
        points = rng.standard_normal((pairs, 2, m)).astype(np.float32)
        codebook = train_codebook(points)
        blocks = _build.encode(points, codebook)
        np.testing.assert_array_equal(blocks, encode(points, codebook))


def test_codewords_equal_their_twins_and_serve_points_better_than_where_they_start() -> None:
    rng = np.random.default_rng(8)
    for count in (1, 7, 16, 333):
        points = rng.standard_normal((5, 2, count)).astype(np.float32)
        points[3] = 0  # all alike: fifteen codewords are nearest to none
        points[4] *= 5000
        start = rng.standard_normal((5, 16, 2)).astype(np.float32)
        moved = start.copy()
        _build.train(points, moved, 4)
        np.testing.assert_array_equal(moved, train(points, start, 4))

    def error(codebook: np.ndarray) -> float:
        apart = points[0].T[:, None] - codebook[0]  # (s, 16, 2)
        return float((apart**2).sum(axis=2).min(axis=1).mean())

    assert error(moved) < error(start) / 2


def test_codes_stand_for_their_keys() -> None:
    rng = np.random.default_rng(9)
    keys = structured(rng, 3000, 32)
    head = make_head(keys)
    codes = decode(head)  # (m, p)
    turned = np.take_along_axis(
        head.codebook, codes.T[:, :, None].repeat(2, axis=2), axis=1
    )  # (p, m, 2)
    flat = turned.transpose(1, 0, 2).reshape(len(keys), -1)
    rebuilt = flat @ head.code_basis + to_float32(head.centroids)[head.cluster_of]
    stored = to_float32(head.keys)
    coarse = stored - to_float32(head.centroids)[head.cluster_of]
    queries = prefill_queries(rng, keys, 50)
    error = ((stored - rebuilt) @ queries.T).std() / (coarse @ queries.T).std()
    assert error < 0.5, error
