"""Answers stream side by side, end when their readers leave, and are bounded in number."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.server import service
from openbook.server.decode_worker import AnswerStream
from openbook.server.errors import ReaderStalled
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs
from openbook.worker import Delta, Failed

from .running import DOCUMENT, active, ask, refusal, text_of, until


def test_case_b40_a_cancelled_answer_leaves_its_neighbour_alone(server):
    context = active(server)
    server.engine.gate.clear()
    doomed, other = ask(server, context.name, "doomed"), ask(server, context.name, max_tokens=5)
    until(lambda: len(server.engine.asks) == 2)
    doomed.cancel()
    until(lambda: any(a.is_cancelled for a in server.engine.asks))
    server.engine.gate.set()
    assert text_of(other) == "who-0 who-1 who-2 who-3 who-4 "
    cancelled = next(a for a in server.engine.asks if a.spec.question == "doomed")
    assert cancelled.tokens == 0
    until(lambda: server.app.decode.asks_running == 0)


def test_a_closed_channel_ends_the_answer(server):
    context = active(server)
    with grpc.insecure_channel(server.address) as channel:
        request = pb.AskRequest(context=context.name, question="who", max_tokens=2048)
        answer = iter(rpcs.ContextServiceStub(channel).Ask(request))
        next(answer)
    until(lambda: server.app.decode.asks_running == 0)
    until(lambda: server.engine.asks[0].is_cancelled)


def test_case_b42_asks_at_once_over_a_cold_context_load_it_once(server):
    context = active(server)
    server.engine.open_gate.clear()
    answers = [ask(server, context.name, f"q{i}", max_tokens=2) for i in range(8)]
    until(lambda: server.app.decode.asks_running == 8)
    server.engine.open_gate.set()
    for i, answer in enumerate(answers):
        assert text_of(answer) == f"q{i}-0 q{i}-1 "
    assert server.engine.loads == 1


def test_asks_over_the_limit_are_refused_at_once_and_the_others_answered(make_server):
    server = make_server(sequences_max=1, asks_waiting_max=1)
    context = active(server)
    server.engine.gate.clear()
    answers = [ask(server, context.name, max_tokens=1) for _ in range(2)]
    until(lambda: server.app.decode.asks_running == 2)
    status, reason, _ = refusal(lambda: ask(server, context.name))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ASKS_FULL")
    server.engine.gate.set()
    assert [text_of(answer) for answer in answers] == ["who-0 ", "who-0 "]


def test_case_b43_contexts_in_use_over_the_memory_are_refused_and_idle_ones_make_room(make_server):
    server = make_server(opened_bytes_max=1)
    first, second = active(server, b"one"), active(server, b"two")
    for _ in range(5):  # round robin: each makes room for the other
        for context in (first, second):
            assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    server.engine.gate.clear()
    answer = ask(server, first.name, max_tokens=1)
    until(lambda: len(server.engine.asks) == 11)
    status, reason, _ = refusal(lambda: ask(server, second.name))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OPENED_FULL")
    server.engine.gate.set()
    assert text_of(answer) == "who-0 "


def test_a_failing_engine_ends_every_answer_and_health_says_so(server):
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name)
    until(lambda: server.engine.asks)
    server.engine.crash = MemoryError("about " + DOCUMENT.decode())
    assert refusal(lambda: answer)[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")
    assert refusal(lambda: ask(server, context.name))[1] == "ENGINE_STOPPED"
    health = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest(service="openbook.v1.ContextService")
    until(lambda: health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING)


def test_an_engine_that_dies_while_a_context_is_opened_ends_the_answer(server):
    context = active(server)
    server.engine.open_gate.clear()
    answer = ask(server, context.name)
    until(lambda: server.app.decode.asks_running == 1)
    server.engine.crash = MemoryError()
    until(lambda: not server.app.decode.is_alive())
    server.engine.open_gate.set()
    assert refusal(lambda: answer)[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
    ],
)
def test_case_b54_a_value_that_the_engine_refuses_is_refused_by_name(server, fields, named):
    context = active(server)
    status, reason, details = refusal(lambda: ask(server, context.name, **fields))
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ARGUMENT_INVALID")
    assert details == {"field": named}


@pytest.mark.parametrize("question", ["explode now", "fail now"])
@pytest.mark.parametrize(
    "explosion", [RuntimeError, MemoryError, asyncio.CancelledError, SystemExit]
)
def test_case_b61_an_unexpected_error_is_answered_with_a_fixed_text(server, question, explosion):
    context = active(server)
    server.engine.explosion = explosion
    with pytest.raises(grpc.RpcError) as raised:
        list(ask(server, context.name, question))
    assert raised.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert "now" not in raised.value.details()
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


def test_pieces_that_wait_go_out_as_one_message_before_the_end():
    async def run():
        stream = AnswerStream(asyncio.get_running_loop())
        for event in (Delta("a"), Delta("b"), Failed(ValueError("x"))):
            stream.push(event)
        await asyncio.sleep(0.01)
        assert await stream.next() == "ab"
        with pytest.raises(ValueError):
            await stream.next()

    asyncio.run(run())


def test_pieces_that_wait_never_outgrow_a_message():
    async def run():
        stream = AnswerStream(asyncio.get_running_loop())
        for _ in range(32_768):  # the longest answer that may be asked for
            stream.push(Delta("\u00e9" * 50))
        await asyncio.sleep(0.5)
        stream.fail(ValueError("x"))
        pieces = []
        with pytest.raises(ValueError):
            while True:
                pieces.append(await stream.next())
        assert "".join(pieces) == "\u00e9" * 50 * 32_768
        assert max(len(piece.encode()) for piece in pieces) <= 1 << 20

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_given_up():
    class Stalled:
        async def write(self, _message):
            await asyncio.sleep(60)

    with pytest.raises(ReaderStalled):
        asyncio.run(service._write(Stalled(), "text", stall_s=0.05))


def test_an_ask_is_counted_from_its_arrival_and_not_from_when_its_context_is_open(server):
    context = active(server)
    server.engine.open_gate.clear()
    before = time.monotonic()
    answer = ask(server, context.name, max_tokens=1)
    until(lambda: server.app.decode.asks_running == 1)
    waiting = time.monotonic()
    server.engine.open_gate.set()
    assert text_of(answer) == "who-0 "
    assert before <= server.engine.asks[0].asked_at <= waiting
