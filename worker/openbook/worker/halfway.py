"""A model's base, watched between its decoder layers or entered between two of them.

Owns the stand-ins for decoder layers. It knows nothing of documents or files. The model itself is
not touched: the stand-ins live in a shallow copy, so that other threads may run the same weights.

    watched      layer 0 ─> hidden ─> layer 1 ─> hidden ─> …      each hidden state shown once
    entered at 2           saved hidden ─> layer 2 ─> hidden ─> …
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from openbook.worker.models import Model

OnLayer = Callable[[int, Tensor], None]


class _Watched(nn.Module):
    """A decoder layer whose output is shown; everything else about it is the layer's own."""

    def __init__(self, layer: nn.Module, number: int, on_layer: OnLayer) -> None:
        super().__init__()
        self.layer = layer
        self._number = number
        self._on_layer = on_layer

    def __getattr__(self, name: str) -> Any:
        """Return the layer's attribute: models read its kind of attention off it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the layer and show its hidden state (1, n, hidden size)."""
        output = self.layer(*inputs, **named)
        self._on_layer(self._number, output if isinstance(output, Tensor) else output[0])
        return output


class _Saved(_Watched):
    """Stands for the layers before the entry: their output is known."""

    def __init__(self, layer: nn.Module, hidden: Tensor) -> None:
        super().__init__(layer, 0, lambda *_: None)
        self._hidden: Tensor | None = hidden

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the saved hidden state, whatever came in, and keep it no longer."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise ValueError("a base that was entered halfway runs once")
        return hidden


def can_be_entered(model: Model) -> bool:
    """Say whether the model's base is a list of decoder layers, as nearly all are."""
    layers = getattr(model.base, "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) == model.shape.layers


def base_from(
    model: Model, first: int, hidden: Tensor | None, *, on_layer: OnLayer
) -> PreTrainedModel:
    """Return a base that runs from layer `first` on and shows each layer's output.

    `hidden` (1, n, hidden size) is what layer `first - 1` gave; None for `first` 0. `on_layer` gets
    the layer's number and its output, borrowed. Raises ValueError for a model that cannot be
    entered (can_be_entered) or a layer that it does not have.
    """
    if not can_be_entered(model) or not 0 <= first < model.shape.layers:
        raise ValueError(f"the model cannot be entered at layer {first}")
    if (hidden is None) != (first == 0):
        raise ValueError("a hidden state is needed before every layer but the first")
    base = copy.copy(model.base)
    base._modules = dict(model.base._modules)
    own: Any = model.base.layers
    layers: list[nn.Module] = [
        _Watched(layer, number, on_layer) for number, layer in enumerate(own) if number >= first
    ]
    if hidden is not None:
        layers.insert(0, _Saved(own[0], hidden))
    base._modules["layers"] = nn.ModuleList(layers)
    return base
