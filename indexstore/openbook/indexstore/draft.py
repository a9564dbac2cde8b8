"""Writing one context: a private directory until it is sealed.

Owns the life of a draft: files written record by record, synced and digested once at the seal,
gone after any failed write; and how another writer takes over one whose writer died (adopt). It
knows nothing of where a context is published (store.py).

A draft lives in <root>/.tmp/<uuid>/, mode 0700. Its writer holds an exclusive flock on the
directory itself, from its first moment until it is published or gone: a sweep takes what it can
lock, so it removes what a killed writer left and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.canonical import decode, encode
from openbook.indexstore.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    drop_checkpoint,
    is_whole,
    read_checkpoint,
    write_checkpoint,
)
from openbook.indexstore.errors import IndexStoreError, StoreFull, StoreWriteFailed
from openbook.indexstore.layer import LayerRecords, check_head, layer_arrays, layer_infos
from openbook.indexstore.layout import Kind, RecordInfo, check_shapes, info_of
from openbook.indexstore.manifest import (
    MANIFEST_NAME,
    TOKENS_NAME,
    FileEntry,
    Manifest,
    ManifestFields,
    RecordEntry,
    complete,
    layer_name,
)
from openbook.indexstore.shard import (
    MODE_SEALED,
    MODE_WRITING,
    file_chunks,
    open_regular,
    write_shard,
)

TMP_NAME = ".tmp"
MODE_DIRECTORY = 0o700
FULL_BYTES_MAX = 1 << 20  # less free space than this, and an unexplained I/O error is a full disk
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def begin(root: Path) -> Draft:
    """Make an empty draft under `root`, which is made if need be.

    Raises StoreFull or StoreWriteFailed.
    """
    with _named_errors(TMP_NAME, root):
        if not (root / TMP_NAME).is_dir():
            # First the root, durably: where there is a .tmp, the root's own name is on disk.
            make_directories(root)
            (root / TMP_NAME).mkdir(mode=MODE_DIRECTORY, exist_ok=True)
        while True:
            path = root / TMP_NAME / uuid.uuid4().hex
            path.mkdir(mode=MODE_DIRECTORY)
            fd = lock_directory(path)
            if fd is not None:
                return Draft(path, fd)
            # A sweep met the new directory before its lock did, and has taken it.


def adopt(root: Path, label: str) -> Draft | None:
    """Take over the draft of `label` that a dead writer left, as it was at its last checkpoint.

    What came after the checkpoint is removed. None without such a draft; one that is damaged is
    removed. Raises StoreWriteFailed.
    """
    with _named_errors(TMP_NAME, root):
        for path in sorted((root / TMP_NAME).iterdir()) if (root / TMP_NAME).is_dir() else ():
            fd = lock_directory(path) if path.is_dir() and not path.is_symlink() else None
            if fd is None:
                continue
            found = read_checkpoint(path)
            if found is not None and found.label == label and is_whole(path, found):
                # Where its files cannot be opened, to read again is better than to fail.
                with suppress(OSError, IndexStoreError):
                    return Draft(path, fd, found)
            if found is not None and found.label == label:
                shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
    return None


def lock_directory(path: Path) -> int | None:
    """Lock a directory exclusively and return its descriptor; None if another holds or took it."""
    try:
        fd = os.open(path, _DIRECTORY_FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, _DIRECTORY_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make `path` and its missing parents, each name durable before there is anything below it.

    The deepest one that exists may be the work of a process that died before it was durable, so
    its name is synced as well.
    """
    lineage = (path, *path.parents)
    missing = [directory for directory in lineage if not directory.exists()]
    with suppress(PermissionError):  # who may not read the directory above has not made this one
        sync_directory(lineage[len(missing)].parent)
    for directory in reversed(missing):
        directory.mkdir(mode=MODE_DIRECTORY, exist_ok=True)
        sync_directory(directory.parent)


