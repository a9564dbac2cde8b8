"""An ask with the events it got, for the tests of the engine."""

from __future__ import annotations

from openbook.worker import Delta, Engine, Failed, Finished
from openbook.worker.engine import AnswerEvent, Ask, AskSpec
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext

EVENTS_MAX = 5000


class Asked:
    """An ask with the events it got."""

    def __init__(self, engine: Engine, spec: AskSpec, context: OpenedContext) -> None:
        self.events: list[AnswerEvent] = []
        self.ask: Ask = engine.submit(spec, context, self.events.append)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def finished(self) -> Finished:
        (last,) = (event for event in self.events if not isinstance(event, Delta))
        assert isinstance(last, Finished), last
        return last

    @property
    def error(self) -> Exception:
        (last,) = (event for event in self.events if not isinstance(event, Delta))
        assert isinstance(last, Failed), last
        return last.error


def run_all(engine: Engine) -> int:
    """Step until idle; return the number of steps."""
    for steps in range(EVENTS_MAX):
        if not engine.step():
            return steps
    raise AssertionError("the engine never becomes idle")


def spec(question: str = "Where is it?", **changes: object) -> AskSpec:
    return AskSpec(**{"question": question, "max_tokens": 12, **changes})  # type: ignore[arg-type]


def asked_ids(model: Model, question: str) -> list[int]:
    return list(model.vocabulary.plain.encode("\n\n" + question).ids)
