"""One forward over a whole document, handing each layer's q, k and v to a sink.

Owns the prefill: exact causal attention, no cache, no logits, and a stop before every layer. It
knows nothing of what the sink does with a layer; when the sink returns, the layer is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openbook.worker.errors import IngestCancelled
from openbook.worker.merge import causal_attention


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """What one layer's attention received for the whole document; borrowed until the sink returns.

    q (query heads, n, d), k (KV heads, n, d), v (KV heads, n, dv), after RoPE, in the model's dtype
    on its device.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float


LayerSink = Callable[[CapturedLayer], None]


class Prefill:
    """The attention handler of a prefill."""

    def __init__(self, sink: LayerSink, *, is_cancelled: Callable[[], bool]) -> None:
        """Hand every layer to `sink`, in order, while `is_cancelled()` is false."""
        self._sink = sink
        self._is_cancelled = is_cancelled

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
        """Attend causally, then hand the layer on. Raises IngestCancelled before a layer."""
        if self._is_cancelled():
            raise IngestCancelled
        out = causal_attention(q, k, v, scaling=scaling)
        self._sink(CapturedLayer(layer, q[0], k[0], v[0], scaling))
        return out
