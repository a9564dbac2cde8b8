"""A server's garbage collections are short: what its start has made is not looked at again."""

from __future__ import annotations

import re
from pathlib import Path

from .serving import Served

SCRIPT = Path(__file__).with_name("collected_serve.py")


def test_a_full_collection_is_of_what_was_made_since_the_start(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    served = Served(tiny_model_directory, tmp_path / "data", tmp_path / "log", script=SCRIPT)
    assert served.end() == 0
    log = (tmp_path / "log").read_text()
    since, whole = (float(number) for number in re.findall(r"collected_s (\S+)", log))
    assert since < whole / 4, (since, whole)
