"""Records come back bit for bit, aligned, from a file that is mapped once and counted."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openbook.indexstore import layout
from openbook.indexstore.dtypes import to_stored
from openbook.indexstore.errors import ShardCorrupt, ShardTruncated
from openbook.indexstore.layout import (
    ALIGNMENT,
    PAGE_BYTES,
    PAGE_HEADER_BYTES,
    Kind,
    info_of,
    map_bytes,
)
from openbook.indexstore.manifest import CHUNK_BYTES, FileEntry
from openbook.indexstore.mapped import mapped_files
from openbook.indexstore.shard import (
    Shard,
    check_size,
    file_chunks,
    open_regular,
    write_shard,
)

HARD_VALUES = [70000.0, 1e-40, -0.0, 0.0, 1.0, float("inf"), float("-inf"), float("nan"), 3.0e38]


def write(path: Path, arrays: list[Any]) -> FileEntry:
    """Write arrays as the keys of heads 0, 1, 2, … of layer 0."""
    infos = [info_of(Kind.KEYS, array, layer=0, head=head) for head, array in enumerate(arrays)]
    records = write_shard(path, dict(zip(infos, arrays, strict=True)))
    return FileEntry(path.name, path.stat().st_size, (), records)


def open_shard(path: Path, entry: FileEntry) -> Shard:
    with open_regular(path) as fd:
        check_size(path, fd, entry)
        return Shard(path, fd, entry)


def map_lines(path: Path) -> int:
    """Count the lines of this process's memory map that name the file."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_case_b36_hard_values_keep_their_bits(tmp_path: Path, dtype: Any) -> None:
    values = np.array(HARD_VALUES, np.float32).reshape(3, 3)
    if dtype == "float16":
        values = np.where(np.abs(values) == 70000.0, 65504.0, values)
        values[~np.isfinite(values) | (values > 65504)] = -65504.0
    stored = to_stored(values.astype(np.float32), dtype)
    entry = write(tmp_path / "a.mdb", [stored])
    read = open_shard(tmp_path / "a.mdb", entry).read(Kind.KEYS, 0, check_digest=True)
    assert entry.records[0].info.dtype == dtype
    assert read.dtype == stored.dtype and read.shape == stored.shape
    assert read.tobytes() == stored.tobytes()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=12))
def test_any_sizes_fit_the_map_and_come_back_aligned(
    tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    path = tmp_path / "a.mdb"
    path.unlink(missing_ok=True)
    rng = np.random.default_rng(len(shapes))
    arrays = [rng.integers(0, 2**16, shape, dtype=np.uint16) for shape in shapes]
    entry = write(path, arrays)
    assert entry.bytes <= map_bytes(record.info for record in entry.records)
    shard = open_shard(path, entry)
    for head, array in enumerate(arrays):
        read = shard.read(Kind.KEYS, head, check_digest=True)
        np.testing.assert_array_equal(read, array)
        assert read.ctypes.data % ALIGNMENT == 0
        assert not read.flags.owndata, "a record that fills its pages is borrowed, not copied"


def test_lmdb_starts_large_values_16_bytes_into_a_page(tmp_path: Path) -> None:
    """The fact that the header's 48 bytes rest on; lib_version=1 would make it 24."""
    path = tmp_path / "a.mdb"
    write(path, [np.zeros((size, 8), np.float16) for size in (1, 10, 300, 1000)])
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False, lib_version=0) as env:
        with env.begin(buffers=True) as txn:
            for _, value in txn.cursor():
                address = np.frombuffer(value, np.uint8).ctypes.data
                assert address % PAGE_BYTES == PAGE_HEADER_BYTES == 16


def test_map_size_holds_many_commits(tmp_path: Path) -> None:
    entry = write(tmp_path / "a.mdb", [np.zeros((1, 8), np.float16)] * 700)
    assert entry.bytes <= map_bytes(record.info for record in entry.records)
    assert entry.bytes < 1.2 * 700 * PAGE_BYTES, "commits reuse the pages that they free"


