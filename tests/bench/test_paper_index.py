"""The paper's figures are drawn from what was measured.

Owns the distance of queries and keys, whose right values are known for random vectors.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paper_index
import pytest
from pairs import Pair
from paper_index import asking_keys, curves, draw, mahalanobis


def test_keys_lie_as_far_from_their_own_distribution_as_they_have_channels(
    pairs: list[Pair],
) -> None:
    found = mahalanobis(pairs)
    _, _, median, _, _ = found["k"]
    assert median**2 == pytest.approx(pairs[0].wide.shape[1], rel=0.15)
    assert len(found["ratio"]) == len(pairs)
    assert sum(found["k_bins"]) <= 1
    assert len(found["edges"]) == len(found["q_bins"]) + 1


KINDS = ("ivf", "paper-one", "retroinfer", "ours", "ours-clusters")


def test_curves_rise_and_are_drawn(
    pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    drawn = {kind: paper_index.DRAWN[kind] for kind in KINDS}
    monkeypatch.setattr(paper_index, "DRAWN", drawn)
    lines = curves(pairs, "q_to_k")
    assert set(lines) == set(drawn)
    for points in lines.values():
        assert points[-1]["recall"] > points[0]["recall"] or points[0]["recall"] >= 0.995
        scored = [point["scored"] for point in points]
        assert (np.diff(scored) >= 0).all() and scored[-1] > scored[0]
    keys = curves([asking_keys(pair) for pair in pairs], "k_to_k")
    assert set(keys) == set(drawn) - {"paper-one"}
    found = {
        "tokens": pairs[0].tokens,
        "curves": {"q_to_k": lines, "k_to_k": keys},
        "mahalanobis": mahalanobis(pairs),
    }
    draw(json.loads(json.dumps(found)), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
