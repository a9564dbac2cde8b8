"""From the service's errors to the client's: the table is total, and nothing is lost."""

import asyncio
import inspect
import re

import grpc
import pytest

from openbook.client import Client, errors
from openbook.server import errors as server_errors

from .conftest import FakeServer, Refusal


def test_table_holds_exactly_the_reasons_of_the_server() -> None:
    rows = server_errors.TABLE.values()
    assert set(errors.REASONS) == {row.reason for row in rows} | {server_errors.FAULT_REASON}


def test_fallback_knows_every_status() -> None:
    assert set(errors.STATUSES) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


def test_docstring_draws_every_class_under_its_parent() -> None:
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([ │├└─]*)([A-Z]\w+)", line)
        if match and match[2] in vars(errors):
            drawn[match[2]] = len(match[1]) // 4
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.OpenbookError)
    }
    depths = {name: len(kind.__mro__) - 4 for name, kind in classes.items()}
    assert drawn == depths


@pytest.mark.parametrize("reason", sorted(errors.REASONS))
def test_reason_decides_the_class(reason: str, fake: FakeServer, client: Client) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    fake.service.refuse("GetContext", Refusal(code, reason, "why not", {"limit": "8192"}))
    with pytest.raises(errors.OpenbookError) as caught:
        client.context("0" * 32)
    assert type(caught.value) is errors.REASONS[reason]
    assert str(caught.value) == "why not"
    assert caught.value.reason == reason
    assert caught.value.status == "FAILED_PRECONDITION"
    assert caught.value.details == {"limit": "8192"}


@pytest.mark.parametrize("code", sorted(errors.STATUSES, key=lambda code: code.name))
def test_status_decides_where_the_reason_is_unknown(
    code: grpc.StatusCode, fake: FakeServer, client: Client
) -> None:
    fake.service.refuse("GetContext", *[Refusal(code, "SOMETHING_NEW")] * 4)
    with pytest.raises(errors.OpenbookError) as caught:
        client.context("0" * 32)
    assert type(caught.value) is errors.STATUSES[code]
    assert caught.value.reason == "SOMETHING_NEW"


def test_reason_of_another_domain_is_not_ours(fake: FakeServer, client: Client) -> None:
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, "STORE_FULL", domain="googleapis.com")
    fake.service.refuse("GetContext", refusal)
    with pytest.raises(errors.NotFound) as caught:
        client.context("0" * 32)
    assert caught.value.reason == ""


def test_case_b56_accents_in_an_error_survive(fake: FakeServer, client: Client) -> None:
    refusal = Refusal(grpc.StatusCode.INTERNAL, "INTERNAL", "le modèle s'est arrêté")
    fake.service.refuse("GetContext", refusal)
    with pytest.raises(errors.ServerFault, match="le modèle s'est arrêté"):
        client.context("0" * 32)


def test_every_call_translates_its_errors(fake: FakeServer, client: Client) -> None:
    calls = {
        "IngestContext": lambda: client.ingest("text"),
        "WatchContext": lambda: client.ingest("text"),
        "GetContext": lambda: client.context("0" * 32),
        "ListContexts": lambda: list(client.contexts()),
        "DeleteContext": lambda: client.delete("0" * 32),
        "Ask": lambda: client.ask("0" * 32, "Who?").result(),
        "ListModels": lambda: client.models(),
    }
    for method, call in calls.items():
        fake.service.refuse(method, Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "ASKS_FULL"))
        with pytest.raises(errors.Exhausted):
            call()


def test_nobody_at_the_address_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable):
            client.models()
        with pytest.raises(errors.Unavailable):
            client.ingest("text")
        with pytest.raises(errors.Unavailable):
            client.ask("0" * 32, "Who?").result()


def test_every_class_of_a_status_has_words_of_its_own() -> None:
    assert set(errors.WORDS) == set(errors.STATUSES.values())
    assert len(set(errors.WORDS.values())) == len(errors.WORDS)


def test_words_of_the_grpc_library_are_kept_in_the_cause_alone(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(errors.Unavailable) as away:
        nobody.models()
    assert str(away.value) == "no server answers at that address"
    fake.service.hold_answer_after = 0
    with pytest.raises(errors.DeadlineExceeded) as late:
        client.ask(context_id, "Who?", timeout=0.2).result()
    assert str(late.value) == "the call did not end within its timeout"
    assert fake.service.answer_ended.wait(timeout=10)
    fake.service.answer_ended.clear()
    answer = client.ask(context_id, "Who?")
    answer.cancel()
    with pytest.raises(errors.Cancelled) as cancelled:
        answer.result()
    assert str(cancelled.value) == "the call was cancelled"
    for caught in (away, late, cancelled):
        assert isinstance(caught.value.__cause__, grpc.RpcError | asyncio.CancelledError)


def test_error_without_a_status_is_a_fault() -> None:
    assert isinstance(errors.from_rpc(grpc.RpcError()), errors.ServerFault)
