"""What the server writes about itself: JSON lines of ids, sizes and durations on stderr.

Owns the format, and the promise that no text of a user gets into a log: what other libraries say
is reduced to who said it and which exception class it was, because their words may quote input.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import Protocol, TextIO

import structlog


class Log(Protocol):
    """Where events go; every keyword is an id, a size or a duration."""

    def info(self, event: str, /, **fields: object) -> object:
        """Write one event of ordinary work."""

    def warning(self, event: str, /, **fields: object) -> object:
        """Write one event that a person may have to look at."""

    def error(self, event: str, /, **fields: object) -> object:
        """Write one event that is a fault of ours."""


def open_log(stream: TextIO) -> Log:
    """Return a log that writes JSON lines to `stream`."""
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(stream),
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
