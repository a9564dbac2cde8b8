"""The tail of a session: keys and values of its question and answer, exact, on the device.

Owns a buffer per session that grows by doubling. It is private to the session and knows nothing of
the context before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_FIRST = 256  # one question block; doubles when full


class Tail:
    """Keys (layers, KV heads, rows, d) and values (layers, KV heads, rows, dv) of one session."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        *,
        head_dim: int,
        value_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Start empty; `dtype` is the model's."""
        self.length = 0
        self._keys = torch.empty(
            (layers, kv_heads, _ROWS_FIRST, head_dim), device=device, dtype=dtype
        )
        self._values = torch.empty(
            (layers, kv_heads, _ROWS_FIRST, value_dim), device=device, dtype=dtype
        )

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more; call before the first layer of a step."""
        capacity = self._keys.shape[2]
        if self.length + rows <= capacity:
            return
        capacity = max(2 * capacity, self.length + rows)
        self._keys = _grown(self._keys, self.length, capacity)
        self._values = _grown(self._values, self.length, capacity)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows and return that layer's whole tail, new rows included.

        k (KV heads, rows, d), v (KV heads, rows, dv). The views hold until the next `reserve`. The
        rows count as there only after `advance`, so that a step that fails leaves no trace.
        """
        stop = self.length + k.shape[1]
        self._keys[layer, :, self.length : stop] = k
        self._values[layer, :, self.length : stop] = v
        return self._keys[layer, :, :stop], self._values[layer, :, :stop]

    def advance(self, rows: int) -> None:
        """Keep the rows that every layer has appended."""
        self.length += rows


def _grown(old: Tensor, length: int, capacity: int) -> Tensor:
    new = torch.empty((*old.shape[:2], capacity, old.shape[3]), device=old.device, dtype=old.dtype)
    new[:, :, :length] = old[:, :, :length]
    return new
