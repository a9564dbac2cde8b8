"""What an ask really did, in numbers.

Owns the receipt and how its means are formed from what was counted. It knows nothing of how the
counting is done (decode.py, engine.py) nor of the wire.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from openbook.indexstore.head import Budget, HeadPlan
from openbook.worker.decode import Sequence


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one ask. An answer's end-of-turn token is not counted."""

    context_tokens: int
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an ask really did; times in milliseconds.

    `keys_scored` and `centroids_scored` are shares of the context's tokens, `keys_read` a count:
    means over the tokens run under the budget, over layers and KV heads. The first answer token
    comes from the question, which reads the middle exactly: an answer of one token scored nothing.
    `middle_ms` and `device_ms` are means per such token; in a batch, of the whole batch. The first
    token comes after `open_ms` (until the context was open), `queue_ms` and `question_ms`.
    """

    tokens_reused: int  # context tokens answered from the store
    tokens_prefilled: int  # tokens run before the first answer token, as the model counted them
    keys_scored: float
    centroids_scored: float
    keys_read: float
    mass_estimated: float  # mean share of attention that the estimate stood for
    open_ms: float
    queue_ms: float
    question_ms: float
    first_token_ms: float
    token_ms: float
    middle_ms: float
    device_ms: float
    budget: str
    plan: str
    bytes_mapped: int


@dataclass(slots=True)
class Timeline:
    """When an ask passed each point, in seconds of the engine's clock."""

    asked: float  # it arrived; its context may have been opened for it since
    submitted: float
    started: float = 0.0
    first_id: float = 0.0
    last_id: float = 0.0


def make_receipt(sequence: Sequence, timeline: Timeline, *, tokens_prefilled: int) -> Receipt:
    """Form the receipt of an ask from what its sequence cost, the ending step included."""
    cost, token_count = sequence.cost, sequence.token_count
    heads = sum(len(layer.heads) for layer in sequence.layers)
    reads = max(1, cost.steps * heads)
    steps = max(1, cost.steps)
    return Receipt(
        tokens_reused=token_count,
        tokens_prefilled=tokens_prefilled,
        keys_scored=cost.keys_scored / reads / token_count,
        centroids_scored=cost.centroids_scored / reads / token_count,
        keys_read=cost.keys_read / reads,
        mass_estimated=cost.mass_estimated / steps,
        open_ms=(timeline.submitted - timeline.asked) * 1e3,
        queue_ms=(timeline.started - timeline.submitted) * 1e3,
        question_ms=(timeline.first_id - timeline.started) * 1e3,
        first_token_ms=(timeline.first_id - timeline.asked) * 1e3,
        token_ms=(timeline.last_id - timeline.first_id) * 1e3 / steps,
        middle_ms=cost.middle_s * 1e3 / steps,
        device_ms=cost.device_s * 1e3 / steps,
        budget=describe_budget(sequence.budget),
        plan=describe_plan(tuple(layer.plan for layer in sequence.layers)),
        bytes_mapped=sequence.context.bytes_mapped,
    )


def describe_budget(budget: Budget) -> str:
    """Name a budget: "exact", "keys=100" or "keys=100+estimate"."""
    if budget.kind == "exact":
        return "exact"
    return f"keys={budget.keys}" + ("+estimate" if budget.estimate else "")


def describe_plan(plan: tuple[tuple[HeadPlan, ...], ...]) -> str:
    """Name what the heads do, with counts where they differ; "window" without a middle."""
    kinds = Counter(head.kind for layer in plan for head in layer)
    if len(kinds) < 2:
        return next(iter(kinds), "window")
    return " ".join(f"{kind}:{count}" for kind, count in sorted(kinds.items()))
