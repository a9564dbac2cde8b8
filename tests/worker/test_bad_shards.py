"""Files that are replaced or taken away under a running answer, and those with odd owners or modes.

Whoever has a file open keeps the bytes that were verified: a rename over it or an unlink changes
nothing for a running answer, and the next open looks at what is there then. A cut in place is
test_engine.py -k cut_short; damage of every other kind is in tests/indexstore: test_damage.py,
test_stored.py and test_manifest.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from openbook.indexstore.errors import ContextIncomplete, ContextMissing, ShardCorrupt
from openbook.worker import Engine
from openbook.worker.models import Model

from .asking import Asked, run_all, spec

Tiny = Callable[..., Model]
ReadContext = Callable[..., Path]
Digits = Callable[[int], bytes]


def renamed_over(path: Path) -> None:
    """Put noise of the same size in the place of every file, each by one rename."""
    for file in sorted(path.iterdir()):
        noise = file.with_name("noise")
        noise.write_bytes(os.urandom(file.stat().st_size))
        noise.rename(file)


def unlinked(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def removed(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize("change", [renamed_over, unlinked, removed])
def test_an_answer_goes_on_over_files_that_are_replaced_or_gone(
    engine: Engine,
    tiny_model: Tiny,
    read_context: ReadContext,
    digits: Digits,
    change: Callable[[Path], None],
) -> None:
    path = read_context(tiny_model("llama", 9, 3), digits(900))
    claim = engine.open(path, path.name)
    calm = Asked(engine, spec(max_tokens=20), claim)
    run_all(engine)
    asked = Asked(engine, spec(max_tokens=20), claim)
    for _ in range(4):
        engine.step()
    change(path)
    run_all(engine)
    assert asked.ask.answer_ids == calm.ask.answer_ids and asked.finished
    claim.close()
    with pytest.raises((ShardCorrupt, ContextIncomplete, ContextMissing)):
        engine.open(path, path.name)


@pytest.mark.parametrize("mode", [0o500, 0o777])
@pytest.mark.parametrize("owner", [None, 65534])
def test_the_mode_and_owner_of_a_context_s_directory_change_no_answer(
    engine: Engine,
    tiny_model: Tiny,
    read_context: ReadContext,
    digits: Digits,
    mode: int,
    owner: int | None,
) -> None:
    """The wall is the data directory's mode; a context is known by its digests, not by its owner.

    tests/system/test_bad_config.py: a data directory that others may enter or own is refused.
    """
    if owner is not None and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    path = read_context(tiny_model("llama", 9, 3), digits(900))
    claim = engine.open(path, path.name)
    calm = Asked(engine, spec(), claim)
    run_all(engine)
    claim.close()
    for each in (path, *path.iterdir()):
        if owner is not None:
            os.chown(each, owner, owner)
    path.chmod(mode)
    claim = engine.open(path, path.name)
    asked = Asked(engine, spec(), claim)
    run_all(engine)
    claim.close()
    path.chmod(0o700)
    assert asked.ask.answer_ids == calm.ask.answer_ids
