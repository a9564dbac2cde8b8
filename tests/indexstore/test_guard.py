"""A file cut short while it is read costs an error, not the process.

Each test runs a process of its own, which a signal may end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openbook.indexstore import _guard
from openbook.indexstore.store import open_context

READ_CUT_FILE = """
import os, sys
import numpy as np
from pathlib import Path
from openbook.indexstore import _guard
from openbook.indexstore.attend import attend
from openbook.indexstore.errors import ShardTruncated
from openbook.indexstore.head import EXACT, AttendRequest, Budget, LayerIndex
from openbook.indexstore.layer import layer_arrays
from openbook.indexstore.store import open_context

path, length = Path(sys.argv[1]), int(sys.argv[2])
unguarded = sys.argv[3:] == ["unguarded"]
with open_context(path, model_fingerprint=None) as context:
    context.check()
    for slot in range(9 * unguarded):
        _guard.remove(slot)
    cut = path / "layer-001.mdb"
    os.chmod(cut, 0o600)
    os.truncate(cut, length)
    context.check()  # nothing was read yet
    queries = np.ones((4, 1, 16), np.float32)
    for layer in (0, 1):
        records = context.layer(layer)
        index = LayerIndex(records.heads, context.manifest.plan[layer])
        for budget in (EXACT, Budget(), Budget(keys=20), Budget(estimate=False)):
            attend([AttendRequest(index, queries, 0.25, budget)], threads=2)
        for _, _, array in layer_arrays(records):
            array.tobytes()
        try:
            context.check()
            print("sound")
        except ShardTruncated as error:
            print(error.file, error.found)
open_context(path.with_name("other"), model_fingerprint=None).close()
print("alive")
"""

TOUCH_OTHER_MAP = """
import faulthandler, mmap, os, sys
from pathlib import Path
from openbook.indexstore.store import open_context

if sys.argv[2] == "before":
    faulthandler.enable()
context = open_context(Path(sys.argv[1]), model_fingerprint=None)
if sys.argv[2] == "after":
    faulthandler.enable()
file = os.open(sys.argv[1] + "/mine", os.O_RDWR | os.O_CREAT)
os.truncate(file, 4096)
mine = mmap.mmap(file, 4096)
os.truncate(file, 0)
if sys.argv[2] == "sent":
    os.kill(os.getpid(), 7)
print(mine[0])
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("pages", [0, 2, 20, 40])
def test_file_cut_under_its_reader_is_reported_and_kills_nobody(maker: Any, pages: int) -> None:
    path = maker.context()
    maker.context(context_id="other")
    done = run(READ_CUT_FILE, path, pages * 4096)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["sound", f"layer-001.mdb {pages * 4096}", "alive"]


def test_without_the_guard_the_same_read_ends_the_process(context: Path) -> None:
    assert run(READ_CUT_FILE, context, 2 * 4096, "unguarded").returncode == -signal.SIGBUS


@pytest.mark.parametrize("faulthandler", ["before", "after", "none", "sent"])
def test_bus_error_elsewhere_still_ends_the_process(context: Path, faulthandler: str) -> None:
    done = run(TOUCH_OTHER_MAP, context, faulthandler)
    assert done.returncode == -signal.SIGBUS, done.stderr
    dumps = done.stderr.count("Fatal Python error")
    assert dumps >= 1 if faulthandler in ("before", "after") else dumps == 0
    assert dumps <= 2, "a handler that was put back is not asked again and again"


def test_slots_are_used_again() -> None:
    first = _guard.add(1 << 40, (1 << 40) + 4096)
    assert first is not None and not _guard.is_hit(first)
    _guard.remove(first)
    slots = [_guard.add(1 << 40, (1 << 40) + 4096) for _ in range(3)]
    assert slots[0] == first and len(set(slots)) == 3
    for slot in slots:
        assert slot is not None
        _guard.remove(slot)


def test_guard_covers_every_mapped_file(context: Path) -> None:
    with open_context(context, model_fingerprint=None) as opened:
        slots = [shard._lease._slot for shard in opened._shards]
        assert len(set(slots)) == 2 and None not in slots
        held = Path("/proc/self/fd")
        names = [os.readlink(fd) for fd in held.iterdir() if fd.exists()]
        mine = [Path(name).name for name in names if name.startswith(str(context))]
        assert sorted(mine) == ["layer-000.mdb", "layer-001.mdb", "manifest.json"]
