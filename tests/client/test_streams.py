"""The command's standard streams: full, closed, or of an encoding that cannot hold all; Ctrl-C."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openbook.client import Client
from openbook.client.cli_options import read_size

from .conftest import FakeServer

FULL = "openbook: No space left on device: standard output\n"
CLOSED = "openbook: Bad file descriptor: standard output\n"
SHELL = ["/bin/sh", "-c"]


def run(fake: FakeServer, words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `openbook` and words of a shell, redirections among them, against the fake."""
    return subprocess.run(
        [*SHELL, f"exec '{sys.executable}' -m openbook.client.cli {words}"],
        env=os.environ | {"OPENBOOK_SERVER": fake.address} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def client(fake: FakeServer) -> Iterator[Client]:
    """Return a client; here is nothing that differs for an event loop."""
    with Client(fake.address) as client:
        yield client


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "light.txt"
    path.write_text("A canary keeps the light.\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "verb",
    ["--version", "--help", "contexts list", "contexts list --json", "contexts show ID",
     "ask ID Who?", "ask ID Who? --json", "count FILE", "ingest FILE", "serve --help"],
)  # fmt: skip
def test_output_that_cannot_be_written_is_one_line_and_exit_2(
    verb: str, fake: FakeServer, context_id: str, document: Path
) -> None:
    words = verb.replace("ID", context_id).replace("FILE", str(document))
    for where, said in ((">/dev/full", FULL), (">&-", CLOSED)):
        done = run(fake, f"{words} {where}")
        progress = 0 if "ingest" not in verb else done.stderr.index("openbook:")
        assert (done.returncode, done.stderr[progress:]) == (2, said), where


def test_reader_that_leaves_ends_the_command_without_a_word(
    fake: FakeServer, context_id: str
) -> None:
    for words in ("contexts list", f"ask {context_id} Who?", "--help"):
        done = run(fake, f"{words} | true; exit 0")
        assert (done.returncode, done.stderr) == (0, ""), words


def test_verb_that_prints_nothing_needs_no_output(
    fake: FakeServer, context_id: str, client: Client
) -> None:
    assert run(fake, f"contexts delete {context_id} >&- 2>&-").returncode == 0
    assert list(client.contexts()) == []


@pytest.mark.parametrize("verb", ["ingest", "count"])
def test_closed_input_is_one_line_and_exit_2(verb: str, fake: FakeServer) -> None:
    done = run(fake, f"{verb} - <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "openbook: standard input is closed; there is nothing to read\n"


def test_stderr_that_cannot_be_written_leaves_the_code_and_stdout_alone(
    fake: FakeServer, context_id: str
) -> None:
    for where in ("2>&-", "2>/dev/full"):
        done = run(fake, f"contexts show {'0' * 32} {where}")
        assert (done.returncode, done.stdout) == (1, ""), where
    done = run(fake, f"ask {context_id} Who? --receipt 2>/dev/full")
    assert (done.returncode, done.stdout) == (2, "The keeper's daughter.\n")


def test_encoding_that_cannot_hold_a_name_or_an_answer_shows_it_escaped(
    fake: FakeServer, document: Path, client: Client
) -> None:
    context_id = client.ingest(document, display_name="Caf\xe9 \U0001f600")
    fake.service.deltas = ["Caf\xe9 \U0001f600"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    listed = run(fake, "contexts list", **ascii_only)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.endswith("\tCaf\\xe9 \\U0001f600\n")
    assert run(fake, f"ask {context_id} Who?", **ascii_only).stdout == "Caf\\xe9 \\U0001f600\n"
    for words, key in (
        (f"ask {context_id} Who? --json", "text"),
        ("contexts list --json", "display_name"),
    ):
        shown = run(fake, words, **ascii_only).stdout
        assert shown.isascii() and json.loads(shown)[key] == "Caf\xe9 \U0001f600"
    whole = run(fake, f"ask {context_id} Who? --json", PYTHONIOENCODING="utf-8").stdout
    assert '"Caf\xe9 \U0001f600"' in whole


def test_size_beyond_every_machine_is_refused(fake: FakeServer) -> None:
    for size in ("9" * 400 + "TiB", "9" * 30, "9" * 5000, f"{2**63}.5TB"):
        with pytest.raises(ValueError, match="--disk is at most 9223372036854775808 bytes"):
            read_size(size, "--disk")
    assert read_size("8388607TiB", "--disk") == 8388607 * 2**40
    done = run(fake, f"capacity --tokens 10 --memory {'9' * 400}TiB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "openbook: --memory is at most 9223372036854775808 bytes\n"


def test_interrupt_while_the_verbs_are_imported_is_one_line_and_exit_130(fake: FakeServer) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from openbook.client.cli import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "contexts", "list"],
        env=os.environ | {"OPENBOOK_SERVER": fake.address},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "openbook: interrupted\n")
