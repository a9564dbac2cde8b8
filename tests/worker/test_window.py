"""Claims about the window, the middle and the tail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from openbook.indexstore.dtypes import to_stored
from openbook.worker.tail import Tail
from openbook.worker.window import Window, middle_range, rows_to_device, window_positions

CPU = torch.device("cpu")


@given(token_count=st.integers(1, 5000))
def test_window_and_middle_hold_every_position_once(token_count: int) -> None:
    window, middle = window_positions(token_count), middle_range(token_count)
    together = np.concatenate([window, np.arange(middle.start, middle.stop)])
    assert np.array_equal(np.sort(together), np.arange(token_count))
    assert len(window) == min(640, token_count)


@pytest.mark.parametrize(
    ("token_count", "first", "stop"), [(641, 128, 129), (742, 128, 230), (3000, 128, 2488)]
)
def test_middle_lies_between_sink_and_recent(token_count: int, first: int, stop: int) -> None:
    assert middle_range(token_count) == range(first, stop)
    assert window_positions(token_count)[127:129].tolist() == [127, stop]


@pytest.mark.parametrize("token_count", [1, 127, 128, 129, 512, 640])
def test_short_contexts_have_no_middle(token_count: int) -> None:
    assert len(middle_range(token_count)) == 0
    assert window_positions(token_count).tolist() == list(range(token_count))


@dataclass
class _Layer:
    window_keys: NDArray[np.generic]
    window_values: NDArray[np.generic]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "float32"])
def test_rows_reach_the_device_with_their_stored_values(kv_dtype: str) -> None:
    wide = np.array([[[1.5, -0.0, 1e-3, 240.0]]], dtype=np.float32)
    stored = to_stored(wide, kv_dtype)  # type: ignore[arg-type]
    stored.flags.writeable = False
    moved = rows_to_device(stored, CPU, torch.float32)
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 0.0}[kv_dtype]
    np.testing.assert_allclose(moved.numpy(), wide, rtol=tolerance)
    assert np.signbit(moved.numpy()[0, 0, 1])


def test_window_owns_its_rows_and_counts_them() -> None:
    keys = np.ones((2, 640, 4), np.float16)
    layers = [_Layer(keys, 2 * keys), _Layer(3 * keys, 4 * keys)]
    window = Window.load(layers, 9000, device=CPU, dtype=torch.float32)
    keys[:] = 7
    assert window.rows_moved == [640, 640] and window.tokens == 640
    assert window.keys[0].shape == (2, 640, 4) and window.keys[0].dtype == torch.float32
    assert float(window.keys[0].sum()) == keys.size and float(window.values[1].max()) == 4


def _tail(dtype: torch.dtype = torch.float32) -> Tail:
    return Tail(2, 3, head_dim=4, value_dim=5, device=CPU, dtype=dtype)


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_tail_keeps_every_row_through_growth(sizes: list[int]) -> None:
    tail, written = _tail(), []
    for size in sizes:
        tail.reserve(size)
        k = torch.randn(3, size, 4)
        v = torch.randn(3, size, 5)
        written.append((k, v))
        for layer in range(2):
            keys, values = tail.append(layer, k + layer, v - layer)
        tail.advance(size)
    assert tail.length == sum(sizes)
    assert torch.equal(keys, torch.cat([k for k, _ in written], dim=1) + 1)
    assert torch.equal(values, torch.cat([v for _, v in written], dim=1) - 1)


def test_rows_of_a_failed_step_are_overwritten() -> None:
    tail = _tail()
    tail.append(0, torch.ones(3, 2, 4), torch.ones(3, 2, 5))
    keys, _ = tail.append(0, torch.zeros(3, 1, 4), torch.zeros(3, 1, 5))
    assert tail.length == 0 and keys.shape == (3, 1, 4) and float(keys.abs().max()) == 0
