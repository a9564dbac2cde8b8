"""Another process at the same store, for the tests of kills, sharing and spawning.

    store_process.py write ROOT NAME COUNT TOKENS  publish contexts NAME-0, NAME-1, …
    store_process.py killed ROOT ROUNDS            fork a writer, wait for its end, and again
    store_process.py digest PATH                   open a context and print digests of its keys

A writer prints each context's name once it is published. `killed` prints "child PID" when it has
forked a writer (itself it opens nothing, so that it may fork) and "dead" when that is gone.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from conftest import MODEL, Maker

from openbook.indexstore.store import open_context, publish


def write(root: Path, name: str, count: int, tokens: int) -> None:
    maker = Maker(root)
    for number in range(count):
        fields = maker.fields(tokens, context_id=f"{name}-{number}")
        publish(maker.draft(fields, number), maker.final(fields.context_id))
        print(fields.context_id, flush=True)


def killed(root: Path, rounds: int) -> None:
    for round_ in range(rounds):
        pid = os.fork()
        if pid == 0:
            print("child", os.getpid(), flush=True)
            write(root, f"context-{round_}", sys.maxsize, 700)  # until it is killed
        os.waitpid(pid, 0)
        print("dead", flush=True)


def digest(path: Path) -> None:
    with open_context(path, model_fingerprint=MODEL) as context:
        for layer in range(context.manifest.layers):
            keys = context.layer(layer).heads[0].keys
            print(hashlib.sha256(keys.tobytes()).hexdigest())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", root, name, count, tokens]:
            write(Path(root), name, int(count), int(tokens))
        case ["killed", root, rounds]:
            killed(Path(root), int(rounds))
        case ["digest", path]:
            digest(Path(path))
        case _:
            sys.exit(__doc__)