def test_unaligned_record_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without padding LMDB keeps small values inside a leaf page, wherever there is room.
    monkeypatch.setattr(layout, "RECORD_MIN", layout.HEADER_BYTES)
    arrays = [np.full((1, 8 + head), head, np.float16) for head in range(9)]
    entry = write(tmp_path / "a.mdb", arrays)
    shard = open_shard(tmp_path / "a.mdb", entry)
    reads = [shard.read(Kind.KEYS, head, check_digest=True) for head in range(9)]
    assert any(read.flags.owndata for read in reads)
    for read, array in zip(reads, arrays, strict=True):
        np.testing.assert_array_equal(read, array)
        assert not read.flags.writeable


def test_views_cannot_be_written(tmp_path: Path) -> None:
    entry = write(tmp_path / "a.mdb", [np.zeros((100, 64), np.float16)])
    view = open_shard(tmp_path / "a.mdb", entry).read(Kind.KEYS, 0, check_digest=True)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def test_file_is_mapped_once_and_until_the_last_view_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    entry = write(path, [np.full((100, 64), 7, np.float16)])
    before = mapped_files()
    first, second = open_shard(path, entry), open_shard(path, entry)
    assert mapped_files() == before + 1 and map_lines(path) == 1
    view = first.read(Kind.KEYS, 0, check_digest=True)[10:20]
    del first, second
    assert map_lines(path) == 1, "a view that is kept keeps its file mapped"
    assert view.sum() == 7 * 640
    del view
    assert mapped_files() == before and map_lines(path) == 0


def test_threads_share_one_map(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    entry = write(path, [np.full((100, 64), 7, np.float16)])
    before, sums = mapped_files(), []

    def work() -> None:
        for _ in range(50):
            read = open_shard(path, entry).read(Kind.KEYS, 0, check_digest=False)
            sums.append(int(read.sum(dtype=np.int64)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [7 * 6400] * 200
    assert mapped_files() == before


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_chunks_are_the_digests_of_each_mebibyte(tmp_path: Path, size: int) -> None:
    raw = np.random.default_rng(size).bytes(size)
    path = tmp_path / "a"
    path.write_bytes(raw)
    parts = [raw[:CHUNK_BYTES], raw[CHUNK_BYTES:]]
    with open_regular(path) as fd:
        assert tuple(file_chunks(fd)) == tuple(hashlib.sha256(p).hexdigest() for p in parts if p)


def test_size_is_compared_before_mapping(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    entry = write(path, [np.zeros((100, 64), np.float16)])
    os.truncate(path, entry.bytes - 1)
    with pytest.raises(ShardTruncated) as caught:
        open_shard(path, entry)
    assert (caught.value.found, caught.value.expected) == (entry.bytes - 1, entry.bytes)
    os.truncate(path, entry.bytes + 1)
    with pytest.raises(ShardCorrupt, match="were sealed"):
        open_shard(path, entry)


def test_pages_past_the_end_are_refused_without_digests(tmp_path: Path) -> None:
    """verify="size" trusts the pages, but not so far as to read past the file."""
    path = tmp_path / "a.mdb"
    entry = write(path, [np.zeros((1000, 64), np.float16)])
    os.truncate(path, 16 * PAGE_BYTES)
    short = FileEntry(entry.name, 16 * PAGE_BYTES, (), entry.records)
    with pytest.raises(ShardCorrupt, match="past the end"):
        open_shard(path, short)
    assert map_lines(path) == 0


def test_missing_record_and_no_lmdb_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mdb"
    entry = write(path, [np.zeros((1, 8), np.float16), np.zeros((2, 8), np.float16)])
    with pytest.raises(ShardCorrupt, match="2 records"):
        open_shard(path, FileEntry(entry.name, entry.bytes, (), entry.records[:1]))
    path.write_bytes(bytes(entry.bytes))
    with pytest.raises(ShardCorrupt, match="LMDB"):
        open_shard(path, entry)
