"""An opened context is what was sealed, or a typed error before any of it is used."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openbook.indexstore.errors import (
    ContextIncomplete,
    ContextMissing,
    FingerprintMismatch,
    FormatUnsupported,
    ShardCorrupt,
    ShardTruncated,
    StoreReadFailed,
)
from openbook.indexstore.layer import layer_arrays
from openbook.indexstore.layout import HEADER_BYTES
from openbook.indexstore.mapped import mapped_files
from openbook.indexstore.store import StoredContext, open_context, read_manifest, read_summary

FILES = ["manifest.json", "tokens.mdb", "layer-000.mdb", "layer-001.mdb"]
PAGE = 4096


def open_it(path: Path, **options: Any) -> StoredContext:
    return open_context(path, model_fingerprint="sha256:model-a", **options)


def damage(file: Path, position: int, flip: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ flip]))


@pytest.mark.parametrize("tokens", [1, 639, 640, 641, 700])
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "float32"])
def test_context_reads_back_bit_for_bit(maker: Any, tokens: int, kv_dtype: str) -> None:
    fields = maker.fields(tokens, kv_dtype=kv_dtype)
    path = maker.context(tokens, kv_dtype=kv_dtype)
    with open_it(path) as context:
        ids, offsets = maker.tokens(fields)
        np.testing.assert_array_equal(context.token_ids, ids)
        np.testing.assert_array_equal(context.offsets, offsets)
        for layer in range(2):
            written, read = maker.layer(layer, fields), context.layer(layer)
            assert len(read.heads) == (2 if tokens > 640 else 0)
            for (kind, head, a), (*_, b) in zip(
                layer_arrays(written), layer_arrays(read), strict=True
            ):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), (kind, head)
                assert a.tobytes() == b.tobytes(), (kind, head)
                assert not b.flags.writeable and b.ctypes.data % 64 == 0, (kind, head)
        assert not context.token_ids.flags.writeable


def test_layers_are_ready_in_order_and_close_unmaps_them(context: Path) -> None:
    before, ready = mapped_files(), []
    opened = open_it(context, on_layer=ready.append)
    assert ready == [0, 1]
    assert mapped_files() == before + 2, "one descriptor a layer, the tokens are copied"
    assert opened.bytes_mapped == sum((context / name).stat().st_size for name in FILES[2:])
    opened.close()
    opened.close()
    assert mapped_files() == before and opened.bytes_mapped == 0
    with pytest.raises(ValueError, match="closed"):
        opened.layer(0)


def test_view_kept_past_close_stays_readable(context: Path) -> None:
    opened = open_it(context)
    keys = opened.layer(0).heads[0].keys
    expected = keys.copy()
    opened.close()
    np.testing.assert_array_equal(keys, expected)


def test_failed_open_keeps_no_descriptor_and_no_map(context: Path) -> None:
    damage(context / FILES[3], 5 * PAGE, 1)
    before, descriptors = mapped_files(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(ShardCorrupt):
            open_it(context)
    assert mapped_files() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_failing_callback_closes_the_context(context: Path) -> None:
    def fail(layer: int) -> None:
        raise RuntimeError("no room on the device")

    before = mapped_files()
    with pytest.raises(RuntimeError):
        open_it(context, on_layer=fail)
    assert mapped_files() == before


def test_no_descriptors_left_is_not_corruption(
    context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(path).name == "layer-001.mdb":
            raise OSError(24, "Too many open files")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreReadFailed, match="Too many open files"):
        open_it(context)


@pytest.mark.parametrize("verify", ["full", "size"])
@pytest.mark.parametrize("name", FILES[1:])
def test_file_cut_at_any_page_is_refused_before_mapping(
    context: Path, name: str, verify: Any
) -> None:
    size = (context / name).stat().st_size
    os.chmod(context / name, 0o600)
    for length in range(size - PAGE, -1, -PAGE):
        os.truncate(context / name, length)
        with pytest.raises(ShardTruncated) as caught:
            open_it(context, verify=verify)
        assert (caught.value.file, caught.value.found) == (name, length)


def test_cut_manifest_is_refused(context: Path) -> None:
    manifest = context / "manifest.json"
    os.chmod(manifest, 0o600)
    for length in (manifest.stat().st_size - 1, 4096, 1, 0):
        os.truncate(manifest, length)
        with pytest.raises(ShardCorrupt, match="not a manifest"):
            open_it(context)


def test_huge_manifest_is_refused_unread(context: Path) -> None:
    os.chmod(context / "manifest.json", 0o600)
    os.truncate(context / "manifest.json", 1 << 40)  # sparse
    with pytest.raises(ShardCorrupt, match="the limit is"):
        open_it(context)


def test_what_is_no_context_is_named(context: Path) -> None:
    with pytest.raises(ContextMissing):
        open_it(context / "absent")
    with pytest.raises(ContextMissing):
        open_it(context / "manifest.json")
    link = context.with_name("link")
    link.symlink_to(context)
    with pytest.raises(ContextMissing):
        open_it(link)
    (context / "manifest.json").unlink()
    for read in (open_it, read_manifest, read_summary):
        with pytest.raises(ContextIncomplete):
            read(context)


@pytest.mark.timeout(20)  # a FIFO that is waited for is the fault
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused(context: Path, name: str) -> None:
    target, moved = context / name, context / "moved"
    target.rename(moved)

    def make_socket() -> None:
        here = os.getcwd()
        os.chdir(context)  # a socket's whole path must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
        os.chdir(here)

    for make, remove in (
        (lambda: os.mkfifo(target), target.unlink),
        (lambda: target.symlink_to(moved), target.unlink),
        (lambda: target.symlink_to("absent"), target.unlink),
        (make_socket, target.unlink),
        (target.mkdir, target.rmdir),
    ):
        make()
        with pytest.raises(ShardCorrupt, match=name):
            open_it(context)
        remove()
    if name != "manifest.json":
        with pytest.raises(ShardCorrupt, match="is missing"):
            open_it(context)


def test_another_models_context_is_refused_by_name(context: Path) -> None:
    with pytest.raises(FingerprintMismatch) as caught:
        open_context(context, model_fingerprint="sha256:model-b")
    assert caught.value.field == "model_fingerprint"
    assert (caught.value.expected, caught.value.found) == ("sha256:model-b", "sha256:model-a")
    open_context(context, model_fingerprint=None).close()


def test_newer_format_is_refused_before_the_rest(context: Path, forger: Any) -> None:
    forger.manifest(context, lambda whole: whole["fields"].update(format_version=3, news="x"))
    with pytest.raises(FormatUnsupported, match="format 3 .* reads 1 to 2"):
        open_it(context)


def swap(first: bytes, second: bytes) -> Callable[[dict[bytes, bytes]], None]:
    def edit(records: dict[bytes, bytes]) -> None:
        records[first], records[second] = records[second], records[first]

    return edit


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"keys/000", b"keys/001"),
        (b"keys/000", b"values/000"),
        (b"centre/000", b"scale/000"),
        (b"window_keys", b"window_values"),
    ],
)
def test_records_swapped_within_a_layer_are_found(
    context: Path, forger: Any, first: bytes, second: bytes
) -> None:
    """The file's own digests are made right, so that only the records' can tell."""
    forger.records(context, FILES[2], swap(first, second))
    with pytest.raises(ShardCorrupt, match=r"layer-000\.mdb: .* not the one that was sealed"):
        open_it(context)


def test_record_of_another_layer_or_context_is_found(maker: Any, forger: Any) -> None:
    path, other = maker.context(), maker.context(seed=9, context_id="other")
    stolen: dict[bytes, bytes] = {}
    forger.records(other, FILES[2], stolen.update)  # rewrites it as it is
    forger.records(other, FILES[2], lambda records: stolen.update(records))
    forger.records(path, FILES[2], lambda r: r.update({b"keys/000": stolen[b"keys/000"]}))
    with pytest.raises(ShardCorrupt, match="keys/000: its digest does not match"):
        open_it(path)
    forger.records(other, FILES[3], lambda r: r.update({b"keys/000": stolen[b"keys/000"]}))
    with pytest.raises(ShardCorrupt, match="keys/000: the record is not the one"):
        open_it(other)


def test_missing_and_superfluous_records_are_found(context: Path, forger: Any) -> None:
    def add(records: dict[bytes, bytes]) -> None:
        records[b"keys/099"] = records[b"keys/000"]

    forger.records(context, FILES[2], add)
    with pytest.raises(ShardCorrupt, match=r"42 records"):
        open_it(context)


def set_last_u32(key: bytes, count: int, number: int) -> Callable[[dict[bytes, bytes]], None]:
    """Set the last of `count` numbers of a record, header and all else unchanged."""

    def edit(records: dict[bytes, bytes]) -> None:
        value = bytearray(records[key])
        struct.pack_into("<I", value, HEADER_BYTES + 4 * (count - 1), number)
        records[key] = bytes(value)

    return edit


@pytest.mark.parametrize(
    ("key", "count", "number", "problem"),
    [
        (b"graph/001", 60 * 8, 60, "head 1: graph holds id 60 of 60"),
        (b"graph/001", 60 * 8, 2**32 - 1, "head 1: graph holds id 4294967295"),
        (b"entries/000", 4, 60, "head 0: entries holds id 60 of 60"),
        (b"cluster_of/000", 60, 3, "head 0: cluster_of holds id 3 of 3"),
        (b"cluster_of/000", 60, 2**31, "head 0: cluster_of"),
        (b"counts/001", 3, 1000, "head 1: counts differ"),
        (b"members/001", 60, 60, "head 1: members holds id 60 of 60"),
        (b"codebook/000", 8 * 16 * 2, 0x7FC00000, "head 0: codebook holds a number that is not"),
        (b"code_spreads/000", 16, 0x7F800000, "head 0: code_spreads holds a number that is not"),
    ],
)
def test_forged_ids_are_refused_though_all_digests_match(
    context: Path, forger: Any, key: bytes, count: int, number: int, problem: str
) -> None:
    forger.records(context, FILES[3], set_last_u32(key, count, number))
    forger.record_digests(context, FILES[3])
    with pytest.raises(ShardCorrupt, match=problem):
        open_it(context)


@pytest.mark.parametrize("field", [4, 6, 7, 8, 10, 12, 13, 16, 24, 40])
def test_forged_headers_are_refused_though_all_digests_match(
    context: Path, forger: Any, field: int
) -> None:
    def edit(records: dict[bytes, bytes]) -> None:
        value = bytearray(records[b"keys/001"])
        value[field] ^= 0x41
        records[b"keys/001"] = bytes(value)

    forger.records(context, FILES[2], edit)
    forger.record_digests(context, FILES[2])
    with pytest.raises(ShardCorrupt, match="keys/001: "):
        open_it(context)


def test_verify_size_trusts_contents_but_not_ids(context: Path, forger: Any) -> None:
    raw = (context / FILES[2]).read_bytes()
    with open_it(context) as opened:
        position = raw.index(opened.layer(0).heads[0].values.tobytes())
    os.chmod(context / FILES[2], 0o600)
    damage(context / FILES[2], position, 1)
    open_it(context, verify="size").close()
    with pytest.raises(ShardCorrupt, match="MiB 0 does not match"):
        open_it(context)
    forger.records(context, FILES[3], set_last_u32(b"graph/001", 60 * 8, 60))
    with pytest.raises(ShardCorrupt, match="graph holds id"):
        open_it(context, verify="size")
