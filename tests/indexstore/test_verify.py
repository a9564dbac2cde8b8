"""Verifying finds what opening finds, and also answers that are no longer what they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Maker
from indexed import PROBES, IndexedMaker

from openbook.indexstore.errors import (
    ContextInUse,
    ContextMissing,
    OperationCancelled,
    ShardCorrupt,
    ShardTruncated,
)
from openbook.indexstore.layout import HEADER_BYTES
from openbook.indexstore.mapped import mapped_files
from openbook.indexstore.store import delete, open_context
from openbook.indexstore.verify import PROBE_TOLERANCE, verify_context


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    return IndexedMaker(tmp_path).context()


@pytest.mark.parametrize("threads", [1, 2])
def test_sound_context_is_checked_whole(indexed: Path, threads: int) -> None:
    before = mapped_files()
    report = verify_context(indexed, threads=threads)
    assert report.records_checked == 2 + 2 * (7 + 2 * 12)
    assert report.bytes_checked == sum(path.stat().st_size for path in indexed.glob("*.mdb"))
    assert report.probes_checked == 2 * 4 * PROBES
    assert 0 <= report.largest_error < PROBE_TOLERANCE / 10
    assert mapped_files() == before


@pytest.mark.parametrize("tokens", [1, 640, 641])
def test_context_without_a_middle_has_no_probes_to_answer(tmp_path: Path, tokens: int) -> None:
    report = verify_context((IndexedMaker if tokens > 640 else Maker)(tmp_path).context(tokens))
    assert report.probes_checked == (2 * 4 * PROBES if tokens > 640 else 0)


def edited(key: bytes, change: Any) -> Any:
    """Change the first number of a record by `change(old)`, as float32."""

    def edit(records: dict[bytes, bytes]) -> None:
        value = bytearray(records[key])
        (number,) = np.frombuffer(value, np.float32, 1, HEADER_BYTES)
        value[HEADER_BYTES : HEADER_BYTES + 4] = np.float32(change(number)).tobytes()
        records[key] = bytes(value)

    return edit


@pytest.mark.parametrize(
    ("key", "change", "problem"),
    [
        (b"probe_out", lambda x: x + 0.01, "query head 0: out of a probe differs"),
        (b"probe_lse", lambda x: x * 1.001, "query head 0: lse of a probe differs"),
        (b"probe_lse", lambda x: np.nan, "query head 0: lse of a probe differs"),
    ],
)
def test_wrong_answer_is_found_though_all_digests_match(
    indexed: Path, forger: Any, key: bytes, change: Any, problem: str
) -> None:
    forger.records(indexed, "layer-001.mdb", edited(key, change))
    forger.record_digests(indexed, "layer-001.mdb")
    open_context(indexed, model_fingerprint=None).close()
    with pytest.raises(ShardCorrupt, match=rf"layer-001\.mdb: {problem}"):
        verify_context(indexed)


def test_forged_scaling_is_found(indexed: Path, forger: Any) -> None:
    forger.manifest(indexed, lambda whole: whole["fields"].update(scaling=[0.25, 0.26]))
    with pytest.raises(ShardCorrupt, match=r"layer-001\.mdb: query head 0"):
        verify_context(indexed)


def test_damage_is_found_without_opening(indexed: Path) -> None:
    os.chmod(indexed / "layer-001.mdb", 0o600)
    with open(indexed / "layer-001.mdb", "r+b") as file:
        file.seek(5 * 4096 + 100)
        file.write(b"\xff\x00\xff")
    with pytest.raises(ShardCorrupt, match="MiB 0"):
        verify_context(indexed)
    os.truncate(indexed / "layer-001.mdb", 4096)
    with pytest.raises(ShardTruncated):
        verify_context(indexed)
    with pytest.raises(ContextMissing):
        verify_context(indexed / "absent")


@pytest.mark.parametrize("answers", [0, 1, 2, 4])
def test_cancelled_verification_stops_and_lets_go(indexed: Path, answers: int) -> None:
    asked: list[bool] = []

    def is_cancelled() -> bool:
        asked.append(True)
        return len(asked) > answers

    before = mapped_files()
    with pytest.raises(OperationCancelled):
        verify_context(indexed, is_cancelled=is_cancelled)
    assert len(asked) == answers + 1 and mapped_files() == before
    delete(indexed, indexed.parent.parent / ".trash")


def test_context_is_held_while_it_is_verified(indexed: Path) -> None:
    def is_cancelled() -> bool:
        with pytest.raises(ContextInUse):
            delete(indexed, indexed.parent.parent / ".trash")
        return False

    assert verify_context(indexed, is_cancelled=is_cancelled).probes_checked
