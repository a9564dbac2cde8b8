"""How far a draft is, so that another writer can go on where the last one died.

Owns the checkpoint's files in a draft and the check of all that it names. It knows nothing of who
may go on with a draft (draft.py) or of what the state means (the writer's).

    <draft>/checkpoint.json    {"checkpoint":{label, state, blob, files},"sha256":"…"}
    <draft>/state-<n>.bin      what the writer needs besides, in bytes

Nothing here is synced: a killed process leaves its writes to the system, and after a power cut the
digests tell what is missing, so that the draft is not gone on with. A checkpoint replaces the one
before by a rename; until then that one holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openbook.indexstore.canonical import MANIFEST_BYTES_MAX, file_fields, parse_file
from openbook.indexstore.errors import IndexStoreError
from openbook.indexstore.jsonfields import (
    a_list,
    a_string,
    an_object,
    exactly,
    no_constant,
    no_duplicates,
)
from openbook.indexstore.manifest import TOKENS_NAME, FileEntry, layer_name
from openbook.indexstore.shard import MODE_WRITING, check_size, file_chunks, open_regular

CHECKPOINT_NAME = "checkpoint.json"
_PART_NAME = "checkpoint.part"
_BLOB = re.compile(r"state-[0-9]{1,6}\.bin")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SEALED = re.compile(rb'\{"checkpoint":(.*),"sha256":"([0-9a-f]{64})"\}\n', re.DOTALL)
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a draft holds for sure: its files so far, and the writer's state and blob."""

    label: str  # whose draft it is, such as a context id
    state: Mapping[str, Any]  # the writer's own, as JSON keeps it
    blob: FileEntry
    files: tuple[FileEntry, ...]


def write_checkpoint(
    directory: Path,
    blob: memoryview,
    *,
    label: str,
    state: Mapping[str, Any],
    files: tuple[FileEntry, ...],
    before: Checkpoint | None,
) -> Checkpoint:
    """Write a checkpoint in the place of the one `before`, and return it.

    Raises ValueError for a label that is none, a state that JSON does not keep, an empty blob or
    files that are not the tokens and the first layers, OSError.
    """
    number = 0 if before is None else int(before.blob.name[6:-4]) + 1
    name = f"state-{number}.bin"
    with open(os.open(directory / name, _NEW_FILE, MODE_WRITING), "r+b") as file:
        file.write(blob)
        file.flush()
        chunks = tuple(file_chunks(file.fileno()))
    made = Checkpoint(label, state, FileEntry(name, blob.nbytes, chunks, ()), files)
    raw = _encode(made)
    if _decode(raw) != made:
        raise ValueError("the checkpoint does not read back as written")
    with open(os.open(directory / _PART_NAME, _NEW_FILE, MODE_WRITING), "wb") as file:
        file.write(raw)
    os.rename(directory / _PART_NAME, directory / CHECKPOINT_NAME)
    if before is not None:
        (directory / before.blob.name).unlink()
    return made


def read_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the checkpoint in a draft, its files not looked at; None without one that is whole."""
    try:
        with open_regular(directory / CHECKPOINT_NAME) as fd:
            with open(fd, "rb", closefd=False) as file:
                return _decode(file.read(MANIFEST_BYTES_MAX + 1))
    except (IndexStoreError, OSError, ValueError, RecursionError):
        return None


def is_whole(directory: Path, checkpoint: Checkpoint) -> bool:
    """Say whether every file that a checkpoint names is there, to the last byte."""
    try:
        for entry in (checkpoint.blob, *checkpoint.files):
            with open_regular(directory / entry.name) as fd:
                check_size(directory / entry.name, fd, entry)
                if tuple(file_chunks(fd)) != entry.chunks:
                    return False
    except (IndexStoreError, OSError):
        return False
    return True


def drop_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Remove a checkpoint; the files that it names stay. Raises OSError."""
    (directory / CHECKPOINT_NAME).unlink(missing_ok=True)
    (directory / checkpoint.blob.name).unlink(missing_ok=True)


def _encode(checkpoint: Checkpoint) -> bytes:
    fields = {
        "label": checkpoint.label,
        "state": checkpoint.state,
        "blob": file_fields(checkpoint.blob),
        "files": [file_fields(file) for file in checkpoint.files],
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"checkpoint":{text},"sha256":"{digest}"}}\n'.encode()


def _decode(raw: bytes) -> Checkpoint:
    """Read a checkpoint's file. Raises ValueError."""
    found = _SEALED.fullmatch(raw)
    if found is None or hashlib.sha256(found[1]).hexdigest().encode() != found[2]:
        raise ValueError("not a whole checkpoint")
    fields = json.loads(found[1], object_pairs_hook=no_duplicates, parse_constant=no_constant)
    exactly(an_object(fields, "checkpoint"), {"label", "state", "blob", "files"}, "checkpoint")
    files = tuple(parse_file(file, index) for index, file in enumerate(a_list(fields, "files")))
    names = [TOKENS_NAME, *(layer_name(layer) for layer in range(len(files) - 1))]
    if [file.name for file in files] != names:
        raise ValueError("the files of a checkpoint are the tokens and the first layers")
    blob = parse_file(fields["blob"], 0)
    if _BLOB.fullmatch(blob.name) is None:
        raise ValueError("the blob of a checkpoint has another name")
    state = an_object(fields["state"], "state")
    return Checkpoint(a_string(fields, "label", _LABEL), state, blob, files)
