"""How a number is stored: float16, bfloat16 (as uint16 bits) or float32.

Owns the conversions between stored arrays and float32. bfloat16 never passes through float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import KvDtype, Stored

STORED_DTYPES: dict[KvDtype, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
}
FLOAT16_MAX = 65504.0  # IEEE 754 binary16


def kv_dtype_of(stored: Stored) -> KvDtype:
    """Name the stored type of an array; raise TypeError for any other dtype."""
    for name, dtype in STORED_DTYPES.items():
        if stored.dtype == dtype:
            return name
    raise TypeError(f"a stored array is float16, uint16 (bfloat16) or float32, got {stored.dtype}")


def fits(array: NDArray[np.float32], kv_dtype: KvDtype) -> bool:
    """Tell whether every finite value of `array` stays finite in `kv_dtype`."""
    if kv_dtype != "float16" or array.size == 0:
        return True
    return bool(np.abs(array).max() <= FLOAT16_MAX)


def to_stored(array: NDArray[np.float32], kv_dtype: KvDtype) -> Stored:
    """Round float32 to `kv_dtype`, to nearest even.

    Returns a new C-contiguous array. Raises ValueError when a value overflows float16.
    """
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not fits(array, kv_dtype):
        raise ValueError(f"a value of magnitude {np.abs(array).max():g} does not fit float16")
    if kv_dtype == "float32":
        return array.copy()
    if kv_dtype == "float16":
        return array.astype(np.float16)
    bits = array.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # Rounding up could carry a NaN's payload into infinity: keep NaNs as they are, quiet.
    bfloat = np.where(np.isnan(array), bits | np.uint32(0x00400000), rounded) >> np.uint32(16)
    return np.ascontiguousarray(bfloat.astype(np.uint16))


def to_float32(stored: Stored) -> NDArray[np.float32]:
    """Widen a stored array to float32, exactly. Returns a new array (float32 input is returned)."""
    if kv_dtype_of(stored) == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)
