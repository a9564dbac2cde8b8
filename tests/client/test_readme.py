"""The README's snippets that call the service run as they are written, against the fake."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import FakeServer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
MARK = "<!-- run: tests/client/test_readme.py -->"


def snippets(language: str) -> list[str]:
    """Return the marked code blocks of one language."""
    return re.findall(rf"{re.escape(MARK)}\n```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the reader's document and an `openbook` on its own path."""
    (tmp_path / "report.txt").write_text("Signed by the keeper.\n", encoding="utf-8")
    program = tmp_path / "bin" / "openbook"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m openbook.client.cli "$@"\n')
    program.chmod(0o755)
    return tmp_path


def test_every_mark_has_its_snippet() -> None:
    assert README.count(MARK) == len(snippets("sh")) + len(snippets("python")) == 2


@pytest.mark.parametrize("snippet", snippets("sh"))
def test_shell_snippet_runs(snippet: str, folder: Path, fake: FakeServer) -> None:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-eu", "-c", snippet],
        cwd=folder,
        env=os.environ | {"PATH": path, "OPENBOOK_SERVER": fake.address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The keeper's daughter.\n") == snippet.count("openbook ask")
    assert "report.txt" in done.stdout


@pytest.mark.parametrize("snippet", snippets("python"))
def test_python_snippet_runs(snippet: str, folder: Path, fake: FakeServer) -> None:
    assert "localhost:50051" in snippet
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet.replace("localhost:50051", fake.address)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The keeper's daughter.") == 2
    assert "9 read for this question" in done.stdout
