"""Files of a context changed in every way we can think of, opened in a process of their own.

    mutations.py ROOT COUNT    open COUNT mutated contexts; one line each: mutation, error, seconds

Opening must end in a typed error: anything else, success included, ends this process.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

import lmdb
from conftest import MODEL, Forger, Maker

from openbook.indexstore.errors import IndexStoreError
from openbook.indexstore.layout import HEADER_BYTES
from openbook.indexstore.store import open_context

FILES = ["manifest.json", "tokens.mdb", "layer-000.mdb", "layer-001.mdb"]
PAGE = 4096
MIDDLE = 60  # keys of a context of 700 tokens
# Numbers in each record, and what they must be below.
IDS = {b"graph": MIDDLE * 8, b"entries": 4, b"cluster_of": MIDDLE, b"members": MIDDLE}
LIMITS = {b"graph": MIDDLE, b"entries": MIDDLE, b"cluster_of": 3, b"members": MIDDLE}

Mutation = tuple[str, Callable[[Path], object]]


def read_records(file: Path) -> dict[bytes, bytes]:
    """Return the records of a shard by their keys."""
    with lmdb.open(str(file), subdir=False, lock=False, lib_version=0, readonly=True) as env:
        with env.begin() as txn:
            return dict(txn.cursor())


def resized(name: str, length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, length)


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def mutate(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return mutate


def garbage(name: str, offset: int, noise: bytes) -> Callable[[Path], None]:
    def mutate(path: Path) -> None:
        with open(path / name, "r+b") as file:
            file.seek(offset)
            changed = [
                byte ^ (by or 1) for byte, by in zip(file.read(len(noise)), noise, strict=False)
            ]
            file.seek(offset)
            file.write(bytes(changed))

    return mutate


def forged(name: str, key: bytes, offset: int, change: bytes) -> Callable[[Path], None]:
    """Change a record's bytes and make every digest right again."""

    def mutate(path: Path) -> None:
        def edit(records: dict[bytes, bytes]) -> None:
            value = bytearray(records[key])
            value[offset : offset + len(change)] = change
            records[key] = bytes(value)

        Forger().records(path, name, edit)
        Forger().record_digests(path, name)

    return mutate


def each_once(sizes: dict[str, int]) -> Iterator[Mutation]:
    """Yield a cut at each page of each file, and what is no file of that kind."""
    for name, size in sizes.items():
        yield from (("cut", resized(name, length)) for length in range(0, size, PAGE))
        yield from (("longer", resized(name, size + more)) for more in (1, PAGE, 1 << 30))
        makers = (os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: None)
        yield from (("odd", replaced(name, make)) for make in makers)
        yield "odd", replaced(name, lambda p: p.symlink_to(p.name))


def at_random(sizes: dict[str, int], rng: random.Random) -> Iterator[Mutation]:
    """Yield cuts, noise, ids out of range and forged headers, for ever."""
    while True:
        name = rng.choice(FILES)
        yield "cut", resized(name, rng.randrange(sizes[name]))
        noise = rng.randbytes(rng.choice((1, 8, 64, PAGE)))
        yield "garbage", garbage(name, rng.randrange(sizes[name]), noise)
        name, key = rng.choice(FILES[2:]), rng.choice(list(IDS))
        wrong = struct.pack("<I", rng.choice((LIMITS[key], 2**31, 2**32 - 1)))
        place = HEADER_BYTES + 4 * rng.randrange(IDS[key])
        yield "id", forged(name, key + b"/001", place, wrong)
        field = rng.choice((0, 4, 6, 7, 8, 10, 12, 13, 16, 24, 40))
        yield "header", forged(name, rng.choice((b"keys/000", b"graph/001")), field, b"\x7b")


def run(root: Path, count: int) -> None:
    sound, path, rng = Maker(root).context(), root / "mutated", random.Random(11)
    sizes = {name: (sound / name).stat().st_size for name in FILES}
    once = list(each_once(sizes))
    mutations = chain(rng.sample(once, min(len(once), count // 2)), at_random(sizes, rng))
    for number, (kind, mutate) in enumerate(islice(mutations, count)):
        shutil.copytree(sound, path, symlinks=True)
        for name in FILES:
            os.chmod(path / name, 0o600)
        mutate(path)
        started = time.monotonic()
        try:
            open_context(path, model_fingerprint=MODEL)
        except IndexStoreError as error:
            seconds = time.monotonic() - started
            print(kind, type(error).__name__, f"{seconds:.3f}", flush=True)
        else:
            sys.exit(f"mutation {number}, {kind}, was not noticed")
        shutil.rmtree(path)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [root, count]:
            run(Path(root), int(count))
        case _:
            sys.exit(__doc__)
