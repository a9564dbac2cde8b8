"""`openbook serve` that says, before it is ready, what its garbage collector looks at.

A line on stderr: `collector: SEEN objects of SEEN + FROZEN`.
"""

from __future__ import annotations

import gc
import sys

import typer

from openbook.server import app
from openbook.server.commands import serve

announce = app.announce


def tell(address: str) -> None:
    """Count, then announce as ever."""
    seen = len(gc.get_objects())
    print(f"collector: {seen} objects of {seen + gc.get_freeze_count()}", file=sys.stderr)
    announce(address)


if __name__ == "__main__":
    app.announce = tell
    typer.run(serve)
