"""The attention function that transformers calls in place of its own.

Owns the seam between a model and this worker: `register()` names it "openbook" in transformers'
AttentionInterface, the model hands it q, k, v after RoPE, and it hands them to the handler that
came with the call as `model(..., openbook=handler)`. It refuses whatever would make the sums of
this package wrong, by what it receives and not by the model's name. It knows nothing of documents,
contexts or budgets: handlers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from openbook.worker.errors import UnsupportedModel
from openbook.worker.merge import causal_attention

NAME = "openbook"

# What a model passes along that cannot change a score. Anything else that is set is refused: an
# unknown keyword may be a bias, and a wrong sum stays fluent.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


class AttentionHandler(Protocol):
    """What answers the attention of one model call, layer by layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
        """Return attention (B, query heads, T, dv) in q's dtype.

        q (B, query heads, T, d), k (B, KV heads, T, d), v (B, KV heads, T, dv), after RoPE and
        un-repeated. The score of a pair is q·k·scaling.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProbedShape:
    """What a model's attention really has, read off what it passes."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scalings: tuple[float, ...]  # one per layer


def register() -> None:
    """Make "openbook" an attention implementation of transformers. Harmless when repeated."""
    AttentionInterface.register(NAME, openbook_attention)
    # Without this a mask of (tokens, tokens) would be made, or none only by accident.
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """Stand for the mask that handlers know from positions."""
    return None


def openbook_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    openbook: AttentionHandler | None = None,
    **received: Any,
) -> tuple[Tensor, None]:
    """Let the call's handler attend; return (B, T, query heads, dv), as transformers wants it.

    Raises UnsupportedModel when something received would change the scores, and ValueError when
    the call brought no handler.
    """
    if openbook is None:
        raise ValueError("this model attends through a handler: call it with openbook=<handler>")
    _refuse(module, attention_mask, dropout=dropout, received=received)
    _refuse_shapes(type(module).__name__, query, key, value)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or scaling is None:
        raise UnsupportedModel(type(module).__name__, "it passes no layer number or no scaling")
    out = openbook.attend(layer, query, key, value, scaling=float(scaling))
    return out.transpose(1, 2).contiguous(), None


def _refuse(
    module: nn.Module,
    attention_mask: Tensor | None,
    *,
    dropout: float,
    received: Mapping[str, Any],
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModel(name, "it passes an attention mask or bias")
    if dropout:
        raise UnsupportedModel(name, f"it passes a dropout of {dropout}")
    if received.get("softcap") is not None:
        raise UnsupportedModel(name, f"it soft-caps its scores at {received['softcap']}")
    if received.get("s_aux") is not None:
        raise UnsupportedModel(name, "it adds attention sinks to its softmax")
    if received.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(name, "it does not attend causally")
    sliding_window = received.get("sliding_window")
    positions_max = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if sliding_window is not None and (positions_max is None or sliding_window < positions_max):
        raise UnsupportedModel(
            name,
            f"it attends to a sliding window of {sliding_window} tokens, "
            f"below the model's {positions_max} positions",
        )
    for keyword, value in received.items():
        if value is not None and value is not False and keyword not in _HARMLESS:
            raise UnsupportedModel(name, f"it passes {keyword!r}, which this worker does not know")


def _refuse_shapes(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    query_heads, kv_heads = query.shape[1], key.shape[1]
    if query_heads % kv_heads:
        raise UnsupportedModel(
            name, f"its {query_heads} query heads cannot share {kv_heads} KV heads evenly"
        )
    if key.shape[:3] != value.shape[:3] or query.shape[2] != key.shape[2]:
        raise UnsupportedModel(
            name,
            f"its attention shapes do not fit: queries {tuple(query.shape)}, "
            f"keys {tuple(key.shape)}, values {tuple(value.shape)}",
        )


@dataclass(slots=True)
class _Probe:
    """A handler that attends plainly and notes what came."""

    seen: dict[int, tuple[int, int, int, int, float]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
        if layer in self.seen:
            raise UnsupportedModel("of this kind", f"layer {layer} attends more than once")
        self.seen[layer] = (q.shape[1], k.shape[1], q.shape[3], v.shape[3], scaling)
        return causal_attention(q, k, v, scaling=scaling)


def probe(module: nn.Module) -> ProbedShape:
    """Forward two tokens through `module` (a causal LM) and return what its attention passes.

    Raises UnsupportedModel when a layer attends in a way that is not served, attends elsewhere, or
    differs from the others in shape.
    """
    base: Any = getattr(module, "base_model", module)
    config: Any = base.config
    device = next(base.parameters()).device
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    handler = _Probe()
    with torch.inference_mode():
        base(
            input_ids=ids,
            position_ids=torch.arange(2, device=device).unsqueeze(0),
            use_cache=False,
            openbook=handler,
        )
    name, layers = type(module).__name__, int(config.num_hidden_layers)
    missing = [layer for layer in range(layers) if layer not in handler.seen]
    if missing or len(handler.seen) != layers:
        raise UnsupportedModel(
            name,
            f"{len(missing)} of {layers} layers do not attend through transformers' attention "
            f"interface, the first of them layer {missing[0] if missing else layers}",
        )
    shapes = {shape[:4] for shape in handler.seen.values()}
    if len(shapes) != 1:
        raise UnsupportedModel(name, f"its layers differ in heads or sizes: {sorted(shapes)}")
    query_heads, kv_heads, head_dim, value_dim = shapes.pop()
    scalings = tuple(handler.seen[layer][4] for layer in range(layers))
    return ProbedShape(layers, query_heads, kv_heads, head_dim, value_dim, scalings)
