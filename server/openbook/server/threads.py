"""What the event loop has threads do for it, and what becomes of it when a caller leaves.

A thread cannot be cancelled: what it makes is there in the end, wanted or not. Owns that nothing
is left over then. It knows nothing of what is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from openbook.server.errors import EngineStopped

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run the engine's function in a thread; a SystemExit in it must not end the event loop."""

    def call() -> R:
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            raise EngineStopped() from error

    return await asyncio.to_thread(call)


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
