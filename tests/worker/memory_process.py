"""The peak memory of a bare forward and of an ingest, each in a fork of one process.

    memory_process.py MODEL TEXT TOKENS THREADS

The last line is one JSON object, sizes in bytes: what either added to the process's memory at its
peak (`forward`, `ingest`), the promise's allowance beside the forward (`allowance`), and what the
ingest was expected to need (`needed`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from ingest_memory import (  # noqa: E402
    ALLOWANCE_BYTES,
    cut_document,
    peak_bytes,
    reset_peak,
    run_forward,
    run_ingest,
)

from openbook.worker import attention  # noqa: E402
from openbook.worker.errors import MemoryShort  # noqa: E402
from openbook.worker.ingest import IngestSettings  # noqa: E402
from openbook.worker.memory import refuse_without_room  # noqa: E402
from openbook.worker.models import Model, load_model  # noqa: E402


def file_bytes() -> int:
    """Return how much of the resident memory is of files (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("RssFile:")]
    return int(found.split()[1]) * 1024


def growth(run: Callable[[Model, bytes], None], model: Model, document: bytes, threads: int) -> int:
    """Return by how much the peak of a fork that runs it lies above what the fork began with.

    Without files: a fork begins with none of the libraries' pages, and finds them again.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(threads)
            reset_peak()
            before, files = peak_bytes(), file_bytes()
            run(model, document)
            grown = peak_bytes() - before - (file_bytes() - files)
            os.write(writer, str(grown).encode())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the fork failed"
    return int(os.read(reader, 100))


def warm_up(model: Model, text: str) -> None:
    """Run both on a short document, so that code which is loaded at its first use is in neither."""
    document = cut_document(model, text, 700)
    run_forward(model, document)
    model.module.set_attn_implementation(attention.NAME)
    run_ingest(model, document)


def needed_bytes(model: Model, tokens: int, threads: int) -> int:
    """Return what an ingest of so many tokens is expected to need: it is refused without."""
    settings = IngestSettings("completion", threads=threads)
    try:
        refuse_without_room(
            model,
            tokens,
            kv_dtype=settings.kv_dtype,
            params=settings.params,
            has_graph=settings.has_graph,
            threads=threads,
            left_bytes=lambda _: 0,
        )
    except MemoryShort as refused:
        return refused.needed_bytes
    raise AssertionError("no memory at all was enough")


def main(model: Model, text: str, tokens: int, threads: int) -> None:
    document, shape = cut_document(model, text, tokens), model.shape
    warm_up(model, text)
    measured = partial(growth, model=model, document=document, threads=threads)
    layer = shape.kv_heads * (shape.head_dim + shape.value_dim) * model.module.dtype.itemsize
    sizes = {
        "forward": measured(run_forward),
        "ingest": measured(run_ingest),
        "allowance": 2 * layer * tokens + ALLOWANCE_BYTES,
        "needed": needed_bytes(model, tokens, threads),
    }
    print(json.dumps(sizes))


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads to lose in a fork
    main(load_model(sys.argv[1]), Path(sys.argv[2]).read_text(), *map(int, sys.argv[3:]))
