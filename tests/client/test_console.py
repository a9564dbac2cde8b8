"""What is printed, on a terminal and off it."""

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from openbook.client import ContextInfo, IngestProgress
from openbook.client.console import (
    ingest_progress,
    print_contexts,
    printable,
    size,
    write_pieces,
)
from openbook.v1 import contexts_pb2 as pb


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_answer_cannot_command_a_terminal() -> None:
    out = Terminal()
    write_pieces(["red \x1b[31m", "bell\a\x9b1m\n"], out)
    assert out.getvalue() == "red [31mbell1m\n"


def test_answer_in_a_pipe_is_untouched() -> None:
    out = io.StringIO()
    write_pieces(["red \x1b[31m", "👨‍👩‍👧\r\n"], out)
    assert out.getvalue() == "red \x1b[31m👨‍👩‍👧\r\n"


def test_answer_ends_with_one_line_break() -> None:
    for pieces in (["light"], ["light\n"], ["light", "\n"]):
        out = io.StringIO()
        write_pieces(pieces, out)
        assert out.getvalue() == "light\n"


def test_printable_keeps_letters_of_every_script() -> None:
    assert printable("Ünïcode 読 👨‍👩‍👧\tא\n") == "Ünïcode 読 👨‍👩‍👧\tא\n"


def test_progress_off_a_terminal_is_a_line_per_tenth() -> None:
    out = io.StringIO()
    with ingest_progress(Console(file=out)) as show:
        show(IngestProgress("queued", 0, 0))
        for done in range(31):
            show(IngestProgress("reading", done, 30))
        show(IngestProgress("done", 30, 30))
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["queued", "reading 0/30 layers", "reading 3/30 layers"]
    assert lines[-1] == "done 30/30 layers"
    assert len(lines) == 13


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = Terminal()
    with ingest_progress(Console(file=out, force_terminal=True, width=80)) as show:
        show(IngestProgress("reading", 12, 30))
    assert "reading" in out.getvalue()
    assert "12/30" in out.getvalue()


def test_names_are_shown_as_they_are_but_without_control_characters() -> None:
    message = pb.Context(name="contexts/1", display_name="[bold]\x1b[31m tab\there")
    message.create_time.FromDatetime(datetime(2026, 1, 2, tzinfo=UTC))
    info = ContextInfo.from_message(message)
    out = Terminal()
    print_contexts([info], Console(file=out, force_terminal=True, width=120, color_system=None))
    assert "[bold][31m tab here" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (172_800_000, "173 MB"), (3 * 10**9, "3 GB")],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert size(count) == text
