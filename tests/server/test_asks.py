"""What an AskRequest may say, and what it means when it says nothing."""

import pytest

from openbook.indexstore.head import Budget
from openbook.server.asks import QUESTION_BYTES_MAX, ask_spec
from openbook.server.errors import ArgumentInvalid, FieldNotSupported
from openbook.v1 import contexts_pb2 as pb


def spec(**fields):
    request = pb.AskRequest(**{"context": "contexts/x", "question": "q", **fields})
    return ask_spec(request, answer_tokens_max=2048, caller="who")


def keys(count):
    return pb.Budget(keys=pb.Budget.Keys(count=count))


def test_the_least_request_gets_the_documented_defaults():
    asked = spec()
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.seed) == (256, 0.0, 1.0, None)
    assert (asked.stop, asked.plan, asked.evidence) == ((), None, False)
    assert asked.budget == Budget(kind="keys", keys=100, estimate=True)


def test_every_served_field_reaches_the_engine():
    asked = spec(
        question="who", answer_prefix="It is", max_tokens=7, temperature=0.5, top_p=0.9, seed=0,
        stop=["a", "b"], budget=keys(3), estimate=False, plan=pb.PLAN_GRAPH,
    )  # fmt: skip
    assert (asked.question, asked.answer_prefix, asked.max_tokens) == ("who", "It is", 7)
    assert (asked.temperature, asked.top_p, asked.seed) == (0.5, 0.9, 0)
    assert (asked.stop, asked.plan) == (("a", "b"), "graph")
    assert asked.budget == Budget(kind="keys", keys=3, estimate=False)
    assert spec(budget=pb.Budget(exact=pb.Budget.Exact())).budget.kind == "exact"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"question": ""}, "question"),
        ({"question": "x" * (QUESTION_BYTES_MAX + 1)}, "question"),
        ({"answer_prefix": "x" * QUESTION_BYTES_MAX}, "question"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2049}, "max_tokens"),
        ({"max_tokens": 2**31 - 1}, "max_tokens"),
        ({"budget": keys(0)}, "budget.keys.count"),
        ({"budget": keys(-5)}, "budget.keys.count"),
        ({"budget": keys(4097)}, "budget.keys.count"),
        ({"budget": keys(2**31 - 1)}, "budget.keys.count"),
        ({"plan": 9}, "plan"),
    ],
)
def test_case_b54_a_value_out_of_range_is_refused_by_name(fields, named):
    with pytest.raises(ArgumentInvalid) as refused:
        spec(**fields)
    assert refused.value.field == named
    assert "xxx" not in str(refused.value)


def test_a_newer_kind_of_budget_is_refused_not_ignored():
    budget = pb.Budget.FromString(b"\xa2\x06\x01x")  # field 100
    with pytest.raises(FieldNotSupported):
        spec(budget=budget)
