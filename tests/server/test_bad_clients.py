"""Clients that leave, that wait for ever, that are too many, or that do not read.

    leave       a cancelled ask stops at once, and a hundred of them leave nothing
    wait        every method's work ends at the server's deadline though the client set none
                (test_bad_requests.py: so does the wait for a request)
    too many    what is over the capacity is refused quickly, and what is under it is answered
    read not    an answer that nobody reads costs little memory and is given up after a set time

The figures of a real process are in tests/system/test_bad_clients.py.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

from openbook.client.channel import KEEPALIVE_MS
from openbook.server import service, upkeep
from openbook.server.documents import Documents
from openbook.server.lives import Lives
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .bad_calls import assert_sound, naming, summary
from .running import Held, active, ask, ingest, refusal, text_of, until, upload

Code = grpc.StatusCode
DEADLINE_S, LATE_S = 0.4, 0.25
MIB = 1 << 20
HOLDS: dict[str, tuple[Any, str]] = {  # what each method has a thread do
    "UpdateContext": (Lives, "save"),
    "DeleteContext": (Documents, "remove"),
    "VerifyContext": (upkeep, "verify_context"),
    "ReindexContext": (upkeep, "reindex"),
    "CountTokens": (service, "count_tokens"),
}


def endless(server: Any, method: str, over: threading.Event) -> Callable[[], Any]:
    """Return a call, without a deadline, whose work does not end before `over`."""

    def forever() -> Iterator[pb.IngestContextRequest]:
        yield from upload(b"start")
        over.wait(10)

    call = getattr(server.stub, method)
    if method == "IngestContext":
        return lambda: call(forever())
    if method == "CountTokens":
        return lambda: call(pb.CountTokensRequest(document=b"x"))
    if method == "WatchContext":
        server.reading.gate.clear()
        request = naming(method, ingest(server, b"another").name)
    else:
        request = naming(method, active(server).name)
    if method == "Ask":
        server.engine.gate.clear()
    return lambda: call(request)


@pytest.mark.parametrize("method", ["IngestContext", "WatchContext", "Ask", *HOLDS])
def test_every_method_s_work_ends_at_the_server_s_deadline(server, method, monkeypatch):
    context, over = active(server, b"left alone"), threading.Event()
    call = endless(server, method, over)
    held = Held(monkeypatch, *HOLDS[method]) if method in HOLDS else None
    short = {f"{kind}_deadline_s": DEADLINE_S for kind in ("ask", "call", "ingest")}
    normal = server.app.service._limits
    server.app.service._limits = replace(normal, **short)
    started = time.monotonic()
    status, reason, details = refusal(call)
    took_s = time.monotonic() - started
    server.app.service._limits = normal
    over.set()
    for gate in (server.engine.gate, server.reading.gate, *([held.gate] if held else [])):
        gate.set()
    assert held is None or held.arrived.is_set()
    assert (status, reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED")
    assert details == {"limit_s": str(DEADLINE_S)}
    assert DEADLINE_S <= took_s < DEADLINE_S + LATE_S
    assert_sound(server, context.name)


def test_a_hundred_asks_that_are_cancelled_stop_within_200_ms_each(server):
    gc.freeze()  # a collection of all that the tests have imported takes 400 ms
    context, stopped_ms = active(server), []
    for number in range(100):
        answer = ask(server, context.name, max_tokens=2048)
        next(iter(answer))
        cancelled_at = time.monotonic()
        answer.cancel()
        until(lambda n=number: server.engine.asks[n].is_cancelled)
        stopped_ms.append((time.monotonic() - cancelled_at) * 1e3)
    assert max(stopped_ms) <= 200, summary(stopped_ms)
    assert_sound(server, context.name)


def test_asks_far_over_the_capacity_are_refused_quickly_and_the_others_answered(make_server):
    """Eight times as many as run and wait; the callers share a process with the server."""
    server = make_server(asks_per_caller_max=4352, calls_per_caller_max=8192)
    context, settings = active(server), server.settings
    capacity = settings.sequences_max + settings.asks_waiting_max
    server.engine.gate.clear()
    admitted = [ask(server, context.name, max_tokens=1) for _ in range(capacity)]
    until(lambda: server.app.decode.asks_running == capacity)
    ends: list[tuple[float, Code]] = []

    def over() -> None:
        for _ in range(7 * capacity // 8):
            started = time.monotonic()
            status, reason, _ = refusal(lambda: ask(server, context.name))
            assert reason == "ASKS_FULL"
            ends.append(((time.monotonic() - started) * 1e3, status))

    callers = [threading.Thread(target=over) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    server.engine.gate.set()
    assert [text_of(answer) for answer in admitted] == ["who-0 "] * capacity
    assert len(ends) == 7 * capacity and {status for _, status in ends} == {Code.RESOURCE_EXHAUSTED}
    median_ms, worst_ms = summary([ms for ms, _ in ends])
    assert median_ms <= 50 and worst_ms <= 1000, (median_ms, worst_ms)
    assert_sound(server, context.name)


def running_tasks(server: Any) -> int:
    return int(server.call(lambda: len(asyncio.all_tasks())))


def test_an_answer_that_nobody_reads_is_given_up_and_costs_little(server, monkeypatch):
    """Eight callers open an answer of 256 KiB and read nothing of it."""
    monkeypatch.setattr(service, "STALL_S", 0.5)
    context, process, word = active(server), psutil.Process(), "x" * 120
    list(ask(server, context.name, word, max_tokens=2048))  # what is allocated once, is
    tasks, before = running_tasks(server), process.memory_info().rss
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(server.address, options=options) for _ in range(8)]
    request = pb.AskRequest(context=context.name, question=word, max_tokens=2048)
    answers = [rpcs.ContextServiceStub(each).Ask(request, timeout=60) for each in channels]
    until(lambda: server.log.events[-1][2].get("status") == "READER_STALLED")
    until(lambda: server.app.decode.asks_running == 0)
    grown = process.memory_info().rss - before
    assert grown <= 8 * 8 * MIB, grown
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    for answer in answers:
        status, reason, _ = refusal(lambda a=answer: a)
        assert (status, reason) == (Code.RESOURCE_EXHAUSTED, "READER_STALLED")
    for channel in channels:
        channel.close()
    until(lambda: running_tasks(server) <= tasks)
    assert_sound(server, context.name)


def test_an_answer_that_is_given_up_at_its_first_word_ends(server, monkeypatch):
    """Its caller is told so; a write that is given up has sent what a call begins with, or not."""
    context = active(server)
    monkeypatch.setattr(service, "STALL_S", 0.0)
    status, reason, _ = refusal(lambda: ask(server, context.name, max_tokens=8))
    assert (status, reason) == (Code.RESOURCE_EXHAUSTED, "READER_STALLED")
    monkeypatch.undo()
    assert_sound(server, context.name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_case_b60_two_minutes_of_silence_end_no_call_of_a_client_that_pings(make_server):
    """A reading and a first token that are long in coming, pinged as our own client does."""
    server = make_server(ask_deadline_s=200.0)
    context, over = active(server), time.monotonic() + 120
    server.engine.gate.clear()
    server.reading.gate.clear()
    options = [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(server.address, options=options) as channel:
        stub = rpcs.ContextServiceStub(channel)
        name = ingest(server, b"another").name
        watching = stub.WatchContext(pb.WatchContextRequest(name=name), timeout=200)
        answer = stub.Ask(naming("Ask", context.name), timeout=200)
        until(lambda: time.monotonic() > over, seconds=150)
        server.engine.gate.set()
        server.reading.gate.set()
        assert text_of(answer).startswith("who-0 ")
        *_, last = watching
    assert last.context.state == pb.CONTEXT_STATE_ACTIVE
