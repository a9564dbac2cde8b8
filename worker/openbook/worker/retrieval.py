"""The middle's share of attention: queries to the host, indexstore's answer back to the device.

Owns the crossing between torch and NumPy, both ways. It knows nothing of windows, tails or models;
what a budget reads is indexstore's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.indexstore.attend import attend
from openbook.indexstore.head import AttendRequest, AttendResult
from openbook.worker.merge import Partial


def to_host(q: Tensor) -> NDArray[np.float32]:
    """Return queries as float32 on the host: a view where they are, else a copy once computed."""
    queries: NDArray[np.float32] = q.detach().to("cpu", torch.float32).numpy()
    return queries


def to_partial(result: AttendResult, device: torch.device) -> Partial:
    """Return what was found in the middle as a partial on the device."""
    return Partial(
        torch.from_numpy(result.out).to(device, non_blocking=True),
        torch.from_numpy(result.lse).to(device, non_blocking=True),
    )


class Retrieval:
    """Attention over the middle for all sequences of one step, a layer at a time."""

    def __init__(self, *, threads: int) -> None:
        """Use up to `threads` threads for the heads and sequences of one call."""
        self._threads = threads

    def attend(self, requests: Sequence[AttendRequest]) -> list[AttendResult]:
        """Answer every request, in order."""
        return attend(requests, threads=self._threads) if requests else []
