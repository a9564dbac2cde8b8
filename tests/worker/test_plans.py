"""A forced plan needs a context that was stored for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openbook.indexstore.head import Budget, PlanKind
from openbook.worker.decode import Sequence
from openbook.worker.errors import BadAsk
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext


def test_plan_that_a_context_was_not_stored_for_is_refused(
    digits: Callable[[int], bytes],
    tiny_model: Callable[..., Model],
    read_context: Callable[..., Path],
    opened: Callable[[Model, Path], OpenedContext],
) -> None:
    model = tiny_model("llama", 9, 3)
    context = opened(model, read_context(model, digits(700)))
    plans: tuple[PlanKind, ...] = ("graph", "scan")
    for plan in plans:
        with pytest.raises(BadAsk, match="plan is one that this context has no index for"):
            Sequence(model, context, budget=Budget(), plan=plan)
    Sequence(model, context, budget=Budget(), plan="clusters")
