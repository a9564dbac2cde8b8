"""Another process at the same store, for the tests of kills, sharing and spawning.

    store_process.py write ROOT FIRST COUNT [TOKENS]  publish contexts FIRST, FIRST + 1, …
    store_process.py digest PATH                      open a context and print a sum of it

`write` prints "ready" before it writes, and the number of each context once it is published.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import MODEL, Maker

from openbook.indexstore.layer import layer_arrays
from openbook.indexstore.store import open_context, publish


def write(root: Path, first: int, count: int, tokens: int) -> None:
    maker = Maker(root)
    print("ready", flush=True)
    for number in range(first, first + count):
        fields = maker.fields(tokens, context_id=f"context-{number}")
        publish(maker.draft(fields, number), maker.final(fields.context_id))
        print(number, flush=True)


def digest(path: Path) -> None:
    with open_context(path, model_fingerprint=MODEL) as context:
        layers = [context.layer(layer) for layer in range(context.manifest.layers)]
        print(sum(sum(a.tobytes()) for layer in layers for _, _, a in layer_arrays(layer)))


if __name__ == "__main__":
    verb, where, *numbers = sys.argv[1:]
    if verb == "write":
        first, count, *tokens = map(int, numbers)
        write(Path(where), first, count, *(tokens or [700]))
    else:
        digest(Path(where))
