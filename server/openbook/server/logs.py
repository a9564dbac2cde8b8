"""What the server writes about itself: JSON lines of ids, sizes and durations on stderr.

Owns the format, and the promise that no text of a user gets into a log: what other libraries say
is reduced to who said it and which exception class it was, because their words may quote input.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TextIO, cast

import structlog

LINES_WAITING_MAX = 10_000  # some megabytes
DRAIN_S = 1.0


class Log(Protocol):
    """Where events go; every keyword is an id, a size or a duration."""

    def info(self, event: str, /, **fields: object) -> object:
        """Write one event of ordinary work."""

    def warning(self, event: str, /, **fields: object) -> object:
        """Write one event that a person may have to look at."""

    def error(self, event: str, /, **fields: object) -> object:
        """Write one event that is a fault of ours."""


def write_all(descriptor: int, content: bytes) -> None:
    """Write to a file descriptor. Raises OSError."""
    while content:
        content = content[os.write(descriptor, content) :]


def open_log(stream: TextIO | Lines) -> Log:
    """Return a log that writes JSON lines to `stream`."""
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, stream)),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
    )
    return log


def fault_fields(error: BaseException) -> dict[str, object]:
    """Return the class and the place of `error`, and nothing of its text."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "unknown"
    return {"error": type(error).__name__, "where": where}


class Lines:
    """A stream that takes lines and never fails or waits, whatever becomes of the one behind it.

    A reader that has gone, a full disk or a pipe that nobody empties must not stop the service.
    Lines that cannot be written are lost; how many waited too long for a place is told once there
    is one again.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """Write by `write`, in a thread of its own, where it may wait and raise OSError.

        It must hold no lock that the end of the process takes, as a buffered stream does.
        """
        self._write = write
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._lost = 0
        threading.Thread(target=self._write_all, name="log", daemon=True).start()
        atexit.register(self.drain)

    def write(self, text: str) -> int:
        """Take some text, or lose it where too much waits."""
        if self._waiting.qsize() >= LINES_WAITING_MAX:
            self._lost += 1
            return len(text)
        if self._lost:
            self._waiting.put(f'{{"event": "log_lines_lost", "count": {self._lost}}}\n')
            self._lost = 0
        self._waiting.put(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: whatever was taken is on its way."""

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until what was taken is written, or cannot be in that time."""
        reached = threading.Event()
        self._waiting.put(reached)
        reached.wait(timeout_s)

    def _write_all(self) -> None:
        while True:
            taken = self._waiting.get()
            if isinstance(taken, threading.Event):
                taken.set()
                continue
            with suppress(OSError):
                self._write(taken.encode())


class LibraryHandler(logging.Handler):
    """Reduce the records of other libraries to their origin."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write who spoke, where and with which exception class."""
        error = record.exc_info[1] if record.exc_info else None
        fields = fault_fields(error) if error is not None else {}
        self._log.warning(
            "library", logger=record.name, line=f"{record.filename}:{record.lineno}", **fields
        )


def capture_libraries(log: Log) -> None:
    """Send every library's warnings, and whatever no one caught, through `log`."""
    root = logging.getLogger()
    root.handlers[:] = [LibraryHandler(log)]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    for name in tuple(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if logger.handlers:  # some write to stderr by themselves
            logger.handlers.clear()
            logger.propagate = True

    def uncaught(
        _kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        log.error("uncaught", **fault_fields(error.with_traceback(trace)))

    def uncaught_in_thread(told: threading.ExceptHookArgs) -> None:
        if told.exc_value is not None:
            log.error("uncaught_in_thread", **fault_fields(told.exc_value))

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
