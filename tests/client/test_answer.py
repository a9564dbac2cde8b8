"""Answers: pieces in order, the result, and every way in which one can end early."""

import threading

import grpc
import pytest

from openbook.client import Client, Keys, errors
from openbook.v1 import contexts_pb2 as pb

from .conftest import FakeServer, Refusal


def test_answer_streams_its_pieces_in_order(client: Client, context_id: str) -> None:
    assert list(client.ask(context_id, "Who?")) == ["The ", "keeper's ", "daughter."]


def test_piece_arrives_before_the_answer_is_finished(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.hold_answer_after = 1
    with client.ask(context_id, "Who?") as answer:
        assert next(answer) == "The "


def test_result_is_the_whole_answer(client: Client, context_id: str) -> None:
    result = client.ask(context_id, "Who?").result()
    assert result.text == "The keeper's daughter."
    assert result.finish_reason == "stop"
    assert (result.usage.context_tokens, result.usage.question_tokens) == (7000, 9)
    assert (result.receipt.tokens_reused, result.receipt.tokens_prefilled) == (7000, 9)
    assert (result.receipt.keys_scored, result.receipt.budget) == (0.25, "keys=100")


def test_result_after_some_pieces_is_still_whole(client: Client, context_id: str) -> None:
    answer = client.ask(context_id, "Who?")
    next(answer)
    assert answer.result().text == "The keeper's daughter."
    assert answer.result() == answer.result()
    assert list(answer) == []


def test_receipt_has_the_fields_of_the_wire() -> None:
    from openbook.client import Receipt

    assert list(Receipt.__slots__) == [field.name for field in pb.Receipt.DESCRIPTOR.fields]


def test_cancel_stops_the_service(fake: FakeServer, client: Client, context_id: str) -> None:
    fake.service.hold_answer_after = 1
    answer = client.ask(context_id, "Who?")
    assert next(answer) == "The "
    assert not fake.service.answer_ended.is_set()
    answer.cancel()
    assert fake.service.answer_ended.wait(timeout=10)
    with pytest.raises(errors.Cancelled):
        next(answer)
    with pytest.raises(errors.Cancelled):
        answer.result()


def test_cancel_from_another_thread_wakes_the_reader(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.hold_answer_after = 1
    answer = client.ask(context_id, "Who?")
    next(answer)
    threading.Timer(0.1, answer.cancel).start()
    with pytest.raises(errors.Cancelled):
        next(answer)


def test_leaving_the_block_cancels(fake: FakeServer, client: Client, context_id: str) -> None:
    fake.service.hold_answer_after = 1
    with client.ask(context_id, "Who?") as answer:
        next(answer)
    assert fake.service.answer_ended.wait(timeout=10)


def test_cancel_after_the_end_changes_nothing(client: Client, context_id: str) -> None:
    with client.ask(context_id, "Who?") as answer:
        result = answer.result()
    answer.cancel()
    assert answer.result() == result


def test_answer_that_breaks_off_raises_and_keeps_raising(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.refusals_mid_answer = [Refusal(grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT")]
    answer = client.ask(context_id, "Who?")
    pieces = []
    with pytest.raises(errors.ContextCorrupt):
        for piece in answer:
            pieces.append(piece)
    assert "".join(pieces) == "The keeper's daughter."
    with pytest.raises(errors.ContextCorrupt):
        answer.result()


def test_answer_without_its_final_message_is_a_fault(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.final = None
    with pytest.raises(errors.ServerFault, match="without its final message"):
        client.ask(context_id, "Who?").result()


def test_empty_answer_has_a_result(fake: FakeServer, client: Client, context_id: str) -> None:
    fake.service.deltas = []
    assert client.ask(context_id, "Who?").result().text == ""


def test_settings_reach_the_service(fake: FakeServer, client: Client, context_id: str) -> None:
    client.ask(
        context_id,
        "Who?",
        answer_prefix="It is ",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=2**63 - 1,
        stop=["\n", "END"],
        budget=Keys(32),
        estimate=False,
        plan="graph",
    ).result()
    (request,) = fake.service.asked
    assert request == pb.AskRequest(
        context=f"contexts/{context_id}",
        question="Who?",
        answer_prefix="It is ",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=2**63 - 1,
        stop=["\n", "END"],
        budget=pb.Budget(keys=pb.Budget.Keys(count=32)),
        estimate=False,
        plan=pb.PLAN_GRAPH,
    )


def test_settings_not_given_are_not_sent(fake: FakeServer, client: Client, context_id: str) -> None:
    client.ask(context_id, "Who?").result()
    assert fake.service.asked == [pb.AskRequest(context=f"contexts/{context_id}", question="Who?")]


def test_zeros_are_sent_as_zeros(fake: FakeServer, client: Client, context_id: str) -> None:
    """The service decides about 0 tokens and temperature 0, so they must arrive."""
    client.ask(context_id, "Who?", max_tokens=0, temperature=0.0, seed=0, budget=0).result()
    (request,) = fake.service.asked
    for field in ("max_tokens", "temperature", "seed", "budget"):
        assert request.HasField(field), field
    assert request.budget.WhichOneof("kind") == "keys"


def test_budgets(fake: FakeServer, client: Client, context_id: str) -> None:
    for budget in ("exact", 64, Keys(64)):
        client.ask(context_id, "Who?", budget=budget).result()  # type: ignore[arg-type]
    exact, number, keys = (request.budget for request in fake.service.asked)
    assert exact.HasField("exact")
    assert number == keys == pb.Budget(keys=pb.Budget.Keys(count=64))


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("max_tokens", 2**31, ValueError),
        ("seed", -1, ValueError),
        ("seed", 2**63, ValueError),
        ("budget", 2**31, ValueError),
        ("budget", "all", TypeError),
        ("budget", True, TypeError),
        ("plan", "flat", ValueError),
        ("stop", "END", TypeError),
    ],
)
def test_case_b54_setting_that_cannot_be_sent_is_refused_at_once(
    setting: str, value: object, error: type[Exception], fake: FakeServer, client: Client
) -> None:
    with pytest.raises(error, match=setting):
        client.ask("0" * 32, "Who?", **{setting: value})  # type: ignore[arg-type]
    assert fake.service.calls == []
