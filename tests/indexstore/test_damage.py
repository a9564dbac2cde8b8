"""No damaged byte is ever read as a number, and no damaged file kills the process that opens it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mutations import FILES, PAGE, read_records

from openbook.indexstore.errors import ShardCorrupt
from openbook.indexstore.store import open_context

PROCESS = Path(__file__).with_name("mutations.py")


def assert_found(path: Path, name: str | None = None) -> None:
    """Open in full; nothing may come back."""
    with pytest.raises(ShardCorrupt) as caught:
        open_context(path, model_fingerprint="sha256:model-a")
    assert name is None or caught.value.file == name


@pytest.mark.parametrize("flips", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_flipped_bit_in_every_file_is_found(context: Path, flips: int) -> None:
    rng = random.Random(7)
    for name in FILES:
        raw = (context / name).read_bytes()
        os.chmod(context / name, 0o600)
        for number in range(flips // len(FILES)):
            # One in four in LMDB's two meta pages, or a small manifest; the others anywhere.
            position = rng.randrange(min(len(raw), 2 * PAGE) if number % 4 == 0 else len(raw))
            with open(context / name, "r+b") as file:
                file.seek(position)
                file.write(bytes([raw[position] ^ 1 << rng.randrange(8)]))
                file.flush()
                assert_found(context, name)
                file.seek(position)
                file.write(raw[position : position + 1])
    open_context(context, model_fingerprint="sha256:model-a").close()


@pytest.mark.parametrize("pages", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_zeroed_page_is_found(maker: Any, pages: int) -> None:
    context, rng = maker.context(2500), random.Random(3)
    files = {name: (context / name).read_bytes() for name in FILES}
    filled = [
        (name, start)
        for name, raw in files.items()
        for start in range(0, len(raw), PAGE)
        if any(raw[start : start + PAGE])
    ]
    assert len(filled) >= 200
    for name, start in rng.sample(filled, pages):
        raw = files[name]
        os.chmod(context / name, 0o600)
        page = raw[start : start + PAGE]
        (context / name).write_bytes(raw[:start] + bytes(len(page)) + raw[start + PAGE :])
        assert_found(context, name)
        (context / name).write_bytes(raw)
    open_context(context, model_fingerprint="sha256:model-a").close()


@pytest.mark.parametrize("swaps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_swapped_records_are_found_within_and_between_contexts(
    maker: Any, forger: Any, tmp_path: Path, swaps: int
) -> None:
    """The files' own digests are made right, so that only the records' can tell."""
    sound = [maker.context(seed=seed, context_id=f"c{seed}") for seed in (0, 9)]
    places = [
        (which, name, key, value)
        for which, path in enumerate(sound)
        for name in FILES[1:]
        for key, value in read_records(path / name).items()
    ]
    rng, within = random.Random(5), 0
    for number in range(swaps):
        while True:
            (which, name, key, value), other = rng.sample(places, 2)
            # Half of them the very same record of the other context: the likeliest mix-up.
            twin = [p for p in places if p[0] != which and p[1:3] == (name, key)]
            other = twin[0] if number % 2 and len(twin) == 1 else other
            if value != other[3]:
                break
        damaged = tmp_path / "damaged"
        shutil.copytree(sound[which], damaged)
        forger.records(damaged, name, lambda records, k=key, v=other[3]: records.update({k: v}))
        assert_found(damaged, name)
        shutil.rmtree(damaged)
        within += other[0] == which
    assert 0 < within < swaps


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_file_is_a_typed_error_and_never_a_signal(tmp_path: Path, count: int) -> None:
    command = [sys.executable, str(PROCESS), str(tmp_path / "store"), str(count)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == count
    endings = Counter(error for _, error, _ in lines)
    assert set(endings) <= {"ShardCorrupt", "ShardTruncated", "ContextIncomplete"}, endings
    assert {kind for kind, _, _ in lines} == {"cut", "longer", "odd", "garbage", "id", "header"}
    assert max(float(seconds) for *_, seconds in lines) < 1
