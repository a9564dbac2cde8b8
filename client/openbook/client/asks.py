"""A question in the service's words: its settings checked and put into an AskRequest.

Knows: AskRequest and what a caller may say. Does not know: channels. The limits that depend on the
model or on the server's settings are the server's to check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openbook.client.uploads import utf8
from openbook.v1 import contexts_pb2 as pb

QUESTION_BYTES_MAX = 1 << 20  # far above any model's question, far below a message's 4 MiB
_INT32_MAX = 2**31 - 1
_SEED_MAX = 2**63 - 1  # the service's; its field on the wire could hold twice that


@dataclass(frozen=True, slots=True)
class Keys:
    """Read the best `count` keys of every query head; the service checks the range."""

    count: int


Budget = Literal["exact"] | Keys | int
Plan = Literal["clusters", "scan", "graph"]

_PLANS: dict[Plan, pb.Plan] = {
    "clusters": pb.PLAN_CLUSTERS,
    "scan": pb.PLAN_SCAN,
    "graph": pb.PLAN_GRAPH,
}


def ask_request(
    name: str,
    question: str,
    *,
    answer_prefix: str,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: Sequence[str],
    budget: Budget | None,
    estimate: bool | None,
    plan: Plan | None,
) -> pb.AskRequest:
    """Return the request; None leaves a setting to the service.

    `Client.ask` says what each setting means. Raises ValueError or TypeError that names the one
    that cannot be sent.
    """
    size = len(utf8(question, "the question")) + len(utf8(answer_prefix, "answer_prefix"))
    if size > QUESTION_BYTES_MAX:
        raise ValueError(f"the question is {size} bytes; at most {QUESTION_BYTES_MAX} are sent")
    if plan is not None and plan not in _PLANS:
        raise ValueError("plan must be 'clusters', 'scan', 'graph' or None")
    request = pb.AskRequest(
        context=name,
        question=question,
        answer_prefix=answer_prefix,
        max_tokens=_whole("max_tokens", max_tokens, -_INT32_MAX - 1, _INT32_MAX),
        temperature=temperature,
        top_p=top_p,
        seed=_whole("seed", seed, 0, _SEED_MAX),
        stop=_stops(stop),
        budget=_budget(budget),
        plan=_PLANS[plan] if plan is not None else pb.PLAN_UNSPECIFIED,
    )
    if estimate is not None:
        request.estimate = estimate
    return request


def _stops(stop: Sequence[str]) -> Sequence[str]:
    """Return the stop strings; a lone str would be taken for its letters."""
    if isinstance(stop, str):
        raise TypeError("stop is a sequence of strings, not one string")
    for text in stop:
        utf8(text, "a stop string")
    return stop


def _budget(budget: Budget | None) -> pb.Budget | None:
    """Return the service's budget, or None for its default."""
    if budget is None:
        return None
    if budget == "exact":
        return pb.Budget(exact=pb.Budget.Exact())
    count = budget.count if isinstance(budget, Keys) else budget
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError("budget must be 'exact', a number of keys, Keys or None")
    return pb.Budget(keys=pb.Budget.Keys(count=_whole("budget", count, -_INT32_MAX, _INT32_MAX)))


def _whole(what: str, value: int | None, least: int, most: int) -> int | None:
    """Return `value` if the service can take it; else raise ValueError or TypeError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if value is not None and not least <= value <= most:
        raise ValueError(f"{what} is {value}; it must lie between {least} and {most}")
    return value
