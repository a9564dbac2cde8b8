"""A context is in memory once, however many asks and processes read it, and is read from disk.

What counts as a process's own is Private_Clean and Private_Dirty in /proc/<pid>/smaps_rollup: pages
that no other process has mapped. A page of a shard is therefore the server's own while it alone has
the shard open, and shared as soon as a second process has read it too: its copies, and only they,
are left as its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from openbook.v1 import contexts_pb2 as pb

from .opening_process import private_bytes
from .serving import DOCUMENT, Served

PAGE = mmap.PAGESIZE
ASKS = 8
ANSWER_TOKENS = 64
# (layers, tokens): 63 MB of shards, and 378 MB
SIZES = [(2, 8_000), pytest.param((6, 16_000), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Large:
    """A server with a context whose bytes outweigh what an ask needs besides."""

    served: Served
    model: Path
    context: pb.Context

    def shards(self, name: str) -> list[Path]:
        """Return the layer files of a context."""
        place = self.served.data / "contexts" / "local" / name.rpartition("/")[2]
        return sorted(place.glob("layer-*.mdb"))

    @property
    def bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards(self.context.name))

    def ask(self, _number: int = 0, *, tokens: int = ANSWER_TOKENS) -> str:
        return self.served.ask(self.context.name, max_tokens=tokens)[0]


@pytest.fixture(scope="module", params=SIZES, ids=["some", "many"])
def large(
    request: pytest.FixtureRequest,
    save_tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Large]:
    layers, tokens = request.param
    model = save_tiny(
        "llama", 2, 2, num_hidden_layers=layers, head_dim=192, max_position_embeddings=20_000
    )
    folder = tmp_path_factory.mktemp("sharing")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENBOOK_KV_DTYPE", "float32")
        served = Served(model, folder / "data", folder / "log")
    digits = "".join(random.Random(tokens).choices("0123456789", k=tokens)).encode()
    watch = pb.WatchContextRequest(name=served.upload(digits))
    *_, last = served.stub.WatchContext(watch, timeout=600)
    assert last.context.token_count == tokens
    yield Large(served, model, last.context)
    assert served.end() == 0


def test_eight_asks_at_once_add_no_copy_of_their_context(large: Large) -> None:
    alone = large.ask()
    pid = large.served.process.pid
    before = private_bytes(pid)
    assert before > large.bytes  # the shards are counted: a copy of them would be too
    peak, is_over = before, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(0.02):
            peak = max(peak, private_bytes(pid))

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        with ThreadPoolExecutor(ASKS) as pool:
            answers = list(pool.map(large.ask, range(ASKS)))
    finally:
        is_over.set()
        sampling.join()
    assert answers == [alone] * ASKS
    assert peak - before < large.bytes / 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_process_adds_a_tenth_of_the_bytes_of_a_context_at_most(large: Large) -> None:
    large.ask(tokens=1)  # open in the server
    place = large.shards(large.context.name)[0].parent
    script = Path(__file__).with_name("opening_process.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(large.model), str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as second:  # fmt: skip
        assert second.stdin is not None and second.stdout is not None
        before, after, mapped = map(int, second.stdout.readline().split())
        second.stdin.close()
    assert second.returncode == 0
    assert mapped == large.bytes
    assert after - before <= large.bytes / 10


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in memory, in whole pages, as mincore tells."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as pages:
        view = np.frombuffer(pages, np.uint8)
        told = np.zeros(-(-size // PAGE), np.uint8)
        if LIBC.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size),
                        ctypes.c_void_p(told.ctypes.data)):  # fmt: skip
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        del view
    return int((told & 1).sum()) * PAGE


def forget(path: Path) -> None:
    """Drop a file's pages from memory; those that are mapped stay."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_cold_context_is_paged_in_to_the_bytes_that_its_receipt_says(large: Large) -> None:
    """Opening reads every byte, to verify it: all pages of the shards come in, and stay mapped."""
    name = large.served.ingest(DOCUMENT).name  # read and closed: nothing has it mapped
    shards = large.shards(name)
    for shard in shards:
        forget(shard)
    if any(resident_bytes(shard) for shard in shards):
        pytest.skip("the files are on a file system that keeps them in memory")
    _, final = large.served.ask(name, max_tokens=1)
    resident = sum(resident_bytes(shard) for shard in shards)
    assert abs(final.receipt.bytes_mapped - resident) <= PAGE * len(shards)
    for shard in shards:
        forget(shard)  # mapped by the server now
    assert sum(resident_bytes(shard) for shard in shards) == resident
