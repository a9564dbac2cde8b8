"""Claims about a base entered halfway: the same numbers, and the model itself left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openbook.worker.halfway import base_from, can_be_entered
from openbook.worker.models import Model
from openbook.worker.prefill import CapturedLayer, Prefill

Tiny = Callable[..., Model]
IDS = torch.arange(5, 45).unsqueeze(0)


def run(base: Any) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Prefill IDS through a base; return q, k, v of every layer that ran."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def sink(captured: CapturedLayer) -> None:
        seen[captured.layer] = captured.q.clone(), captured.k.clone(), captured.v.clone()

    with torch.inference_mode():
        base(
            input_ids=IDS,
            position_ids=torch.arange(IDS.shape[1]).unsqueeze(0),
            use_cache=False,
            openbook=Prefill(sink, is_cancelled=lambda: False),
        )
    return seen


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "olmo2"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_base_entered_halfway_gives_the_same_numbers(
    first: int, kind: str, tiny_model: Tiny
) -> None:
    model = tiny_model(kind, 4, 2, num_hidden_layers=3)
    assert can_be_entered(model)
    whole, hidden = run(model.base), {}
    watched = run(base_from(model, 0, None, on_layer=lambda n, h: hidden.__setitem__(n, h.clone())))
    assert sorted(hidden) == [0, 1, 2]
    entered = run(base_from(model, first, hidden[first - 1], on_layer=lambda *_: None))
    assert sorted(entered) == list(range(first, 3))
    for seen in (watched, entered):
        for layer, parts in seen.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, whole[layer], strict=True))


def test_the_model_itself_is_left_alone(tiny_model: Tiny) -> None:
    model = tiny_model("llama", 4, 2)
    before = run(model.base)
    modules = list(model.base.modules())
    entered = base_from(model, 1, torch.zeros(1, IDS.shape[1], 64), on_layer=lambda *_: None)
    run(entered)
    assert list(model.base.modules()) == modules
    after = run(model.base)
    assert all(torch.equal(before[1][i], after[1][i]) for i in range(3))


def test_an_entry_that_makes_no_sense_is_refused(tiny_model: Tiny) -> None:
    model = tiny_model("llama", 4, 2)
    hidden = torch.zeros(1, 4, 64)
    for first, given in ((0, hidden), (1, None), (2, hidden), (-1, hidden)):
        with pytest.raises(ValueError):
            base_from(model, first, given, on_layer=lambda *_: None)
