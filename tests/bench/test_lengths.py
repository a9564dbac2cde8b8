"""Claims about the bench of lengths: what a cut file holds, and where kinds cross."""

from __future__ import annotations

import numpy as np
from lengths import Cut, crossovers


def rows(**us: float) -> dict[str, dict[str, float]]:
    """Return the figures of one length."""
    return {kind: {"us": value} for kind, value in us.items()}


def test_crossover_is_the_least_length_from_which_on_clusters_win() -> None:
    means = {
        100: rows(clusters=5, graph=4, scan=6, exact=9),
        200: rows(clusters=6, graph=7, scan=5, exact=18),
        400: rows(clusters=7, graph=9, scan=7, exact=36),
    }
    assert crossovers(means) == {"graph": 200, "scan": None, "exact": 100}


def test_cut_file_holds_what_came_before() -> None:
    vectors = {
        "keys0": np.arange(10),
        "values0": np.arange(10) * 2,
        "train_positions0": np.array([[1, 8, 3], [9, 2, 4]]),
        "train_queries0": np.arange(6).reshape(2, 3, 1),
        "test_queries0": np.arange(4),
    }
    cut = Cut(vectors, 4)
    np.testing.assert_array_equal(cut["keys0"], [0, 1, 2, 3])
    np.testing.assert_array_equal(cut["values0"], [0, 2, 4, 6])
    assert [row.tolist() for row in cut["train_positions0"]] == [[1, 3], [2]]
    assert [row.tolist() for row in cut["train_queries0"]] == [[[0], [2]], [[4]]]
    np.testing.assert_array_equal(cut["test_queries0"], np.arange(4))
