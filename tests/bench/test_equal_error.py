"""Steps are compared where their outputs are equally wrong."""

from __future__ import annotations

import equal_error
import numpy as np
import pytest
from contenders import Ours
from equal_error import ANCHORS, compare, enter, frontier, time_at
from index import measure
from pairs import Pair


def test_only_settings_that_none_beats_are_on_a_frontier() -> None:
    points = [(0.2, 50.0), (0.1, 100.0), (0.15, 120.0), (0.3, 60.0), (0.4, 10.0)]
    assert frontier(points) == [(0.1, 100.0), (0.2, 50.0), (0.4, 10.0)]


def test_time_at_an_error_lies_between_its_neighbours() -> None:
    points = [(0.1, 100.0), (0.4, 25.0)]
    assert time_at(points, 0.2) == pytest.approx(50)  # half way, by logarithms
    assert time_at(points, 0.1) == pytest.approx(100)
    assert time_at(points, 0.5) == pytest.approx(25)
    assert time_at(points, 0.09) is None


def test_kinds_are_compared_at_our_errors() -> None:
    names = [*ANCHORS, "exact", "rival 1", "rival 2"]
    errors = np.array([0.4, 0.2, 0.1, 0.05, 0.0, 0.2, 0.1])
    us = np.array(
        [[10.0] * 3, [20.0] * 3, [40.0] * 3, [80.0] * 3, [400.0] * 3, [30.0] * 3, [50.0] * 3]
    )
    found = compare(names, errors, us)
    assert found["clusters 100"]["exact"] == pytest.approx(10)
    assert found["clusters 100"]["rival"] == pytest.approx(1.25)
    assert found["clusters 64"]["rival"] == pytest.approx(1.5)
    assert found["clusters 200"]["rival"] is None


def test_every_setting_answers(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(equal_error, "READ_KEYS", (100, 400))
    monkeypatch.setattr(equal_error, "IVF_WIDTHS", (16,))
    errors = {}
    for name, contenders in enter(pairs).items():
        row = measure(pairs[0], contenders[0])
        errors[name] = row["error"] if row["error"] is not None else row["error_plain"]
    assert errors["exact"] < 1e-3
    assert errors["clusters 200"] < errors["clusters 32"]
    assert errors["clusters 100"] < errors["plain 100"]
    assert errors["flat 400"] < errors["flat 100"]
    assert errors["retroinfer 128"] < errors["retroinfer 4"]


@pytest.mark.parametrize("kind", ["clusters", "exact"])
def test_step_of_a_layer_is_that_of_its_heads(pairs: list[Pair], kind: str) -> None:
    ours = [Ours(pair, kind) for pair in pairs]
    queries = np.stack([pair.tests[0] for pair in pairs])  # (H, G, d)
    whole = Ours.as_layer(ours)(queries)
    rows = [one.step(mine, estimate=True).out for one, mine in zip(ours, queries, strict=True)]
    np.testing.assert_array_equal(whole.out[:, 0], np.concatenate(rows))
