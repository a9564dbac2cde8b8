"""What the command line prints: progress, tables, and errors of one line.

Knows: terminals. Does not know: the service. Answers and tables go to stdout; progress, receipts
and errors go to stderr, so that the output of a verb can be piped.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import NoReturn, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from openbook.client.errors import OpenbookError, Unavailable
from openbook.client.views import ContextInfo, IngestProgress

EXIT_FAILED = 1  # the service refused or failed
EXIT_USAGE = 2  # the command was wrong, or something that it needs is missing


def fail(message: str, code: int) -> NoReturn:
    """Print one line on stderr and end the command with `code`."""
    print("openbook:", " ".join(printable(message).split()), file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def one_line_errors(server: str = "") -> Iterator[None]:
    """End the command with one line for what the caller or the service did wrong."""
    try:
        yield
    except Unavailable as error:
        if error.reason:
            fail(error.message, EXIT_FAILED)
        hint = "start one with `openbook serve`, or name another with --server"
        fail(f"no server answers at {server}; {hint}", EXIT_FAILED)
    except OpenbookError as error:
        fail(error.message, EXIT_FAILED)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    except BrokenPipeError:
        raise  # whoever read our output has left; typer ends quietly
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}", EXIT_USAGE)


def printable(text: str) -> str:
    """Return `text` without control characters, which a terminal would obey; \\n and \\t stay."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


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
            layers = f" {progress.layers_done}/{progress.layers} layers" if progress.layers else ""
            console.print(f"{progress.stage}{layers}", highlight=False)

    return update


def print_contexts(contexts: Iterable[ContextInfo], console: Console) -> None:
    """Print a table of contexts; tab-separated lines where stdout is not a terminal."""
    header = ("id", "name", "state", "tokens", "on disk", "created")
    rows = [
        (
            info.id,
            printable(info.display_name).replace("\n", " ").replace("\t", " "),
            info.state,
            str(info.token_count),
            size(info.bytes_on_disk),
            moment(info.created),
        )
        for info in contexts
    ]
    if not console.is_terminal:
        for row in (header, *rows):
            console.file.write("\t".join(row) + "\n")
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


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
