"""Calls that no client of ours makes, and the look at the server that follows each of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from openbook.v1 import contexts_pb2 as pb

from .running import RunningServer, ask, text_of, until

SERVICE = pb.DESCRIPTOR.services_by_name["ContextService"]
METHODS = {method.name: method for method in SERVICE.methods}
NAMED = {  # every method that takes a context's name, and the field that has it
    method.name: field
    for method in SERVICE.methods
    for field in ("name", "context")
    if field in method.input_type.fields_by_name
}


def request_of(method: str, **fields: Any) -> Any:
    """Return a request of a method."""
    return getattr(pb, METHODS[method].input_type.name)(**fields)


def naming(method: str, name: str) -> Any:
    """Return the least request of a method about a context."""
    fields = {NAMED[method]: name} | ({"question": "who"} if method == "Ask" else {})
    return request_of(method, **fields)


def raw_call(server: RunningServer, method: str, *, streaming: bool | None = None) -> Any:
    """Return a callable that sends bytes to a method and returns its answer as a list of bytes.

    `streaming` makes a call of many messages even of a method that takes one.
    """
    described = METHODS[method]
    sends = described.client_streaming if streaming is None else streaming
    kinds = {
        (False, False): server.channel.unary_unary,
        (False, True): server.channel.unary_stream,
        (True, False): server.channel.stream_unary,
        (True, True): server.channel.stream_stream,
    }
    call = kinds[sends, described.server_streaming](f"/{SERVICE.full_name}/{method}")

    def made(request: bytes | Iterator[bytes], **options: Any) -> list[bytes]:
        given = iter([request]) if sends and isinstance(request, bytes) else request
        answer = call(given, **options)
        return list(answer) if described.server_streaming else [answer]

    return made


def error_of(call: Callable[[], Any]) -> grpc.RpcError:
    """Return the error that a call ends with."""
    try:
        answer = call()
        list(answer) if hasattr(answer, "__iter__") else answer
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call was answered")


def assert_sound(server: RunningServer, name: str) -> None:
    """Nothing is left of what was tried: no file, no ask, no call; and a question is answered."""
    until(lambda: server.app.decode.asks_running == 0)
    until(lambda: server.app.service.running == 0)
    until(lambda: not list((server.data / "uploads").iterdir()))
    drafts = server.data / "contexts" / ".tmp"
    until(lambda: not drafts.exists() or not list(drafts.iterdir()))
    assert text_of(ask(server, name, max_tokens=1)) == "who-0 "
    assert "call_failed" not in server.log.names()


def timed_ms(call: Callable[[], Any]) -> float:
    """Return how many milliseconds a call takes."""
    started = time.monotonic()
    call()
    return (time.monotonic() - started) * 1e3


def summary(times_ms: list[float]) -> tuple[float, float]:
    """Return median and largest."""
    return statistics.median(times_ms), max(times_ms)
