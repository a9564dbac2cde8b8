"""What the command line prints: progress, tables, and errors of one line.

Knows: terminals. Does not know: the service. Answers and tables go to stdout; progress, receipts
and errors go to stderr, so that the output of a verb can be piped.
"""

import codecs
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import NoReturn, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from openbook.client.cli_options import where_nobody_answers
from openbook.client.errors import OpenbookError, Unavailable
from openbook.client.interrupts import EXIT_INTERRUPTED, is_interrupted
from openbook.client.views import ContextInfo, IngestProgress

EXIT_FAILED = 1  # the service refused or failed
EXIT_USAGE = 2  # the command was wrong, or something that it needs is missing
TICK_S = 10  # between the signs of life that are printed where there is no terminal


def fail(message: str, code: int) -> NoReturn:
    """Print one line on stderr and end the command with `code`."""
    with suppress(OSError):  # where stderr is full, the code still tells
        print("openbook:", " ".join(printable(message).split()), file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def one_line_errors(
    server: str = "", *, interrupted: Callable[[], str] = lambda: "interrupted"
) -> Iterator[None]:
    """End the command with one line for what the caller or the service did wrong.

    `interrupted` says what is to be said after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail(interrupted(), EXIT_INTERRUPTED)
    except Exception as error:
        if is_interrupted():  # whatever failed, it failed because the client was closed
            fail(interrupted(), EXIT_INTERRUPTED)
        _fail_for(error, server)
        raise


def _fail_for(error: Exception, server: str) -> None:
    """End the command for an error that is the caller's or the service's; return for others."""
    if isinstance(error, Unavailable) and not error.reason:
        advice = where_nobody_answers(server, is_tls=bool(os.environ.get("OPENBOOK_TLS_CA")))
        fail(f"no server answers at {server}; {advice}", EXIT_FAILED)
    if isinstance(error, OpenbookError):
        fail(error.message, EXIT_FAILED)
    if isinstance(error, ValueError):
        fail(str(error), EXIT_USAGE)
    # A BrokenPipeError says that whoever read our output has left; typer ends quietly.
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        where = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}", EXIT_USAGE)


def printable(text: str) -> str:
    """Return `text` without control characters, which a terminal would obey; \\n and \\t stay."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def one_line_json(value: object) -> str:
    """Return JSON for stdout: characters beyond ASCII as they are only where it can hold all."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    return json.dumps(value, default=str, ensure_ascii=not is_utf8)


def write_pieces(pieces: Iterable[str], out: TextIO) -> None:
    """Write an answer as it arrives, and end it with a line break."""
    is_terminal = out.isatty()
    last = ""
    for piece in pieces:
        out.write(printable(piece) if is_terminal else piece)
        out.flush()
        last = piece
    if not last.endswith("\n"):
        out.write("\n")
    out.flush()


@contextmanager
def ingest_progress(console: Console) -> Iterator[Callable[[IngestProgress], None]]:
    """Show an ingest: a bar on a terminal, else a line per stage and per tenth of the layers."""
    if not console.is_terminal:
        yield _line_printer(console)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers"),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("sending", total=None)

        def update(progress: IngestProgress) -> None:
            bar.update(
                task,
                description=progress.stage,
                total=progress.layers or None,
                completed=progress.layers_done,
            )

        yield update


def _line_printer(console: Console) -> Callable[[IngestProgress], None]:
    """Return what prints a line when the stage changes or another tenth of the layers is done."""
    printed: tuple[str, int] | None = None

    def update(progress: IngestProgress) -> None:
        nonlocal printed
        tenths = 10 * progress.layers_done // progress.layers if progress.layers else 0
        if printed != (progress.stage, tenths):
            printed = (progress.stage, tenths)
            console.print(str(progress), highlight=False)

    return update


@contextmanager
def elapsed(what: str, console: Console) -> Iterator[None]:
    """Show `what` and the seconds it takes: counting on a terminal, else a line each TICK_S."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task(what, total=None)
            yield
        return
    is_over = threading.Event()

    def tell() -> None:
        passed_s = 0
        while not is_over.wait(TICK_S):
            passed_s += TICK_S
            console.print(f"  {passed_s} s", highlight=False)

    console.print(f"{what} ...", highlight=False)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def print_contexts(contexts: Iterable[ContextInfo], console: Console, *, now: datetime) -> None:
    """Print a table of contexts, for people on a terminal, else lines of fields between tabs.

    The lines are for programs: a header, bytes as a number, times in UTC as ISO 8601.
    """
    if not console.is_terminal:
        header = ("id", "layout", "state", "tokens", "bytes", "created", "expires", "name")
        for row in (header, *map(_tab_fields, contexts)):
            console.file.write("\t".join(row) + "\n")
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("id", "layout", "state"):
        table.add_column(name, no_wrap=True)  # the id is copied: whole, however narrow the terminal
    contexts = list(contexts)
    is_any_mortal = any(info.expires is not None for info in contexts)
    for name in ("tokens", "disk", "age", *(["left"] if is_any_mortal else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("name", overflow="fold")  # what gives way
    for info in contexts:
        row = (info.id, info.layout or "", info.state, str(info.token_count))
        row += (size(info.bytes_on_disk), age(info.created, now))
        if is_any_mortal:  # else the column would take the names' room for nothing
            row += (age(now, info.expires) if info.expires else "",)
        table.add_row(*map(Text, (*row, _one_line(info.display_name))))
    console.print(table)


def _tab_fields(info: ContextInfo) -> tuple[str, ...]:
    """Return a context's fields in the order of the header."""
    created, expires = (
        when.astimezone(UTC).isoformat(timespec="seconds") if when else ""
        for when in (info.created, info.expires)
    )
    measured = (str(info.token_count), str(info.bytes_on_disk))
    name = _one_line(info.display_name)
    return (info.id, info.layout or "", info.state, *measured, created, expires, name)


def _one_line(text: str) -> str:
    """Return printable text without the characters that part fields and lines."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def print_fields(fields: Mapping[str, object], console: Console) -> None:
    """Print names and values, one a line; floats with four digits."""
    width = max(map(len, fields))
    for name, value in fields.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        console.file.write(f"{name:<{width}}  {printable(shown)}\n")


def size(count: int) -> str:
    """Return bytes in a unit that a person reads."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def moment(when: datetime | None) -> str:
    """Return a time in the local zone to the minute, or "" for none."""
    return when.astimezone().strftime("%Y-%m-%d %H:%M") if when is not None else ""


def age(since: datetime | None, now: datetime) -> str:
    """Return how long ago `since` was, in its largest whole unit, or "" for None."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))  # the server's clock may be ahead
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
