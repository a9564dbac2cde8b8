"""A draft is private, whole or gone, and says no to what does not fit."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from openbook.indexstore import draft as draft_module
from openbook.indexstore.draft import write_error
from openbook.indexstore.errors import StoreFull, StoreWriteFailed
from openbook.indexstore.store import begin

PROCESS = Path(__file__).with_name("store_process.py")


def leftovers(root: Path) -> list[Path]:
    return list((root / ".tmp").iterdir())


def test_draft_is_private_and_sealed_files_are_read_only(maker: Any) -> None:
    with maker.draft(maker.fields()) as draft:
        assert draft.path.parent == maker.root / ".tmp"
        assert stat.S_IMODE(draft.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(draft.path.parent.stat().st_mode) == 0o700
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in draft.path.iterdir()}
    names = ["manifest.json", "tokens.mdb", "layer-000.mdb", "layer-001.mdb"]
    assert modes == dict.fromkeys(names, 0o444)


def test_files_are_private_while_they_are_written(maker: Any) -> None:
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(maker.fields()))
        (file,) = draft.path.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_existing_directory_is_synced_by_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made it may have died before its name was durable."""
    synced: list[Path] = []
    monkeypatch.setattr(draft_module, "sync_directory", synced.append)
    (tmp_path / "a").mkdir()
    draft_module.make_directories(tmp_path / "a")
    assert synced == [tmp_path]
    draft_module.make_directories(tmp_path / "a" / "b" / "c")
    assert synced[1:] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_discarded_draft_leaves_nothing(maker: Any) -> None:
    with begin(maker.root) as draft:
        draft.write_layer(0, maker.layer(0, maker.fields()))
    assert leftovers(maker.root) == []
    draft.discard()
    with pytest.raises(ValueError, match="discarded"):
        draft.write_layer(1, maker.layer(0, maker.fields()))


def test_layers_may_come_in_any_order_but_once(maker: Any) -> None:
    fields = maker.fields()
    with begin(maker.root) as draft:
        draft.write_layer(1, maker.layer(1, fields))
        draft.write_tokens(*maker.tokens(fields))
        draft.write_layer(0, maker.layer(0, fields))
        with pytest.raises(ValueError, match="already written"):
            draft.write_layer(0, maker.layer(0, fields))
        assert [file.name for file in draft.seal(fields).files][1:] == [
            "layer-000.mdb",
            "layer-001.mdb",
        ]
        with pytest.raises(ValueError, match="sealed"):
            draft.seal(fields)


def test_seal_names_a_missing_file_and_can_be_tried_again(maker: Any) -> None:
    fields = maker.fields()
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(fields))
        draft.write_layer(0, maker.layer(0, fields))
        with pytest.raises(ValueError, match="2 files written, 3 expected"):
            draft.seal(fields)
        draft.write_layer(1, maker.layer(1, fields))
        assert draft.seal(fields).token_count == 700


@pytest.mark.parametrize(
    "changes", [{"token_count": 701}, {"head_dim": 17}, {"kv_dtype": "float32"}, {"query_heads": 2}]
)
def test_seal_refuses_fields_that_are_not_the_files(maker: Any, changes: Any) -> None:
    fields = maker.fields()
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(fields))
        for layer in range(2):
            draft.write_layer(layer, maker.layer(layer, fields))
        with pytest.raises(ValueError, match="expected"):
            draft.seal(replace(fields, **changes))


@pytest.mark.parametrize("name", ["graph", "entries", "cluster_of", "members"])
def test_id_out_of_range_is_never_written(maker: Any, name: str) -> None:
    records = maker.layer(0, maker.fields())
    ids = getattr(records.heads[1], name).copy()
    ids.flat[-1] = 2**32 - 1
    heads = (records.heads[0], replace(records.heads[1], **{name: ids}))
    with begin(maker.root) as draft:
        with pytest.raises(ValueError, match=f"head 1: {name} holds id 4294967295"):
            draft.write_layer(0, replace(records, heads=heads))
        assert list(draft.path.iterdir()) == []


