"""Stored numbers come back as they went in, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from openbook.indexstore.dtypes import fits, kv_dtype_of, to_float32, to_stored


def test_bfloat16_rounds_to_nearest_even_like_torch() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(4_000) * 10.0 ** rng.integers(-30, 30, 4_000)).astype(np.float32)
    values[:5] = [70000.0, 1e-40, -0.0, 3.3895314e38, np.float32(1 + 2**-8)]
    ours = to_stored(values, "bfloat16")
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(ours, theirs.view(torch.uint16).numpy())
    assert np.array_equal(to_float32(ours), theirs.float().numpy())


def test_bfloat16_keeps_what_is_no_number() -> None:
    values = np.array([np.nan, np.inf, -np.inf], np.float32)
    back = to_float32(to_stored(values, "bfloat16"))
    assert np.isnan(back[0]) and back[1] == np.inf and back[2] == -np.inf


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_numbers_that_fit_come_back(kv_dtype: str) -> None:
    values = np.array([[0.5, -0.0, 1024.0], [2.0**-24, -3.25, 65504.0]], np.float32)
    stored = to_stored(values, kv_dtype)  # type: ignore[arg-type]
    assert kv_dtype_of(stored) == kv_dtype
    assert to_float32(stored).tobytes() == values.tobytes()


def test_overflow_of_float16_is_refused() -> None:
    values = np.array([70000.0], np.float32)
    assert not fits(values, "float16") and fits(values, "bfloat16")
    with pytest.raises(ValueError, match="does not fit float16"):
        to_stored(values, "float16")


def test_other_dtypes_are_no_stored_arrays() -> None:
    with pytest.raises(TypeError, match="float64"):
        to_float32(np.zeros(3))
