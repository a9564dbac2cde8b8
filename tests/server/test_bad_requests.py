"""Bad requests: each is refused with its own status, leaves nothing, and the next one is answered.

    a message            4 MiB and one byte more, 16 MiB of zeros in 16 KiB, random bytes,
                         text that is no UTF-8, none at all, two
    an upload            chunks out of order, missing, after a wrong digest, too large midway
    a field of an ask    numbers out of range, empty and oversized text
    a client             no time at all, a byte now and then, a request that never comes or ends

test_calls.py, test_asks.py, test_decode_worker.py and test_ingests.py have more of each; what a
document may hold is in the worker's test_bad_documents.py.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from openbook.v1 import contexts_pb2 as pb

from .bad_calls import METHODS, assert_sound, error_of, raw_call
from .running import (
    UNKNOWN,
    KeptLog,
    RunningServer,
    active,
    ask,
    ingest,
    refusal,
    settle,
    text_of,
    upload,
)

Code = grpc.StatusCode
MESSAGE_BYTES_MAX = 4 << 20
SERVER_DEADLINE_S = 0.4
LATE_S = 0.25


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all of them: what one test leaves would show in the next."""
    data = tmp_path_factory.mktemp("bad") / "data"
    data.mkdir(mode=0o700)
    running = RunningServer(data, KeptLog()).start()
    yield running
    running.stop()


@pytest.fixture
def context(server: RunningServer) -> pb.Context:
    return active(server)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_of_4_mib_and_one_byte_is_refused(server, context, method):
    call = raw_call(server, method)
    error = error_of(lambda: call(bytes(MESSAGE_BYTES_MAX + 1), timeout=10))
    assert error.code() == Code.RESOURCE_EXHAUSTED
    least = error_of(lambda: call(bytes(MESSAGE_BYTES_MAX), timeout=10))
    assert least.code() == Code.INVALID_ARGUMENT  # it came in, and is no message
    assert_sound(server, context.name)


@pytest.mark.parametrize("method", METHODS)
def test_sixteen_mebibytes_of_zeros_in_a_small_message_are_refused(server, context, method):
    call, bomb = raw_call(server, method), bytes(16 << 20)
    error = error_of(lambda: call(bomb, compression=grpc.Compression.Gzip, timeout=10))
    assert error.code() == Code.RESOURCE_EXHAUSTED
    assert_sound(server, context.name)


def test_case_b58_a_question_of_five_megabytes_or_over_its_own_limit_is_refused(server, context):
    huge = error_of(lambda: ask(server, context.name, "x" * 5_000_000))
    assert huge.code() == Code.RESOURCE_EXHAUSTED
    for size in (MESSAGE_BYTES_MAX - 1024, (1 << 20) + 1):
        status, reason, details = refusal(lambda n=size: ask(server, context.name, "x" * n))
        assert (status, reason) == (Code.INVALID_ARGUMENT, "ARGUMENT_INVALID")
        assert details == {"field": "question"}
    longest = "who " + "x" * ((1 << 20) - 4)
    assert text_of(ask(server, context.name, longest, max_tokens=1)) == "who-0 "
    assert_sound(server, context.name)


@pytest.mark.parametrize("method", METHODS)
def test_random_bytes_are_refused(server, context, method):
    rng = random.Random(method)
    call = raw_call(server, method)
    for _ in range(60):
        noise = rng.randbytes(rng.choice((1, 2, 7, 64, 1024)))
        status, reason, _ = refusal(lambda n=noise: call(n, timeout=10))
        assert status == Code.INVALID_ARGUMENT, (reason, noise.hex())
    assert_sound(server, context.name)


def never(over: threading.Event) -> Iterator[bytes]:
    """Send nothing, and do not close the stream until `over`."""
    over.wait(10)
    yield from ()


