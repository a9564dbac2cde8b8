"""The window of a context: its first 128 and last 512 tokens, pinned on the device.

Owns which positions are window and which are middle, and the one gate through which stored keys
and values reach the device. A window is loaded once per context and shared by all sessions; it
knows nothing of them, nor of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.indexstore.head import RECENT_TOKENS, SINK_TOKENS, WINDOW_TOKENS, Stored


class WindowRecords(Protocol):
    """The part of a stored layer that a window reads."""

    @property
    def window_keys(self) -> Stored:
        """Keys of the window in position order, (KV heads, w, d)."""
        ...

    @property
    def window_values(self) -> Stored:
        """Values of the window in position order, (KV heads, w, dv)."""
        ...


def window_positions(token_count: int) -> NDArray[np.int64]:
    """Return the positions of the window in order, each once: the halves overlap below 640."""
    if token_count <= WINDOW_TOKENS:
        return np.arange(token_count)
    return np.concatenate(
        [np.arange(SINK_TOKENS), np.arange(token_count - RECENT_TOKENS, token_count)]
    )


def middle_range(token_count: int) -> range:
    """Return the positions that are not window, those an index holds; empty up to 640 tokens."""
    if token_count <= WINDOW_TOKENS:
        return range(0)
    return range(SINK_TOKENS, token_count - RECENT_TOKENS)


def rows_to_device(stored: Stored, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy stored rows to the device as `dtype`. uint16 holds the bits of bfloat16."""
    owned = np.array(stored, order="C")  # a mapped array is read-only and dies at close
    if owned.dtype == np.uint16:
        return torch.from_numpy(owned.view(np.int16)).view(torch.bfloat16).to(device, dtype)
    return torch.from_numpy(owned).to(device, dtype)


@dataclass(slots=True)
class Window:
    """Keys and values of the window on the device, per layer (KV heads, w, d) and (.., w, dv).

    `rows_moved` counts the rows of K (as many of V) that loading moved to the device, per layer.
    """

    token_count: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    rows_moved: list[int] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        layers: Iterable[WindowRecords],
        token_count: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Window:
        """Copy every layer's window to the device. The stored arrays may be closed afterwards."""
        window = cls(token_count)
        for layer in layers:
            window.keys.append(rows_to_device(layer.window_keys, device, dtype))
            window.values.append(rows_to_device(layer.window_values, device, dtype))
            window.rows_moved.append(int(layer.window_keys.shape[1]))
        return window

    @property
    def tokens(self) -> int:
        """The number of window tokens, at most 640."""
        return min(self.token_count, WINDOW_TOKENS)
