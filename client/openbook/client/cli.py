"""The way in and out of the `openbook` command: streams, Ctrl-C and exit codes, whatever the verb.

Knows: standard streams and signals. Does not know: the verbs, which it imports when all is ready
for what may come: the import takes most of a second.
"""

import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import TextIO

from openbook.client.interrupts import EXIT_INTERRUPTED

EXIT_READER_LEFT = 1  # as typer has it
EXIT_OUTPUT = 2  # it cannot be written
STREAMS = {1: "standard output", 2: "standard error"}
LOST = ("strict", "surrogateescape")  # how Python's streams fail at what they cannot encode


class Output(io.FileIO):
    """A standard stream whose errors say so: `filename` is one of STREAMS."""

    def __init__(self, number: int, stream: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._stream = stream

    def write(self, data, /):  # type: ignore[no-untyped-def]  # bytes, of any kind
        """Write some bytes; OSError names the stream."""
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STREAMS[self._stream]) from None


def main() -> None:
    """Run the command line; the console script `openbook`. Ends with SystemExit."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before the import: its lines are not ours
    open_streams()
    try:
        code = _run()
        if code == 0:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        _tell("interrupted")
    except OSError as error:
        if error.filename not in STREAMS.values():
            raise
        code = EXIT_OUTPUT
        if isinstance(error, BrokenPipeError):
            code = EXIT_READER_LEFT
        else:
            _tell(f"{error.strerror}: {error.filename}")
    _forget_output()
    sys.exit(code)


def open_streams() -> None:
    """Make the standard streams safe to use: open ones, which can hold every character.

    One that the caller has closed is held by a file that fails (stdout) or swallows (stderr), as
    the next file opened, a socket say, would else take its number; sys.stdin stays None.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        closed = Output(os.open(os.devnull, os.O_RDONLY), 1)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(closed), encoding="utf-8")
    else:
        sys.stdout = _named(sys.stdout, 1)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    else:
        sys.stderr = _named(sys.stderr, 2)


def _named(stream: TextIO, number: int) -> TextIO:
    """Return a standard stream as one that names itself in errors and loses no character."""
    if not isinstance(stream, io.TextIOWrapper):  # somebody has put another in its place
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(Output(stream.fileno(), number)),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors in LOST else stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


def _run() -> int:
    """Run the verb that the arguments name, and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)  # an exception in an import may be lost there
        from openbook.client.cli_verbs import app

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from openbook.client.cli_verbs import app
    try:
        app(prog_name="openbook")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing is under way but imports."""
    _tell("interrupted")
    os._exit(EXIT_INTERRUPTED)


def _tell(what: str) -> None:
    """Print one line on stderr, where that can be written."""
    with suppress(OSError):
        print(f"openbook: {what}", file=sys.stderr, flush=True)


def _forget_output() -> None:
    """Drop output that cannot be written: Python would try again at its end, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
