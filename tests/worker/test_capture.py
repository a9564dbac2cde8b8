"""Claims about training queries and their exact neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.worker import reference
from openbook.worker.capture import (
    SAMPLE_MAX,
    exact_top_k,
    rotated_queries,
    sample_positions,
)
from openbook.worker.models import Rotation


@given(token_count=st.integers(1, 200_000))
def test_sample_is_sorted_distinct_and_inside(token_count: int) -> None:
    positions = sample_positions(token_count)
    assert 0 < len(positions) <= min(SAMPLE_MAX, token_count)
    assert positions[0] >= 0 and positions[-1] < token_count
    assert np.all(np.diff(positions) > 0)


def test_sample_covers_the_start_and_leans_to_the_tail() -> None:
    positions = sample_positions(32_768)
    assert len(positions) >= 0.9 * SAMPLE_MAX
    shares = np.histogram(positions, bins=4, range=(0, 32_768))[0] / len(positions)
    assert shares[0] > 0.03 and shares[3] > 0.4
    assert np.all(np.diff(shares) > 0)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    keys=st.integers(1, 90),
    share=st.floats(0.0, 1.0),
    tile_bytes=st.sampled_from([1, 700, 1 << 20]),
)
def test_exact_top_k_is_the_reference_up_to_ties(
    seed: int, keys: int, share: float, tile_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    k = int(share * keys)
    stored = rng.integers(-3, 4, (keys, 5)).astype(np.float32)  # small integers: many ties
    queries = rng.integers(-3, 4, (17, 5)).astype(np.float32)
    ids = exact_top_k(torch.from_numpy(queries), torch.from_numpy(stored), k, tile_bytes=tile_bytes)
    want = reference.exact_top_k(queries, stored, k)
    assert ids.dtype == np.int32 and ids.shape == (17, k)
    scores = queries @ stored.T
    got = np.take_along_axis(scores, ids.astype(np.int64), 1)
    assert np.array_equal(got, np.take_along_axis(scores, want.astype(np.int64), 1))
    assert all(len(set(row)) == k for row in ids.tolist())


def test_more_neighbours_than_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="best 4 of 3"):
        exact_top_k(torch.zeros(1, 2), torch.zeros(3, 2), 4)


def _turned(vectors: np.ndarray, rotation: Rotation, positions: np.ndarray) -> torch.Tensor:
    """Rotate (heads, n, d) to its positions, as a model does."""
    rows = [reference.rotate(head, positions, rotation.inv_freq.numpy()) for head in vectors]
    return torch.from_numpy(np.stack(rows)).float()


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotated_queries_are_what_the_same_queries_are_at_n(rotary_dim: int) -> None:
    n, rng = 500, np.random.default_rng(3)
    inv_freq = torch.from_numpy(1e4 ** -(np.arange(0, rotary_dim, 2) / rotary_dim)).float()
    rotation = Rotation(inv_freq, rotary_dim)
    plain = rng.standard_normal((2, n, 16))
    q = _turned(plain, rotation, np.arange(n))
    positions = np.array([0, 7, 255, 499])
    got = rotated_queries(q, positions, rotation)
    want = _turned(plain[:, positions], rotation, np.full(4, n))
    assert torch.allclose(got, want, atol=1e-4)


def test_training_queries_are_spread_over_the_positions_of_decoding() -> None:
    n, count, rng = 500, 40, np.random.default_rng(4)
    rotation = Rotation(torch.from_numpy(1e4 ** -(np.arange(0, 16, 2) / 16)).float(), 16)
    positions = np.full(count, 499)
    plain = np.repeat(rng.standard_normal((1, 1, 16)), n, axis=1)
    got = rotated_queries(_turned(plain, rotation, np.arange(n)), positions, rotation, spread=64)
    every = _turned(np.repeat(plain[:, :1], 128, axis=1), rotation, np.arange(n - 64, n + 64))
    reached = [int((every[0] - row).norm(dim=1).argmin()) for row in got[0]]
    assert torch.allclose(every[:, reached], got, atol=1e-4)
    assert len(set(reached)) == count and min(reached) < 8 and max(reached) > 120


def test_without_a_rotation_queries_stay() -> None:
    q = torch.randn(2, 9, 4)
    assert torch.equal(rotated_queries(q, np.array([1, 8]), None), q[:, [1, 8]])
