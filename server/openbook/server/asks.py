"""From an AskRequest to what the engine is asked, or a refusal.

Owns which fields of AskRequest are served, and the limits that are the server's: on what it reads
and on how long it answers. The ranges of `temperature`, `top_p`, `seed` and `stop` are the
engine's, which names the field as well.
"""

from __future__ import annotations

from openbook.indexstore.head import Budget, PlanKind
from openbook.server.errors import ArgumentInvalid, FieldNotSupported
from openbook.server.messages import refuse_unknown_fields
from openbook.v1 import contexts_pb2 as pb
from openbook.worker import AskSpec

MAX_TOKENS_DEFAULT = 256
QUESTION_BYTES_MAX = 1 << 20  # before anything is tokenised; the limit proper counts tokens
KEYS_MAX = 4096  # the search's queue grows with them, and all answers share its thread

# Every field of AskRequest is in one of these two; a test holds them against the interface.
SERVED = frozenset(
    {
        "context", "question", "answer_prefix", "max_tokens", "temperature", "top_p", "seed",
        "stop", "budget", "estimate", "plan",
    }
)  # fmt: skip
NOT_SERVED = frozenset({"group_union", "question_budget", "evidence", "session"})
PLANS: dict[int, PlanKind | None] = {
    pb.PLAN_UNSPECIFIED: None,
    pb.PLAN_SCAN: "scan",
    pb.PLAN_GRAPH: "graph",
    pb.PLAN_CLUSTERS: "clusters",
}


def ask_spec(request: pb.AskRequest, *, answer_tokens_max: int, caller: str) -> AskSpec:
    """Return what `request` asks for. Raises ArgumentInvalid or FieldNotSupported."""
    _refuse_not_served(request)
    _check_text(request)
    if request.plan not in PLANS:
        raise ArgumentInvalid("plan", "is not a plan")
    return AskSpec(
        question=request.question,
        answer_prefix=request.answer_prefix,
        max_tokens=_max_tokens(request, answer_tokens_max),
        temperature=request.temperature,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        seed=request.seed if request.HasField("seed") else None,
        stop=tuple(request.stop),
        budget=_budget(request),
        plan=PLANS[request.plan],
        caller=caller,
    )


def _refuse_not_served(request: pb.AskRequest) -> None:
    for field, _ in request.ListFields():
        if field.name not in SERVED:
            raise FieldNotSupported(field.name)
    if request.budget.HasField("mass"):
        raise FieldNotSupported("budget.mass")
    for message in (request, request.budget, request.budget.keys, request.budget.exact):
        refuse_unknown_fields(message)


def _check_text(request: pb.AskRequest) -> None:
    if not request.question:
        raise ArgumentInvalid("question", "must not be empty")
    size = len(request.question.encode()) + len(request.answer_prefix.encode())
    if size > QUESTION_BYTES_MAX:
        raise ArgumentInvalid(
            "question", f"and answer_prefix may have at most {QUESTION_BYTES_MAX} bytes"
        )


def _max_tokens(request: pb.AskRequest, most: int) -> int:
    count = request.max_tokens if request.HasField("max_tokens") else min(MAX_TOKENS_DEFAULT, most)
    if not 1 <= count <= most:
        raise ArgumentInvalid("max_tokens", f"must be from 1 to {most}")
    return count


def _budget(request: pb.AskRequest) -> Budget:
    estimate = request.estimate if request.HasField("estimate") else True
    kind = request.budget.WhichOneof("kind")
    if kind == "exact":
        return Budget(kind="exact", estimate=False)  # every key is read: nothing to stand in for
    if kind == "keys":
        if not 1 <= request.budget.keys.count <= KEYS_MAX:
            raise ArgumentInvalid(
                "budget.keys.count", f"must be from 1 to {KEYS_MAX}; budget.exact reads every key"
            )
        return Budget(keys=request.budget.keys.count, estimate=estimate)
    return Budget(estimate=estimate)
