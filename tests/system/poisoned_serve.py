"""`openbook serve` with a fault in its model: documents with a marker end the process, or raise.

A document that holds `poison at <stage>` kills the process by SIGKILL when its reading comes to
that stage, after a layer has been written for `reading`; one that holds `poison raises` makes the
reading raise.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import typer

from openbook import worker
from openbook.server.commands import serve

ingest = worker.ingest


def poisoned(
    model: Any,
    document: bytes,
    draft: Any,
    *,
    on_progress: Callable[[worker.IngestProgress], None],
    **given: Any,
) -> Any:
    """Read a document as ever until it comes to what its marker says."""

    def tell(progress: worker.IngestProgress) -> None:
        on_progress(progress)
        is_there = progress.stage != "reading" or progress.layers_done == 1
        if is_there and b"poison at " + progress.stage.encode() in document:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_there and progress.stage == "reading" and b"poison raises" in document:
            raise RuntimeError("a fault of the model")

    return ingest(model, document, draft, on_progress=tell, **given)


if __name__ == "__main__":
    worker.ingest = poisoned
    typer.run(serve)
