"""Claims about the attention function, the probe and the prefill."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, GptOssConfig

from openbook.worker import attention
from openbook.worker.errors import IngestCancelled, UnsupportedModel
from openbook.worker.models import Model
from openbook.worker.prefill import CapturedLayer, Prefill

KINDS = ["llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "olmo2"]


def _ids(count: int) -> torch.Tensor:
    return torch.randint(3, 500, (1, count), generator=torch.Generator().manual_seed(5))


def _forward(base: Any, ids: torch.Tensor, handler: attention.AttentionHandler) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    with torch.inference_mode():
        answer = base(input_ids=ids, position_ids=positions, use_cache=False, openbook=handler)
    hidden: torch.Tensor = answer.last_hidden_state
    return hidden


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_equals_the_models_own_attention(
    kind: str, tiny_model: Callable[..., Model], tiny_directory: Callable[..., Path]
) -> None:
    ids, seen = _ids(150), []

    def sink(layer: CapturedLayer) -> None:
        seen.append((layer.layer, layer.k.clone(), layer.v.clone(), layer.scaling))

    handler = Prefill(sink, is_cancelled=lambda: False)
    hidden = _forward(tiny_model(kind).base, ids, handler)
    own = AutoModelForCausalLM.from_pretrained(tiny_directory(kind), attn_implementation="eager")
    cache = DynamicCache(config=own.config)
    with torch.inference_mode():
        want = own.base_model(ids, cache=cache, use_cache=True).last_hidden_state
    assert torch.allclose(hidden, want, atol=1e-4)
    assert [layer for layer, *_ in seen] == [0, 1]
    for layer, k, v, scaling in seen:
        assert torch.allclose(k, cache.layers[layer].keys[0], atol=1e-4)
        assert torch.allclose(v, cache.layers[layer].values[0], atol=1e-4)
        assert scaling == tiny_model(kind).shape.scalings[layer]


def test_probe_reads_a_scaling_that_is_not_one_over_root_d(
    tiny_model: Callable[..., Model],
) -> None:
    assert attention.probe(tiny_model("granite").module).scalings == (0.11, 0.11)
    plain = attention.probe(tiny_model("llama", 9, 3).module)
    assert (plain.query_heads, plain.kv_heads, plain.head_dim, plain.value_dim) == (9, 3, 16, 16)
    assert plain.scalings == (1 / math.sqrt(16),) * 2


def test_cancel_stops_before_the_next_layer(tiny_model: Callable[..., Model]) -> None:
    seen: list[int] = []
    handler = Prefill(lambda layer: seen.append(layer.layer), is_cancelled=lambda: len(seen) > 0)
    with pytest.raises(IngestCancelled):
        _forward(tiny_model().base, _ids(10), handler)
    assert seen == [0]


def _random(config: Any) -> Any:
    attention.register()
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SMALL), "soft-caps"),
        (GptOssConfig(**SMALL, num_local_experts=2, layer_types=["full_attention"] * 2), "sinks"),
    ],
)
def test_probe_refuses_what_the_attention_receives(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        attention.probe(_random(config))


class _Module(torch.nn.Module):
    """Stands for a model's attention module."""

    layer_idx = 0
    is_causal = True
    config = type("Config", (), {"max_position_embeddings": 256})()


def _qkv(query_heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(1, query_heads, 3, 8),
        torch.randn(1, kv_heads, 3, 8),
        torch.randn(1, kv_heads, 3, 8),
    )


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask or bias"),
        ({"dropout": 0.1}, "dropout of 0.1"),
        ({"softcap": 30.0}, "30.0"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"sliding_window": 255}, "window of 255 tokens, below the model's 256"),
        ({"is_causal": False}, "causally"),
        ({"position_bias": torch.zeros(4)}, "'position_bias'"),
        ({"scaling": None}, "no scaling"),
    ],
)
def test_attention_refuses_what_would_change_the_scores(
    received: dict[str, Any], reason: str
) -> None:
    handler = Prefill(lambda _: None, is_cancelled=lambda: False)
    with pytest.raises(UnsupportedModel, match=reason):
        attention.openbook_attention(
            _Module(), *_qkv(), **{"scaling": 0.5, "openbook": handler, **received}
        )


def test_a_sliding_window_as_wide_as_the_model_is_served() -> None:
    handler = Prefill(lambda _: None, is_cancelled=lambda: False)
    out, _ = attention.openbook_attention(
        _Module(), *_qkv(), scaling=0.5, openbook=handler, sliding_window=256, position_ids=1
    )
    assert out.shape == (1, 3, 4, 8)


def test_case_b10_uneven_groups_are_refused_with_both_numbers() -> None:
    handler = Prefill(lambda _: None, is_cancelled=lambda: False)
    with pytest.raises(UnsupportedModel, match="9 query heads cannot share 2 KV heads"):
        attention.openbook_attention(_Module(), *_qkv(9, 2), scaling=0.5, openbook=handler)


def test_a_call_without_a_handler_is_refused() -> None:
    with pytest.raises(ValueError, match="openbook=<handler>"):
        attention.openbook_attention(_Module(), *_qkv(), scaling=0.5)


def test_no_mask_is_ever_made(
    tiny_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed-looking call (a jump in the positions) would make transformers build one."""
    masks: list[object] = []
    genuine = attention.openbook_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        masks.append(args[4] if len(args) > 4 else kwargs.get("attention_mask"))
        return genuine(*args, **kwargs)

    monkeypatch.setattr(attention, "openbook_attention", spy)
    attention.register()
    handler = Prefill(lambda _: None, is_cancelled=lambda: False)
    positions = torch.tensor([[0, 1, 2, 9, 10]])
    with torch.inference_mode():
        tiny_model().base(
            input_ids=_ids(5), position_ids=positions, use_cache=False, openbook=handler
        )
    monkeypatch.undo()
    attention.register()
    assert masks == [None, None]
