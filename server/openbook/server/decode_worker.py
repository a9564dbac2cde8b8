"""The thread that answers, and the bridge from it to the event loop.

Owns the engine's thread, how many asks run or wait, and the stream of each answer. It knows
nothing of gRPC, and of tokens only what the engine says. The engine calls back on its thread; the
loop is told by call_soon_threadsafe, so neither ever waits for the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from openbook.server.errors import AsksFull, EngineStopped
from openbook.server.logs import Log, fault_fields
from openbook.server.opened import OpenedContexts
from openbook.server.threads import in_thread, made
from openbook.worker import (
    AnswerEvent,
    Ask,
    AskSpec,
    Delta,
    Engine,
    Failed,
    Finished,
    OpenedContext,
)

STOP_S = 30.0
EVENTS_MAX = 1024  # of so many tokens the text is far below what one message may hold


class AnswerStream:
    """What the engine has said and the reader has not taken yet.

    It holds one event a token and the end, so `answer_tokens_max` bounds it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[AnswerEvent] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def push(self, event: AnswerEvent) -> None:
        """Add an event; called on the engine's thread, returns at once."""
        try:
            self._loop.call_soon_threadsafe(self._take_in, event)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return

    def fail(self, error: Exception) -> None:
        """End the stream with an error; called on the loop's thread."""
        self._error = self._error or error
        self._arrived.set()

    async def next(self) -> str | Finished:
        """Return the text that has arrived as one string, else the end. Raises what failed."""
        while True:
            texts: list[str] = []
            while self._events and len(texts) < EVENTS_MAX:
                event = self._events[0]
                if isinstance(event, Delta):
                    texts.append(event.text)
                    self._events.popleft()
                elif texts:
                    break
                elif isinstance(event, Failed):
                    raise event.error
                else:
                    return event
            if texts:
                return "".join(texts)
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    def _take_in(self, event: AnswerEvent) -> None:
        self._events.append(event)
        self._arrived.set()


class DecodeWorker:
    """Runs an engine in a thread of its own and streams its answers."""

    def __init__(
        self,
        engine: Engine,
        opened: OpenedContexts,
        *,
        asks_max: int,
        log: Log,
    ) -> None:
        self._engine = engine
        self._opened = opened
        self._asks_max = asks_max
        self._log = log
        self._stopping = threading.Event()
        self._streams: set[AnswerStream] = set()
        self._admitted = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def asks_running(self) -> int:
        """How many asks run or wait now."""
        return self._admitted

    def is_alive(self) -> bool:
        """Tell whether the engine's thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the engine's thread; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread and close the contexts; asks still running fail."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, STOP_S)
        self._end_streams()
        self._opened.close()

    async def answer(
        self, spec: AskSpec, context_id: str, path: Path, *, size: int, asked_at: float
    ) -> AsyncGenerator[str | Finished, None]:
        """Yield the answer's text as it comes, then its end. Close it to cancel the ask.

        `asked_at` is when the ask arrived, in seconds of time.monotonic().
        Raises AsksFull, EngineStopped, the store's errors and the worker's.
        """
        if self._admitted >= self._asks_max:
            raise AsksFull(self._asks_max)
        self._check_alive()
        self._admitted += 1
        try:
            in_use = await self._opened.acquire(context_id, path, size=size)
            try:
                async with aclosing(self._stream(spec, in_use.claim, asked_at)) as pieces:
                    async for piece in pieces:
                        yield piece
            finally:
                self._opened.release(in_use)
        finally:
            self._admitted -= 1

    async def _stream(
        self, spec: AskSpec, claim: OpenedContext, asked_at: float
    ) -> AsyncGenerator[str | Finished, None]:
        stream = AnswerStream(asyncio.get_running_loop())
        submit = partial(self._engine.submit, spec, claim, stream.push, asked_at=asked_at)
        self._streams.add(stream)
        ask: Ask | None = None
        try:
            self._check_alive()  # it may have died while the context was opened
            # In a thread, because that tokenises the question.
            ask = await made(asyncio.create_task(in_thread(submit)), undo=_cancel)
            while True:
                piece = await stream.next()
                yield piece
                if isinstance(piece, Finished):
                    return
        finally:
            self._streams.discard(stream)
            if ask is not None:
                ask.cancel()  # of a finished ask: does nothing

    def _check_alive(self) -> None:
        if not self.is_alive():
            raise EngineStopped()

    def _run(self) -> None:
        try:
            self._engine.run(self._stopping)
        except BaseException as error:  # whatever it is, every caller must hear of it
            self._log.error("engine_failed", **fault_fields(error))
        if self._loop is not None and not self._stopping.is_set():
            self._loop.call_soon_threadsafe(self._end_streams)

    def _end_streams(self) -> None:
        for stream in self._streams:
            stream.fail(EngineStopped())


def _cancel(ask: Ask) -> None:
    ask.cancel()
