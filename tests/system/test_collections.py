"""A server's garbage collections are short: what its start has made is not looked at again."""

from __future__ import annotations

import re
from pathlib import Path

from .serving import Served

SCRIPT = Path(__file__).with_name("collected_serve.py")


def test_a_full_collection_is_of_what_was_made_since_the_model_was_loaded(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    served = Served(tiny_model_directory, tmp_path / "data", tmp_path / "log", script=SCRIPT)
    assert served.end() == 0
    log = (tmp_path / "log").read_text()
    counted = re.search(r"collector: (\d+) objects of (\d+)", log)
    assert counted is not None, log
    seen, all_objects = map(int, counted.groups())
    assert seen < all_objects / 4
