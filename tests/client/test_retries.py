"""Calls against a service that fails first: which are tried again, how often, and which never."""

import io
import time
from collections.abc import Callable

import grpc
import pytest

from openbook.client import Client, IngestProgress, errors
from openbook.client.requests import Deadline
from openbook.client.retries import PAUSE_S, TRIES_MAX, Tries
from openbook.client.uploads import CHUNK_BYTES

from .conftest import LAYERS, FakeServer, Refusal

AWAY = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING")
ID = "0" * 32
SAFE: dict[str, Callable[[Client, str], object]] = {
    "GetContext": lambda client, name: client.context(name),
    "ListContexts": lambda client, name: list(client.contexts()),
    "ListModels": lambda client, name: client.models(),
    "CountTokens": lambda client, name: client.count_tokens("Some text."),
    "Ask": lambda client, name: client.ask(name, "Who?").result(),
    "IngestContext": lambda client, name: client.ingest("Some text."),
    "WatchContext": lambda client, name: client.ingest("Some text."),
}
UNSAFE: dict[str, Callable[[Client, str], object]] = {
    "DeleteContext": lambda client, name: client.delete(name),
    "UpdateContext": lambda client, name: client.update(name, ttl=60),
    "VerifyContext": lambda client, name: client.verify(name),
    "ReindexContext": lambda client, name: client.reindex(name),
}


@pytest.mark.parametrize("method", SAFE)
def test_safe_call_is_tried_three_times(
    method: str, fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.calls.clear()
    fake.service.refuse(method, *[AWAY] * (TRIES_MAX - 1))
    SAFE[method](client, context_id)
    assert fake.service.calls.count(method) == TRIES_MAX


@pytest.mark.parametrize("method", SAFE)
def test_safe_call_is_given_up_after_the_third_try(
    method: str, fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.calls.clear()
    fake.service.refuse(method, *[AWAY] * (TRIES_MAX + 1))
    with pytest.raises(errors.Unavailable) as caught:
        SAFE[method](client, context_id)
    assert caught.value.reason == "DRAINING"
    assert fake.service.calls.count(method) == TRIES_MAX


@pytest.mark.parametrize("method", UNSAFE)
def test_other_call_is_tried_once(
    method: str, fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.refuse(method, AWAY)
    with pytest.raises(errors.Unavailable):
        UNSAFE[method](client, context_id)
    assert fake.service.calls.count(method) == 1


@pytest.mark.parametrize("method", SAFE)
def test_other_failure_is_not_tried_again(
    method: str, fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.calls.clear()
    fake.service.refuse(method, Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "ASKS_FULL"))
    with pytest.raises(errors.Exhausted):
        SAFE[method](client, context_id)
    assert fake.service.calls.count(method) == 1


def test_answer_is_never_tried_again_after_its_first_piece(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    fake.service.refusals_mid_answer = [AWAY]
    pieces = []
    with pytest.raises(errors.Unavailable):
        for piece in client.ask(context_id, "Who?"):
            pieces.append(piece)
    assert "".join(pieces) == "The keeper's daughter."
    assert fake.service.calls.count("Ask") == 1


def test_watch_that_breaks_midway_goes_on(fake: FakeServer, client: Client) -> None:
    fake.service.refusals_mid_watch = [AWAY]
    seen: list[IngestProgress] = []
    client.ingest("Some text.", on_progress=seen.append)
    assert [step.layers_done for step in seen] == [*range(LAYERS + 1)] * 2 + [LAYERS]
    assert fake.service.calls.count("IngestContext") == 1


def test_large_document_is_sent_again_from_where_it_stood(fake: FakeServer, client: Client) -> None:
    file = io.BytesIO(b"header\n" + b"word " * CHUNK_BYTES)
    file.readline()
    fake.service.refusals_after_upload = [AWAY, AWAY]
    client.ingest(file)
    assert fake.service.documents == [b"word " * CHUNK_BYTES] * TRIES_MAX


def test_no_try_begins_after_the_timeout(fake: FakeServer, client: Client) -> None:
    fake.service.refuse("IngestContext", *[AWAY] * TRIES_MAX)
    begun = time.monotonic()
    with pytest.raises(errors.Unavailable):
        client.ingest("Some text.", timeout=PAUSE_S / 2)
    assert time.monotonic() - begun < 5  # a bound against hanging, not a measurement
    assert fake.service.calls == ["IngestContext"]


class Away(grpc.RpcError):
    """A failed call as gRPC raises it, with nothing but its status."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


def test_pauses_grow_and_vary() -> None:
    firsts, seconds = set(), set()
    for _ in range(50):
        tries = Tries(Deadline(None))
        firsts.add(tries.pause_s(Away()))
        seconds.add(tries.pause_s(Away()))
        with pytest.raises(errors.OpenbookError):
            tries.pause_s(Away())
    assert PAUSE_S / 2 <= min(firsts) < max(firsts) <= PAUSE_S
    assert PAUSE_S <= min(seconds) < max(seconds) <= 2 * PAUSE_S