def texts_of(message: Descriptor, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the field numbers on the way to each text of a message."""
    for field in message.fields:
        if field.type == field.TYPE_STRING:
            yield (*before, field.number)
        elif field.type == field.TYPE_MESSAGE:
            yield from texts_of(field.message_type, (*before, field.number))


def wired(numbers: tuple[int, ...], text: bytes) -> bytes:
    """Return a message on the wire with one field: a text, however deep."""
    for number in reversed(numbers):
        text = bytes([number << 3 | 2, len(text)]) + text
    return text


PLACES = [(m, numbers) for m, d in METHODS.items() for numbers in texts_of(d.input_type)]


@pytest.mark.parametrize("text", [b"caf\xe9", b"\xed\xa0\xbd", b"\xff\xfea\x00", b"\xc0\x80"])
def test_case_b56_text_that_is_no_utf8_is_refused_in_every_field(server, context, text):
    assert len(PLACES) >= 13 and ("Ask", (8,)) in PLACES and ("IngestContext", (1, 1)) in PLACES
    for method, numbers in PLACES:
        call = raw_call(server, method)
        status, reason, details = refusal(lambda c=call, n=numbers: c(wired(n, text), timeout=10))
        assert (status, reason) == (Code.INVALID_ARGUMENT, "ARGUMENT_INVALID"), (method, numbers)
        assert details == {"field": "request"}
    assert_sound(server, context.name)


@pytest.mark.parametrize("method", METHODS)
def test_no_message_at_all_is_refused_and_not_waited_for(server, context, method):
    call = raw_call(server, method, streaming=True)
    status, reason, _ = refusal(lambda: call(iter(()), timeout=10))
    assert (status, reason) == (Code.INVALID_ARGUMENT, "ARGUMENT_INVALID")
    assert_sound(server, context.name)


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_any_time_ends_at_once(server, context, method):
    """Its request is on the way still: gRPC may answer one that is there, deadline or not."""
    over = threading.Event()
    call = raw_call(server, method, streaming=True)
    for timeout in (0, -1, 1e-9):
        error = error_of(lambda t=timeout: call(never(over), timeout=t))
        assert error.code() == Code.DEADLINE_EXCEEDED
    over.set()
    assert_sound(server, context.name)


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_never_comes_is_waited_for_no_longer_than_the_deadline(
    server, context, method, monkeypatch
):
    short = {f"{kind}_deadline_s": SERVER_DEADLINE_S for kind in ("ask", "call", "ingest")}
    service, over = server.app.service, threading.Event()
    monkeypatch.setattr(service, "_limits", replace(service._limits, **short))
    started = time.monotonic()
    call = raw_call(server, method, streaming=True)
    status, reason, details = refusal(lambda: call(never(over)))
    took_s = time.monotonic() - started
    over.set()
    assert (status, reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED")
    assert details == {"limit_s": str(SERVER_DEADLINE_S)}
    assert SERVER_DEADLINE_S <= took_s < SERVER_DEADLINE_S + LATE_S
    assert_sound(server, context.name)


def test_a_request_whose_stream_is_never_closed_is_answered(server, context):
    over = threading.Event()

    def open_ended() -> Iterator[bytes]:
        yield pb.AskRequest(context=context.name, question="who", max_tokens=1).SerializeToString()
        over.wait(10)

    answer = raw_call(server, "Ask", streaming=True)(open_ended(), timeout=10)
    over.set()
    assert text_of(map(pb.AskResponse.FromString, answer)) == "who-0 "
    assert_sound(server, context.name)


def test_a_client_of_a_byte_now_and_then_is_ended_and_holds_up_nobody(make_server):
    server = make_server(ingest_deadline_s=1.0, uploads_max=1)
    context, over = active(server), threading.Event()

    def dribble() -> Iterator[pb.IngestContextRequest]:
        yield pb.IngestContextRequest(metadata=pb.IngestContextRequest.Metadata())
        while not over.wait(0.1):
            yield pb.IngestContextRequest(chunk=b"x")

    slow = server.stub.IngestContext.future(dribble())
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert refusal(slow.result)[1] == "DEADLINE_PASSED"
    over.set()
    assert active(server, b"its place in line is free").token_count == 25
    assert_sound(server, context.name)


def test_connections_that_say_a_byte_now_and_then_hold_up_nobody(server, context):
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    host, _, port = server.address.rpartition(":")
    slow = [socket.create_connection((host, int(port)), timeout=5) for _ in range(60)]
    try:
        for place in range(len(start)):
            for one in slow:
                one.send(start[place : place + 1])
            assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
        for one in slow[:30]:
            one.send(random.Random(1).randbytes(512))
    finally:
        for one in slow:
            one.close()
    assert_sound(server, context.name)


def listed(server: RunningServer) -> list[pb.Context]:
    return list(server.stub.ListContexts(pb.ListContextsRequest()).contexts)


def chunk(content: bytes) -> pb.IngestContextRequest:
    return pb.IngestContextRequest(chunk=content)


def metadata(**fields: object) -> pb.IngestContextRequest:
    return pb.IngestContextRequest(metadata=pb.IngestContextRequest.Metadata(**fields))


IN_ORDER = sha256(b"first second").digest()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([metadata(sha256=IN_ORDER), chunk(b" second"), chunk(b"first")], "DIGEST_MISMATCH"),
        ([metadata(sha256=IN_ORDER), chunk(b"first")], "DIGEST_MISMATCH"),
        ([metadata(sha256=IN_ORDER), chunk(b"first second"), chunk(b".")], "DIGEST_MISMATCH"),
        ([metadata(sha256=IN_ORDER)], "DIGEST_MISMATCH"),
        ([metadata(sha256=bytes(31)), chunk(b"x")], "ARGUMENT_INVALID"),
        ([chunk(b"first"), metadata()], "ARGUMENT_INVALID"),
        ([metadata(), chunk(b"first"), metadata(), chunk(b" second")], "ARGUMENT_INVALID"),
        ([metadata(), chunk(b"first"), pb.IngestContextRequest()], "ARGUMENT_INVALID"),
        ([pb.IngestContextRequest()], "ARGUMENT_INVALID"),
    ],
)
def test_chunks_out_of_order_or_of_another_document_are_refused(server, context, messages, reason):
    status, found, _ = refusal(lambda: server.stub.IngestContext(iter(messages), timeout=10))
    assert (status, found) == (Code.INVALID_ARGUMENT, reason)
    assert_sound(server, context.name)
    assert [c.name for c in listed(server)] == [context.name]


def test_an_upload_with_an_oversized_message_midway_is_no_shorter_document(server, context):
    """Grpc ends the stream there as it would at its real end."""
    for number in range(5):
        whole = [m.SerializeToString() for m in upload(b"document %d" % number)]
        huge = chunk(bytes(MESSAGE_BYTES_MAX + 1)).SerializeToString()
        call = raw_call(server, "IngestContext")
        error = error_of(lambda c=call, m=(*whole, huge): c(iter(m), timeout=10))
        assert error.code() == Code.RESOURCE_EXHAUSTED
    assert_sound(server, context.name)
    assert [c.name for c in listed(server)] == [context.name]


@pytest.mark.parametrize("document", [b"", b" ", b"\n" * 1000, b" " * 1000, b"\t" * 1000])
def test_case_b54_a_document_without_text_fails_by_name(server, context, document):
    failed = settle(server, ingest(server, document).name)
    assert (failed.state, failed.error.reason) == (pb.CONTEXT_STATE_FAILED, "DOCUMENT_EMPTY")
    assert refusal(lambda: ask(server, failed.name))[:2] == (
        Code.INVALID_ARGUMENT, "DOCUMENT_EMPTY",
    )  # fmt: skip
    server.stub.DeleteContext(pb.DeleteContextRequest(name=failed.name))
    assert_sound(server, context.name)


NUMBERS = {  # of AskRequest, on the wire: what no generated class would let a caller say
    "max_tokens 2^31": (b"\x20\x80\x80\x80\x80\x08", "max_tokens"),
    "max_tokens 2^64 - 1": (b"\x20" + b"\xff" * 9 + b"\x01", "max_tokens"),
    "max_tokens 0": (b"\x20\x00", "max_tokens"),
    "plan 2^31 - 1": (b"\x78\xff\xff\xff\xff\x07", "plan"),
    "seed 2^64 - 1": (b"\x38" + b"\xff" * 9 + b"\x01", "seed"),
    "temperature NaN": (b"\x29\x00\x00\x00\x00\x00\x00\xf8\x7f", "temperature"),
    "temperature -1": (b"\x29\x00\x00\x00\x00\x00\x00\xf0\xbf", "temperature"),
    "top_p -0.0": (b"\x31\x00\x00\x00\x00\x00\x00\x00\x80", "top_p"),
    "keys 0": (b"\x4a\x04\x12\x02\x08\x00", "budget.keys.count"),
    "an empty stop": (b"\x42\x00", "stop"),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_case_b54_a_number_out_of_range_on_the_wire_is_refused_by_name(server, context, number):
    least = pb.AskRequest(context=context.name, question="who").SerializeToString()
    extra, field = NUMBERS[number]
    status, reason, details = refusal(lambda: raw_call(server, "Ask")(least + extra, timeout=10))
    assert (status, reason) == (Code.INVALID_ARGUMENT, "ARGUMENT_INVALID")
    assert details == {"field": field}
    assert_sound(server, context.name)


def test_the_name_of_a_context_that_is_not_there_is_no_better_with_a_bad_ask(server, context):
    """A refusal must not depend on whether the context is there: that would tell who has it."""
    for name in (context.name, UNKNOWN):
        assert refusal(lambda n=name: ask(server, n, max_tokens=-1))[2] == {"field": "max_tokens"}
    assert_sound(server, context.name)
