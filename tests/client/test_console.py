"""What is printed, on a terminal and off it."""

import io
import time
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from openbook.client import ContextInfo, IngestProgress, console
from openbook.client.console import (
    age,
    elapsed,
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


NOW = datetime(2026, 1, 2, 12, 30, tzinfo=UTC)


def listed(name: str) -> ContextInfo:
    """Return a context as a server lists it, made three hours before NOW."""
    message = pb.Context(
        name=f"contexts/{'0f' * 16}",
        display_name=name,
        state=pb.CONTEXT_STATE_ACTIVE,
        prompt_layout=pb.PROMPT_LAYOUT_COMPLETION,
        token_count=7701,
        bytes=339_759_104,
    )
    message.create_time.FromDatetime(NOW - timedelta(hours=3))
    return ContextInfo.from_message(message)


def test_contexts_on_a_terminal_are_a_table_with_whole_ids() -> None:
    out = Terminal()
    screen = Console(file=out, force_terminal=True, width=80, color_system=None)
    print_contexts([listed("report.txt")], screen, now=NOW)
    header, row, *folded = out.getvalue().splitlines()
    assert header.split() == ["id", "layout", "state", "tokens", "disk", "age", "name"]
    assert row.split()[:7] == ["0f" * 16, "completion", "active", "7701", "340", "MB", "3"]
    assert "\t" not in out.getvalue()
    assert "report.txt" in (row.split()[-1] + "".join(line.strip() for line in folded))


def test_contexts_in_a_pipe_are_fields_between_tabs() -> None:
    out = io.StringIO()
    print_contexts([listed("a\tb\n\x1b[31m")], Console(file=out), now=NOW)
    header, row = out.getvalue().splitlines()
    assert header.split("\t") == [
        *("id", "layout", "state", "tokens", "bytes", "created", "expires", "name")
    ]
    assert row.split("\t") == [
        "0f" * 16, "completion", "active", "7701", "339759104", "2026-01-02T09:30:00+00:00",
        "",
        "a b [31m",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400 * 40, "40 d")],
)
def test_age_is_in_its_largest_whole_unit(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text
    assert age(None, NOW) == ""


def test_wait_shows_its_seconds_on_a_terminal() -> None:
    out = Terminal()
    with elapsed("Starting the server", Console(file=out, force_terminal=True, width=80)):
        pass
    assert "Starting the server" in out.getvalue() and "0:00:00" in out.getvalue()


def test_wait_off_a_terminal_is_a_line_per_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "TICK_S", 0.01)
    out = io.StringIO()
    with elapsed("Starting the server", Console(file=out)):
        while out.getvalue().count("\n") < 3:
            time.sleep(0.005)
    assert out.getvalue().splitlines()[:3] == ["Starting the server ...", "  0.01 s", "  0.02 s"]


def test_names_are_shown_as_they_are_but_without_control_characters() -> None:
    message = pb.Context(name="contexts/1", display_name="[bold]\x1b[31m tab\there")
    message.create_time.FromDatetime(datetime(2026, 1, 2, tzinfo=UTC))
    info = ContextInfo.from_message(message)
    out = Terminal()
    screen = Console(file=out, force_terminal=True, width=120, color_system=None)
    print_contexts([info], screen, now=NOW)
    assert "[bold][31m tab here" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (172_800_000, "173 MB"), (3 * 10**9, "3 GB")],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert size(count) == text
