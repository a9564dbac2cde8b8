"""A store on a file system that fails on purpose; runs with fault_shim.so in LD_PRELOAD.

    fault_process.py trace ROOT VERB TRACE DATA     do VERB once, noting every call
    fault_process.py matrix ROOT VERB KIND N,N,…    for each N: VERB, a fault at call N, then check

VERB is publish, saved or replace; saved is a publish with a checkpoint after each layer, which goes
on where another left one. Each line of `matrix` is N, what became of the writer, which context is
there (absent, old, new) and how the check ended. It forks for each, and opens nothing itself, so
that it may.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from conftest import MODEL, Maker

from openbook.indexstore.errors import IndexStoreError, StoreFull, StoreWriteFailed
from openbook.indexstore.head import HeadPlan
from openbook.indexstore.store import Draft, adopt, begin, open_context, publish, replace, sweep

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


def draft_of(maker: Maker, index: str) -> Draft:
    """Seal a context with one key in its middle."""
    return maker.draft(maker.fields(641, index_fingerprint=index, **TINY))


def saved_draft_of(maker: Maker, index: str) -> Draft:
    """Seal the same context, from the last checkpoint on if there is one."""
    fields = maker.fields(641, index_fingerprint=index, **TINY)
    draft = adopt(maker.root, "context")
    if draft is None:
        draft = begin(maker.root)
        draft.write_tokens(*maker.tokens(fields))
    done = draft.checkpoint.state["layers"] if draft.checkpoint else 0
    for layer in range(done, fields.layers):
        draft.write_layer(layer, maker.layer(layer, fields))
        draft.save("context", {"layers": layer + 1}, memoryview(b"state" * (layer + 1)))
    draft.seal(fields)
    return draft


def do(verb: str, root: Path) -> bool:
    """Publish the context as "old", or replace it by "new"."""
    maker = Maker(root)
    if verb == "saved":
        with saved_draft_of(maker, "old") as draft:
            return publish(draft, maker.final())
    if verb == "publish":
        with draft_of(maker, "old") as draft:
            return publish(draft, maker.final())
    with draft_of(maker, "new") as draft:
        replace(draft, maker.final())
    return True


def prepare(verb: str, root: Path) -> int:
    if verb == "replace":
        do("publish", root)
    return WHOLE


def do_faulty(verb: str, root: Path, kind: str, number: int) -> int:
    os.environ.update(FAULT_KIND=kind, FAULT_AT=str(number))
    try:
        do(verb, root)
    except IndexStoreError as error:
        assert type(error) in EXPECTED[kind], repr(error)
        # A replaced context may wait for the sweep, where its removal was not reached.
        assert verb == "replace" or is_clean(root)
        return FAILED
    return WHOLE


def is_clean(root: Path) -> bool:
    return not (root / ".tmp").exists() or not any((root / ".tmp").iterdir())


def check(verb: str, root: Path) -> int:
    """Find no context or a whole one, sweep, try again, and find the whole one."""
    final = Maker(root).final()
    found = "absent"
    if final.exists():
        with open_context(final, model_fingerprint=MODEL) as context:
            found = context.manifest.index_fingerprint
    print(found, end=" ", flush=True)
    sweep(root, keep=lambda label: verb == "saved" and label == "context")
    assert verb == "saved" or is_clean(root)
    assert do(verb, root) is (verb == "replace" or found == "absent")
    with open_context(final, model_fingerprint=MODEL) as context:
        assert context.manifest.index_fingerprint == ("new" if verb == "replace" else "old")
    assert is_clean(root)
    return WHOLE


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


def matrix(root: Path, verb: str, kind: str, numbers: list[int]) -> None:
    for number in numbers:
        store = root / f"{kind}-{number}"
        assert forked(partial(prepare, verb, store)) == "whole"
        print(number, forked(partial(do_faulty, verb, store, kind, number)), end=" ", flush=True)
        print(forked(partial(check, verb, store)), flush=True)
        shutil.rmtree(store)


def trace(root: Path, verb: str, log: Path, data: Path) -> None:
    os.environ.update(FAULT_TRACE=str(log), FAULT_DATA=str(data))
    assert forked(partial(prepare, verb, root)) == "whole"
    mark(log, "prepared")
    assert do(verb, root)
    mark(log, "returned")


def mark(log: Path, name: str) -> None:
    with open(log, "a") as file:
        file.write(f"0\t{name}\t\t\t-1\t0\t0\t0\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["trace", root, verb, log, data]:
            trace(Path(root), verb, Path(log), Path(data))
        case ["matrix", root, verb, kind, numbers]:
            matrix(Path(root), verb, kind, [int(number) for number in numbers.split(",")])
        case _:
            sys.exit(__doc__)