class Draft:
    """A context being written. One thread; leave the `with` block unpublished and it is gone."""

    def __init__(self, path: Path, lock_fd: int, checkpoint: Checkpoint | None = None) -> None:
        """Take over a locked directory: an empty one (begin), or one left by another (adopt)."""
        self.path = path
        self.checkpoint = checkpoint  # the last one there is
        self.manifest: Manifest | None = None  # set by seal
        self.is_moved = False  # set by the rename that publishes it
        self._lock_fd: int | None = lock_fd
        # Each file stays open from its first write to its seal, so that fsync there reports an
        # error of any write-back since.
        self._files: dict[str, tuple[int, tuple[RecordEntry, ...]]] = {}
        self._digests: dict[str, FileEntry] = {}  # of files that a checkpoint names
        if checkpoint is not None:
            self._take_over(checkpoint)

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def write_tokens(self, ids: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        """Write the token ids (n,) and each one's first and last character offset (n, 2).

        Raises ValueError for other shapes or a negative id, StoreFull or StoreWriteFailed (the
        draft is then discarded).
        """
        records = {
            info_of(Kind.TOKENS, ids, layer=None): ids,
            info_of(Kind.OFFSETS, offsets, layer=None): offsets,
        }
        check_shapes(records, {"pair": 2})
        if ids.size == 0 or int(ids.min()) < 0:
            raise ValueError("token ids must be at least one, and none negative")
        self._write(TOKENS_NAME, records)

    def write_layer(self, layer: int, records: LayerRecords) -> None:
        """Write one layer, in any order of layers.

        Raises ValueError for arrays that do not fit each other or ids out of range, StoreFull or
        StoreWriteFailed (the draft is then discarded).
        """
        if layer < 0:
            raise ValueError(f"layer must not be negative, got {layer}")
        infos = layer_infos(records, layer)
        for head, index in enumerate(records.heads):
            check_head(index, head)
        arrays = (array for _, _, array in layer_arrays(records))
        self._write(layer_name(layer), dict(zip(infos, arrays, strict=True)))

    def drop_layers(self) -> None:
        """Remove the layers written so far, to write them in another number type; tokens stay.

        Raises StoreWriteFailed (the draft is then discarded).
        """
        self._drop(name for name in tuple(self._files) if name != TOKENS_NAME)

    def clear(self) -> None:
        """Remove everything written so far. Raises StoreWriteFailed (the draft is discarded)."""
        self._drop(tuple(self._files))

    def save(self, label: str, state: Mapping[str, Any], blob: memoryview) -> None:
        """Make a checkpoint: should this process die, `adopt(root, label)` goes on from here.

        The tokens and the first layers, in any number, must be written and nothing else. `state` is
        kept as JSON keeps it, `blob` as it is. A later checkpoint replaces this one, and the seal
        removes it. Raises ValueError, StoreFull or StoreWriteFailed (the draft is then discarded).
        """
        self._check_open()
        with self._discarding(CHECKPOINT_NAME):
            for name, (fd, records) in self._files.items():
                if name not in self._digests:
                    chunks = tuple(file_chunks(fd))
                    self._digests[name] = FileEntry(name, os.fstat(fd).st_size, chunks, records)
            files = tuple(self._digests[name] for name in self._files)
            self.checkpoint = write_checkpoint(
                self.path, blob, label=label, state=state, files=files, before=self.checkpoint
            )

    def seal(self, fields: ManifestFields) -> Manifest:
        """Make every file durable and unchanging, and describe them in the manifest.

        Raises ValueError when a field is out of range or the files are not those of `fields`
        (the draft stays), StoreFull or StoreWriteFailed (it is discarded).
        """
        self._check_open()
        names = [TOKENS_NAME, *(layer_name(layer) for layer in range(fields.layers))]
        if sorted(names) != sorted(self._files):
            raise ValueError(f"{len(self._files)} files written, {len(names)} expected")
        files = []
        for name in names:
            fd, records = self._files[name]
            with self._discarding(name):
                os.fchmod(fd, MODE_SEALED)
                os.fsync(fd)
                size, chunks = os.fstat(fd).st_size, tuple(file_chunks(fd))
            files.append(FileEntry(name, size, chunks, records))
        raw = encode(complete(fields, tuple(files)))
        with self._discarding(MANIFEST_NAME):
            _write_file(self.path / MANIFEST_NAME, raw)
        self._drop_checkpoint()  # as late as can be: to sync the files may take long
        with self._discarding(MANIFEST_NAME):
            sync_directory(self.path)
        self._close_files()
        self.manifest = decode(raw)
        return self.manifest

    def discard(self) -> None:
        """Remove the draft, unless it was published. May be called again, and after anything.

        What a rename has published stays, even if a later step of that publish failed: readers
        may have it by now, and removing it file by file would show them half a context.
        """
        if self._lock_fd is None:
            return
        self._close_files()
        if not self.is_moved:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let go of the directory without removing it: published, or left for `adopt`."""
        self._close_files()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _take_over(self, checkpoint: Checkpoint) -> None:
        """Open the files of a checkpoint and remove all others. Raises OSError or the store's."""
        kept = {file.name for file in checkpoint.files} | {CHECKPOINT_NAME, checkpoint.blob.name}
        for path in self.path.iterdir():
            if path.name not in kept:
                path.unlink()
        try:
            for file in checkpoint.files:
                with open_regular(self.path / file.name) as sealed:
                    os.fchmod(sealed, MODE_WRITING)  # a seal that was cut short took it away
                fd = os.open(self.path / file.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._files[file.name] = (fd, file.records)
                self._digests[file.name] = file
        except (OSError, IndexStoreError):
            self._close_files()
            raise

    def _drop(self, names: Iterable[str]) -> None:
        """Remove files, and the checkpoint that names them first."""
        self._check_open()
        self._drop_checkpoint()
        for name in names:
            with self._discarding(name):
                os.close(self._files.pop(name)[0])
                self._digests.pop(name, None)
                (self.path / name).unlink()

    def _drop_checkpoint(self) -> None:
        if self.checkpoint is not None:
            with self._discarding(CHECKPOINT_NAME):
                drop_checkpoint(self.path, self.checkpoint)
            self.checkpoint = None

    def _write(self, name: str, records: Mapping[RecordInfo, NDArray[Any]]) -> None:
        self._check_open()
        if name in self._files:
            raise ValueError(f"{name} is already written")
        path = self.path / name
        with self._discarding(name):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE_WRITING)
            self._files[name] = (fd, ())
            self._files[name] = (fd, write_shard(path, records))

    def _check_open(self) -> None:
        if self._lock_fd is None:
            raise ValueError("the draft is discarded or published")
        if self.manifest is not None:
            raise ValueError("the draft is sealed")

    def _close_files(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    @contextmanager
    def _discarding(self, name: str) -> Iterator[None]:
        """Discard the draft when a write fails: after an I/O error its pages are not known."""
        try:
            with _named_errors(name, self.path):
                yield
        except StoreWriteFailed:
            self.discard()
            raise


@contextmanager
def _named_errors(name: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise write_error(error, name, directory) from error


def write_error(error: lmdb.Error | OSError, name: str, directory: Path) -> StoreWriteFailed:
    """Return StoreFull or StoreWriteFailed for what the disk said while `name` was written.

    LMDB reports a write cut short by a full disk as EIO: free space tells which one it was.
    """
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if code in _FULL or any(os.strerror(full) in str(error) for full in _FULL):
        return StoreFull(name, str(error))
    try:
        free = os.statvfs(directory)
    except OSError:
        return StoreWriteFailed(name, str(error))
    is_io_error = code == errno.EIO or os.strerror(errno.EIO) in str(error)
    if is_io_error and free.f_bavail * free.f_frsize < FULL_BYTES_MAX:
        return StoreFull(name, str(error))
    return StoreWriteFailed(name, str(error))


def _write_file(path: Path, raw: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE_WRITING)
    with open(fd, "wb") as file:
        file.write(raw)
        file.flush()
        os.fchmod(fd, MODE_SEALED)
        os.fsync(fd)