def test_arrays_that_do_not_fit_each_other_are_named(maker: Any) -> None:
    records = maker.layer(0, maker.fields())
    with begin(maker.root) as draft:
        with pytest.raises(ValueError, match="probe_lse: p is 1, expected 2"):
            draft.write_layer(0, replace(records, probe_lse=records.probe_lse[:, :1]))
        with pytest.raises(ValueError, match="float64"):
            draft.write_layer(0, replace(records, probe_lse=records.probe_lse.astype(np.float64)))
        with pytest.raises(ValueError, match="none negative"):
            draft.write_tokens(np.array([1, -1], np.int32), np.zeros((2, 2), np.int32))
        with pytest.raises(ValueError, match="n is 3, expected 2"):
            draft.write_tokens(np.array([1, 1], np.int32), np.zeros((3, 2), np.int32))


def test_arrays_need_not_be_contiguous(maker: Any) -> None:
    records = maker.layer(0, maker.fields())
    strided = np.asfortranarray(records.window_keys)
    fields = maker.fields()
    with begin(maker.root) as draft, begin(maker.root) as other:
        for each, array in ((draft, strided), (other, records.window_keys)):
            each.write_tokens(*maker.tokens(fields))
            each.write_layer(0, replace(records, window_keys=array))
            each.write_layer(1, records)
        assert draft.seal(fields) == other.seal(fields)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_failed_write_discards_the_draft(
    maker: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    fields = maker.fields()
    draft = begin(maker.root)
    draft.write_tokens(*maker.tokens(fields))
    draft.write_layer(0, maker.layer(0, fields))
    if call == "write":
        monkeypatch.setattr(draft_module, "write_shard", fail)
        with pytest.raises(StoreWriteFailed, match=r"layer-001\.mdb"):
            draft.write_layer(1, maker.layer(1, fields))
    else:
        draft.write_layer(1, maker.layer(1, fields))
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreWriteFailed, match=r"tokens\.mdb"):
            draft.seal(fields)
    assert leftovers(maker.root) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StoreFull),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), StoreFull),
        (OSError(errno.EIO, "Input/output error"), StoreWriteFailed),
        (OSError(errno.EROFS, "Read-only file system"), StoreWriteFailed),
        (lmdb.Error("mdb_txn_commit: No space left on device"), StoreFull),
        (lmdb.Error("mdb_txn_commit: Input/output error"), StoreWriteFailed),
        (lmdb.MapFullError("mdb_put: full"), StoreWriteFailed),
    ],
)
def test_disk_errors_have_one_class_each(tmp_path: Path, error: Any, expected: type) -> None:
    assert type(write_error(error, "layer-000.mdb", tmp_path)) is expected


def test_io_error_on_a_disk_without_space_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((*real[:4], 0, *real[5:]))  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    error = lmdb.Error("mdb_txn_commit: Input/output error")
    assert type(write_error(error, "layer-000.mdb", tmp_path)) is StoreFull


FULL = """
import pathlib, sys
from conftest import Maker
from openbook.indexstore.errors import StoreFull
maker, sealed, full = Maker(pathlib.Path(sys.argv[1])), 0, False
try:
    for number in range(99):
        maker.context(context_id=f"c{number}")
        sealed += 1
except StoreFull:
    full = True
left = list((maker.root / ".tmp").iterdir())
print(sealed, full, left)
"""


@pytest.mark.parametrize("size_kib", [40, 700, 900, 1500])
def test_really_full_disk_is_store_full_and_leaves_no_bytes(tmp_path: Path, size_kib: int) -> None:
    mount = f"mount -t tmpfs -o size={size_kib}k none '{tmp_path}' && exec \"$@\""
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", FULL, str(tmp_path)]
    if subprocess.run([*command[:5], "sh", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here to mount a small disk in")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split(maxsplit=1)[1] == "True []\n"
