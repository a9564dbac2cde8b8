"""The share of the mass that keys recover is what their weights say, however they were chosen.

Owns small logits whose softmax is known, and one layer of random vectors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pairs import Pair
from recovery import OURS, WatchedRetrieval, best_keys, compare, draw, middle_logits, recovered

from openbook.indexstore.attend import attend
from openbook.indexstore.head import EXACT, AttendRequest, Budget, LayerIndex

KNOWN = np.log([[1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 1.0, 3.0]])  # of two query heads; tenths


def asked(pairs: list[Pair], test: int, budget: Budget) -> AttendRequest:
    """Return a request of one row to a layer of two KV heads."""
    layer = LayerIndex(tuple(p.head for p in pairs), tuple(p.plans["clusters"] for p in pairs))
    queries = np.concatenate([pair.tests[test] for pair in pairs])[:, None]
    return AttendRequest(layer, queries, pairs[0].scaling, budget)


def test_recovered_mass_is_the_sum_of_the_keys_weights() -> None:
    np.testing.assert_allclose(recovered(KNOWN, np.array([[3, 1], [0, 3]])), [0.6, 0.8])
    np.testing.assert_allclose(recovered(KNOWN, [np.array([0]), np.array([2, 1, 3])]), [0.1, 0.5])
    np.testing.assert_allclose(recovered(KNOWN, [np.array([], int), np.array([1])]), [0, 0.1])


def test_all_keys_recover_everything_and_huge_logits_do_not_overflow() -> None:
    everything = np.tile(np.arange(4), (2, 1))
    np.testing.assert_allclose(recovered(KNOWN + 1e4, everything), 1)
    np.testing.assert_allclose(recovered(KNOWN - 1e4, everything[:, :1]), [0.1, 0.5])


def test_best_keys_come_best_first_for_each_query_head() -> None:
    np.testing.assert_array_equal(best_keys(KNOWN, 2), [[3, 2], [0, 3]])


def test_static_keys_that_are_the_dynamic_ones_recover_the_same() -> None:
    best = best_keys(KNOWN, 3)
    kept = compare(KNOWN, best, best, [1, 3], read=list(best))
    assert kept == {
        OURS: pytest.approx(0.9),
        "dynamic 1": pytest.approx(0.45),
        "static 1": pytest.approx(0.45),
        "dynamic 3": pytest.approx(0.9),
        "static 3": pytest.approx(0.9),
    }


def test_static_keys_of_another_query_recover_what_they_have_now() -> None:
    chosen = best_keys(KNOWN[::-1], 2)  # the heads' queries have changed places
    kept = compare(KNOWN, best_keys(KNOWN, 2), chosen, [2], read=list(chosen))
    assert kept["dynamic 2"] == pytest.approx((0.7 + 0.8) / 2)
    assert kept["static 2"] == kept[OURS] == pytest.approx((0.5 + 0.4) / 2)


def test_middle_logits_are_those_of_exact_attention_and_of_the_search(pairs: list[Pair]) -> None:
    request = asked(pairs, 0, Budget())._replace(evidence=True)
    logits = middle_logits(request)
    whole, found = attend([request._replace(budget=EXACT), request])
    np.testing.assert_allclose(np.logaddexp.reduce(logits, axis=1), whole.lse[:, 0], atol=1e-4)
    for row, ids, scores in zip(logits, found.ids, found.logits, strict=True):
        np.testing.assert_allclose(row[ids], scores, atol=1e-4)


def test_static_keys_are_those_of_the_prompts_last_query(pairs: list[Pair]) -> None:
    retrieval = WatchedRetrieval(threads=1, counts=[50])
    first, last = asked(pairs, 0, EXACT), asked(pairs, 1, EXACT)
    both = np.concatenate([first.queries, last.queries], axis=1)  # a prompt of two tokens
    retrieval.attend([last._replace(queries=both)])
    assert retrieval.layers == []
    same = last._replace(budget=Budget())
    other = same._replace(queries=asked(pairs, 2, EXACT).queries)
    (served,) = retrieval.attend([same])
    np.testing.assert_array_equal(served.out, attend([same])[0].out)
    retrieval.attend([other])
    at_once, later = retrieval.layers
    assert at_once["static 50"] == at_once["dynamic 50"] < at_once[OURS] < 1
    assert later["static 50"] < later["dynamic 50"] < later[OURS] < 1


def test_lines_are_drawn(tmp_path: Path) -> None:
    names = [OURS, "dynamic 50", "static 50"]
    found = {
        "middle": 1000,
        "keys": [50],
        "keys_of_middle": [0.05],
        "keys_read": 120.5,
        "keys_read_of_middle": 0.12,
        "recovered": {name: [0.9, 0.8, 0.7] for name in names},
    }
    draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
