"""`openbook serve` that says what a full garbage collection takes, in two lines on stderr.

The first is of what the server has made since it was ready, the second of all that it holds.
"""

from __future__ import annotations

import gc
import sys
import time

import typer

from openbook.server import app
from openbook.server.commands import serve

announce = app.announce


def collected_s() -> float:
    """Collect everything that the collector sees; return the seconds."""
    started = time.perf_counter()
    gc.collect()
    return time.perf_counter() - started


def tell(address: str) -> None:
    """Measure, then announce as ever."""
    print("collected_s", collected_s(), file=sys.stderr)
    gc.unfreeze()
    print("collected_s", collected_s(), file=sys.stderr)
    announce(address)


if __name__ == "__main__":
    app.announce = tell
    typer.run(serve)
