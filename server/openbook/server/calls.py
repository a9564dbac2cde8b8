"""What every call of the interface has in common: a deadline, its errors, one line in the log.

Owns the decorator `served`. It knows nothing of what a method does. An exception that left a
handler would reach the caller with its text, so none does.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import grpc

from openbook.server.callers import Callers
from openbook.server.errors import DeadlinePassed, WireError, describe, is_fault
from openbook.server.gate import Gate
from openbook.server.logs import Log, fault_fields
from openbook.server.requests import received

NOT_WAITED_FOR = ("WatchContext",)  # only looks on; its caller looks again after a restart

Rpc = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class HasCalls(Protocol):
    """What a servicer offers to its calls."""

    log: Log
    gate: Gate
    callers: Callers
    running: int  # calls under way that a stop waits for

    def deadline_s(self, method: str) -> float:
        """Return how long a method may take, whatever its caller says."""


Self = TypeVar("Self", bound=HasCalls)
Handler = Callable[[Self, Any, Rpc], Awaitable[Answer]]


def served(handler: Handler[Self, Answer]) -> Handler[Self, Answer]:
    """Give a handler its deadline, turn its errors into statuses, and log how it ended."""

    @functools.wraps(handler)
    async def call(self: Self, request: Any, rpc: Rpc) -> Answer:
        method = handler.__name__
        started = time.monotonic()
        status = "CANCELLED"
        try:
            with self.callers.calling(caller_of(self, rpc), method):
                answer = await _in_time(self, handler, request, rpc)
            status = "OK"
            return answer
        except BaseException as error:
            if _is_cancelled(error):
                raise  # the caller is gone or its deadline passed: grpc must know that we stopped
            wire = describe(error)
            status = wire.reason
            if is_fault(error):
                self.log.error("call_failed", method=method, **fault_fields(error))
        finally:
            ms = round((time.monotonic() - started) * 1e3, 1)
            self.log.info("call", method=method, status=status, ms=ms)
        await abort(rpc, wire)
        raise AssertionError("abort always raises")

    return call


def caller_of(servicer: HasCalls, rpc: Rpc) -> str:
    """Return who calls. Raises Unauthenticated."""
    return servicer.gate.check(rpc.invocation_metadata(), peer=rpc.peer())


def _is_cancelled(error: BaseException) -> bool:
    """Tell whether this call was cancelled; a CancelledError of someone else's is a fault.

    Let out of a handler, one that nobody asked for leaves its caller waiting for ever.
    """
    task = asyncio.current_task()
    is_asked_for = task is not None and task.cancelling() > 0
    return isinstance(error, asyncio.CancelledError) and is_asked_for


async def abort(rpc: Rpc, wire: WireError) -> None:
    """End a call with an error; always raises grpc's own exception."""
    await rpc.abort(wire.code, wire.text, trailing_metadata=wire.metadata())


@contextmanager
def _running(servicer: HasCalls, method: str) -> Iterator[None]:
    """Count a call that a stop waits for: one whose request has come."""
    weight = 0 if method in NOT_WAITED_FOR else 1
    servicer.running += weight
    try:
        yield
    finally:
        servicer.running -= weight


async def _in_time(
    servicer: Self, handler: Handler[Self, Answer], request: Any, rpc: Rpc
) -> Answer:
    """Run a handler under the server's deadline; at the caller's, if sooner, grpc cancels it."""
    limit_s = servicer.deadline_s(handler.__name__)
    try:
        async with asyncio.timeout(limit_s) as deadline:
            whole = await received(request)
            with _running(servicer, handler.__name__):
                return await handler(servicer, whole, rpc)
    except TimeoutError as error:
        if deadline.expired():
            raise DeadlinePassed(limit_s) from error
        raise
