"""What the event loop has threads do for it, and what becomes of it when a caller leaves.

A thread cannot be cancelled: what it makes is there in the end, wanted or not. Owns that nothing
is left over then. It knows nothing of what is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from openbook.server.errors import CallsFull, EngineStopped

P = ParamSpec("P")
R = TypeVar("R")


class Pool:
    """Threads of its own for one kind of call, so that no other kind waits for them.

    A call whose caller has gone holds its thread to its end; until then it counts as waiting.
    """

    def __init__(self, threads: int, *, waiting_max: int, what: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pool")
        self._waiting_max = waiting_max
        self._what = what
        self._waiting = 0

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in one of them. Raises CallsFull, and EngineStopped for a SystemExit."""
        if self._waiting >= self._waiting_max:
            raise CallsFull(self._waiting_max, self._what)
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(_unstoppable, function, *args, **kwargs)
        )
        self._waiting += 1
        running.add_done_callback(self._done)
        return await asyncio.shield(running)

    def close(self) -> None:
        """Begin no more calls; one that runs goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, running: asyncio.Future[R]) -> None:
        self._waiting -= 1
        if not running.cancelled():
            running.exception()  # seen: its caller may have gone


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run the engine's function in a thread. Raises EngineStopped for a SystemExit."""
    return await asyncio.to_thread(partial(_unstoppable, function, *args, **kwargs))


def _unstoppable(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of which a SystemExit must not end the event loop."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise EngineStopped() from error


async def made(making: asyncio.Task[R], *, undo: Callable[[R], None]) -> R:
    """Wait for what a task makes; when the caller is cancelled meanwhile, have it undone.

    `undo` is called on the event loop once the thing is there, and must not block.
    """

    def undo_made(task: asyncio.Task[R]) -> None:
        if not task.cancelled() and task.exception() is None:
            undo(task.result())

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(undo_made)
        raise
