"""Every line of the ledger names a test that is still there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LINES = re.findall(r"^\| .+ \| `(\S+) -k (\w+)` \|$", (TESTS / "LEDGER.md").read_text(), re.M)


def test_ledger_has_a_command_in_every_line() -> None:
    rows = [line for line in (TESTS / "LEDGER.md").read_text().splitlines() if line[:1] == "|"]
    assert len(rows) == len(LINES) + 2  # and the heading


@pytest.mark.parametrize(("file", "name"), LINES)
def test_ledger_names_a_test(file: str, name: str) -> None:
    tests = re.findall(r"^ *(?:async )?def (test_\w+)", (TESTS / file).read_text(), re.M)
    assert any(name in test for test in tests), f"{file} has no test like {name}"
