"""Claims about what the engine refuses before anything runs, and where an answer must end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openbook.worker import Engine, Finished
from openbook.worker.errors import BadAsk, QuestionTooLong
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext

from .asking import Asked, asked_ids, run_all, spec

Tiny = Callable[..., Model]
ReadContext = Callable[..., Path]
Digits = Callable[[int], bytes]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"question": ""}, "question"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ("",)}, "stop"),
        ({"evidence": True}, "evidence"),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(
    changes: dict[str, object], field: str, engine: Engine, context: OpenedContext
) -> None:
    with pytest.raises(BadAsk) as caught:
        Asked(engine, spec(**changes), context)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert engine.load == (0, 0)


def test_case_b16_the_last_position_is_used_and_none_beyond(
    engine: Engine, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    model = tiny_model("llama", 9, 3)
    full = model.positions_max
    asked_tokens = len(asked_ids(model, "Q?"))
    path = read_context(model, digits(full - asked_tokens))
    claim = engine.open(path, path.name)
    for max_tokens in (1, 2):
        asked = Asked(engine, spec("Q?", max_tokens=max_tokens), claim)
        run_all(engine)
        assert asked.finished.finish_reason == "length"
        assert asked.finished.usage.answer_tokens == 1
    with pytest.raises(QuestionTooLong) as caught:
        Asked(engine, spec("Q? And more"), claim)
    assert caught.value.limit == asked_tokens < caught.value.tokens
    after = Asked(engine, spec("Q?"), claim)
    run_all(engine)
    assert after.finished
    claim.close()


def test_a_question_over_the_token_limit_is_refused_before_it_is_queued(
    tiny_model: Tiny, context: OpenedContext
) -> None:
    model = tiny_model("llama", 9, 3)
    limit = len(asked_ids(model, "Q?"))
    engine = Engine(model, threads=1, sequences_max=1, question_tokens_max=limit)
    asked = Asked(engine, spec("Q?", max_tokens=1), context)
    run_all(engine)
    assert asked.finished
    with pytest.raises(QuestionTooLong) as caught:
        Asked(engine, spec("Q? And"), context)
    assert caught.value.limit == limit < caught.value.tokens
    assert engine.load == (0, 0)
    engine.close()


@pytest.mark.parametrize("sequences_max", [1, 2])
def test_asks_of_callers_take_turns_and_those_of_one_go_in_order(
    tiny_model: Tiny, context: OpenedContext, sequences_max: int
) -> None:
    engine = Engine(tiny_model("llama", 9, 3), threads=1, sequences_max=sequences_max)
    ended: list[str] = []

    def submit(caller: str, number: int) -> None:
        def note(event: object) -> None:
            if isinstance(event, Finished):
                ended.append(f"{caller}{number}")

        engine.submit(spec(max_tokens=2, caller=caller), context, note)

    for number in range(5):
        submit("many", number)
    engine.step()  # those of the first caller run
    for number in range(2):
        submit("few", number)
    run_all(engine)
    assert [name for name in ended if name.startswith("many")] == [f"many{n}" for n in range(5)]
    assert ended.index("few0") == sequences_max and ended.index("few1") <= 5, ended
    assert not engine._turns.keys() - {"many", "few"}
    engine.close()
