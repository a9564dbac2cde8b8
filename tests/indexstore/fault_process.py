"""A store on a file system that fails on purpose; runs with fault_shim.so in LD_PRELOAD.

    fault_process.py trace ROOT TRACE DATA     publish once, noting every call
    fault_process.py matrix ROOT KIND N,N,…    for each N: publish, a fault at call N, then check

Each line of `matrix` is N, what became of the writer and whether the context is there. It forks
for each writer and each check, and opens nothing itself, so that it may.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from conftest import MODEL, Maker

from openbook.indexstore.errors import IndexStoreError, StoreFull, StoreWriteFailed
from openbook.indexstore.head import HeadPlan
from openbook.indexstore.store import open_context, publish, sweep

TINY = {
    "query_heads": 1,
    "kv_heads": 1,
    "head_dim": 4,
    "value_dim": 4,
    "plan": ((HeadPlan("scan", 0),), (HeadPlan("graph", 64),)),
}
# LMDB calls a short write of its first pages a full disk, and any other an I/O error.
EXPECTED = {
    "eio": (StoreWriteFailed,),
    "enospc": (StoreFull,),
    "short": (StoreWriteFailed, StoreFull),
}
WHOLE, FAILED, SURPRISED = 0, 3, 1


def write(root: Path) -> bool:
    """Publish a context with one key in its middle."""
    maker = Maker(root)
    fields = maker.fields(641, **TINY)
    with maker.draft(fields) as draft:
        return publish(draft, maker.final())


def write_faulty(root: Path, kind: str, number: int) -> int:
    os.environ.update(FAULT_KIND=kind, FAULT_AT=str(number))
    try:
        write(root)
    except IndexStoreError as error:
        assert type(error) in EXPECTED[kind], repr(error)
        assert not (root / ".tmp").exists() or not any((root / ".tmp").iterdir())
        return FAILED
    return WHOLE


def check(root: Path) -> int:
    """Find no context or the whole one, sweep, try again, and find the whole one."""
    final = Maker(root).final()
    was_there = final.exists()
    if was_there:
        open_context(final, model_fingerprint=MODEL).close()
    sweep(root)
    assert not (root / ".tmp").exists() or not any((root / ".tmp").iterdir())
    assert write(root) is not was_there
    open_context(final, model_fingerprint=MODEL).close()
    assert not any((root / ".tmp").iterdir())
    return FAILED if was_there else WHOLE


def forked(work: Callable[[], int]) -> str:
    """Run `work` in a child and say how it ended."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(SURPRISED)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return {WHOLE: "whole", FAILED: "failed", SURPRISED: "surprised"}[os.WEXITSTATUS(status)]


def matrix(root: Path, kind: str, numbers: list[int]) -> None:
    for number in numbers:
        store = root / f"{kind}-{number}"

        def faulty(store: Path = store, number: int = number) -> int:
            return write_faulty(store, kind, number)

        def checked(store: Path = store) -> int:
            return check(store)

        ending = forked(faulty)
        there = {"whole": "absent", "failed": "present"}.get(found := forked(checked), found)
        print(number, ending, there, flush=True)
        shutil.rmtree(store)


def trace(root: Path, log: Path, data: Path) -> None:
    os.environ.update(FAULT_TRACE=str(log), FAULT_DATA=str(data))
    assert write(root)
    with open(log, "a") as file:
        file.write("0\treturned\t\t\t-1\t0\t0\t0\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["trace", root, log, data]:
            trace(Path(root), Path(log), Path(data))
        case ["matrix", root, kind, numbers]:
            matrix(Path(root), kind, [int(number) for number in numbers.split(",")])
        case _:
            sys.exit(__doc__)
