"""A draft goes on from its last checkpoint, byte for byte, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from shimmed import Shimmed
from test_faults import faultable

from openbook.indexstore.checkpoint import CHECKPOINT_NAME, read_checkpoint
from openbook.indexstore.store import Draft, adopt, begin, publish, sweep

LABEL = "0" * 32
BLOB = memoryview(bytes(range(256)) * 9000)


def left(maker: Any, *, layers: int = 1, label: str = LABEL) -> Draft:
    """Leave a draft behind at a checkpoint, as a killed writer does; one more layer came after."""
    fields = maker.fields()
    draft: Draft = begin(maker.root)
    draft.write_tokens(*maker.tokens(fields))
    for layer in range(layers):
        draft.write_layer(layer, maker.layer(layer, fields))
    draft.save(label, {"layers": layers, "spent": [0.1, 1e-300]}, BLOB)
    if layers < fields.layers:
        draft.write_layer(layers, maker.layer(99, fields))
    draft.release()
    return draft


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def finished(maker: Any, draft: Draft) -> dict[str, bytes]:
    fields = maker.fields()
    for layer in range(len(draft.checkpoint.files) - 1, fields.layers) if draft.checkpoint else ():
        draft.write_layer(layer, maker.layer(layer, fields))
    draft.seal(fields)
    assert publish(draft, maker.final())
    return contents(maker.final())


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_draft_gone_on_with_is_the_one_written_at_once(
    maker: Any, tmp_path: Path, layers: int
) -> None:
    whole = contents(type(maker)(tmp_path / "whole").context())
    left(maker, layers=layers)
    draft = adopt(maker.root, LABEL)
    assert draft is not None and draft.checkpoint is not None
    assert draft.checkpoint.state == {"layers": layers, "spent": [0.1, 1e-300]}
    assert (draft.path / draft.checkpoint.blob.name).read_bytes() == BLOB
    assert finished(maker, draft) == whole
    assert list((maker.root / ".tmp").iterdir()) == []


def test_the_last_of_several_checkpoints_counts(maker: Any) -> None:
    fields = maker.fields()
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(fields))
        draft.save(LABEL, {"layers": 0}, memoryview(b"first"))
        draft.write_layer(0, maker.layer(0, fields))
        draft.save(LABEL, {"layers": 1}, memoryview(b"second"))
        names = {path.name for path in draft.path.iterdir()}
        assert names == {"tokens.mdb", "layer-000.mdb", CHECKPOINT_NAME, "state-1.bin"}
        draft.release()
    again = adopt(maker.root, LABEL)
    assert again is not None and again.checkpoint is not None
    assert again.checkpoint.state == {"layers": 1}
    again.save(LABEL, {"layers": 1}, memoryview(b"third"))
    assert sorted(path.name for path in again.path.iterdir())[-2:] == ["state-2.bin", "tokens.mdb"]
    again.discard()


def test_a_draft_in_use_or_of_another_label_is_not_taken(maker: Any) -> None:
    fields = maker.fields()
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(fields))
        draft.save(LABEL, {}, BLOB)
        assert adopt(maker.root, LABEL) is None
        draft.release()
    assert adopt(maker.root, "1" * 32) is None
    taken = adopt(maker.root, LABEL)
    assert taken is not None and adopt(maker.root, LABEL) is None
    taken.discard()
    assert adopt(maker.root, LABEL) is None
    assert adopt(maker.root / "nowhere", LABEL) is None


FILES = [CHECKPOINT_NAME, "state-0.bin", "tokens.mdb", "layer-000.mdb"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flipped", "short", "long", "gone", "link", "pipe"])
def test_a_damaged_draft_is_not_gone_on_with(maker: Any, file: str, damage: str) -> None:
    path = left(maker).path / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    changed = {"flipped": raw, "short": path.read_bytes()[:-1], "long": path.read_bytes() + b"x"}
    if damage in changed:
        path.write_bytes(changed[damage])
    else:
        os.rename(path, path.with_name("away"))
    if damage == "link":
        path.symlink_to("away")
    elif damage == "pipe":
        os.mkfifo(path)
    assert adopt(maker.root, LABEL) is None
    sweep(maker.root, keep=lambda _: True)
    assert list((maker.root / ".tmp").iterdir()) == []


def test_a_draft_with_something_in_the_way_is_not_gone_on_with(maker: Any) -> None:
    path = left(maker).path
    (path / "folder").mkdir()
    assert adopt(maker.root, LABEL) is None
    assert not path.exists()


def test_a_sweep_keeps_what_is_to_be_gone_on_with(maker: Any) -> None:
    kept, other = left(maker), left(maker, label="1" * 32)
    dead = begin(maker.root)
    dead.release()
    assert sorted(sweep(maker.root, keep=lambda label: label == LABEL)) == sorted(
        [other.path, dead.path]
    )
    assert kept.path.is_dir()
    assert sweep(maker.root) == [kept.path]


def test_a_cleared_draft_starts_again(maker: Any, tmp_path: Path) -> None:
    left(maker)
    draft = adopt(maker.root, LABEL)
    assert draft is not None
    draft.clear()
    assert list(draft.path.iterdir()) == [] and draft.checkpoint is None
    fields = maker.fields()
    draft.write_tokens(*maker.tokens(fields))
    for layer in range(fields.layers):
        draft.write_layer(layer, maker.layer(layer, fields))
    assert finished(maker, draft) == contents(type(maker)(tmp_path / "whole").context())


def test_layers_in_other_number_types_are_gone_with_their_checkpoint(maker: Any) -> None:
    left(maker)
    draft = adopt(maker.root, LABEL)
    assert draft is not None
    draft.drop_layers()
    assert [path.name for path in draft.path.iterdir()] == ["tokens.mdb"]
    draft.release()
    assert adopt(maker.root, LABEL) is None


@pytest.mark.parametrize(
    ("label", "state", "blob"),
    [("../x", {}, b"x"), ("", {}, b"x"), (LABEL, {"a": (1,)}, b"x"), (LABEL, {}, b"")],
)
def test_a_checkpoint_that_would_not_read_back_is_refused(
    maker: Any, label: str, state: Any, blob: bytes
) -> None:
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(maker.fields()))
        with pytest.raises(ValueError):
            draft.save(label, state, memoryview(blob))


def test_a_checkpoint_with_a_gap_in_its_layers_is_refused(maker: Any) -> None:
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(maker.fields()))
        draft.write_layer(1, maker.layer(1, maker.fields()))
        with pytest.raises(ValueError, match="first layers"):
            draft.save(LABEL, {}, BLOB)
        assert read_checkpoint(draft.path) is None


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("kill", 12),
        ("eio", 40),
        pytest.param("kill", 1, marks=pytest.mark.slow),
        pytest.param("eio", 1, marks=pytest.mark.slow),
        pytest.param("enospc", 1, marks=pytest.mark.slow),
        pytest.param("short", 1, marks=pytest.mark.slow),
    ],
)
def test_fault_at_a_call_leaves_what_can_be_gone_on_with(
    shimmed: Shimmed, kind: str, step: int
) -> None:
    numbers = faultable(shimmed.trace("saved"), kind, step)
    outcomes = shimmed.matrix(kind, numbers, "saved")
    ends = {"kill": {"SIGKILL"}, "short": {"failed", "whole"}}.get(kind, {"failed"})
    allowed = {f"{end} {found} whole" for end in ends for found in ("absent", "old")}
    assert set(outcomes) <= allowed, outcomes
    assert outcomes.total() == len(numbers)
