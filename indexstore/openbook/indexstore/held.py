"""Holding one context: the lock on its manifest, and its files verified one by one.

Owns the lock, the descriptor of the directory while files are opened, and the checks before a
file is mapped. It knows nothing of what a caller keeps (stored.py) or of where contexts are
(store.py).

The files are opened in the directory whose manifest is locked, not by their path: the path may
come to name another directory meanwhile (store.replace).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from openbook.indexstore.canonical import MANIFEST_BYTES_MAX, decode, decode_summary
from openbook.indexstore.errors import (
    ContextIncomplete,
    ContextInUse,
    ContextMissing,
    ShardCorrupt,
)
from openbook.indexstore.layer import LayerRecords, check_head, layer_from
from openbook.indexstore.manifest import MANIFEST_NAME, FileEntry, Manifest, Summary
from openbook.indexstore.shard import Shard, check_size, file_chunks, open_regular

LOCK_TRIES_MAX = 100
LOCK_WAIT_S = 0.01  # a deleter holds its lock for one rename
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Verify = Literal["full", "size"]


class HeldContext:
    """A context that cannot be deleted, and whose files are found even if it is replaced."""

    def __init__(self, path: Path, lock_fd: int, directory_fd: int, manifest: Manifest) -> None:
        """Take over both descriptors (hold)."""
        self.path = path
        self.manifest = manifest
        self._fds = [lock_fd, directory_fd]

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest. Raises ShardCorrupt or ShardTruncated."""
        for file in self.manifest.files:
            with open_regular(self.path / file.name, self._fds[1]) as fd:
                check_size(self.path / file.name, fd, file)

    def shard(
        self, file: FileEntry, verify: Verify, on_chunk: Callable[[int], None] | None = None
    ) -> Shard:
        """Check a file by read() and map it; `on_chunk` gets the number of each MiB first.

        Raises ShardCorrupt, ShardTruncated or StoreReadFailed.
        """
        path = self.path / file.name
        with open_regular(path, self._fds[1]) as fd:
            check_size(path, fd, file)
            if verify == "full":
                for chunk, (found, sealed) in enumerate(
                    zip(file_chunks(fd), file.chunks, strict=True)
                ):
                    if on_chunk is not None:
                        on_chunk(chunk)
                    if found != sealed:
                        raise ShardCorrupt(file.name, f"MiB {chunk} does not match its digest")
            return Shard(path, fd, file)

    def records(self, shard: Shard, verify: Verify) -> LayerRecords:
        """Read a layer's records from its shard and check everything a search follows in them.

        Raises ShardCorrupt or ShardTruncated.
        """
        heads = self.manifest.kv_heads if self.manifest.middle_tokens else 0
        kinds = [shard.entry.kinds(head) for head in range(heads)]
        layer = layer_from(lambda k, h: shard.read(k, h, check_digest=verify == "full"), kinds)
        for head, index in enumerate(layer.heads):
            try:
                check_head(index, head)
            except ValueError as error:
                raise ShardCorrupt(shard.entry.name, str(error)) from error
        shard.check()
        return layer

    def forget_directory(self) -> None:
        """Close the directory's descriptor: every file that is needed is mapped."""
        while len(self._fds) > 1:
            os.close(self._fds.pop())

    def close(self) -> None:
        """Give up the lock. May be called again."""
        while self._fds:
            os.close(self._fds.pop())


def hold(path: Path) -> HeldContext:
    """Lock the context at `path` for reading and read its manifest.

    Raises ContextMissing, ContextIncomplete, ContextInUse (being deleted), FormatUnsupported,
    ShardCorrupt or StoreReadFailed.
    """
    for _ in range(LOCK_TRIES_MAX):
        fds = [_lock_manifest(path)]
        try:
            fds.append(os.open(path, _DIRECTORY_FLAGS))
            inside = os.stat(MANIFEST_NAME, dir_fd=fds[1], follow_symlinks=False)
            if os.path.samestat(os.fstat(fds[0]), inside):
                held = HeldContext(path, fds[0], fds[1], decode(_read_manifest(fds[0])))
                fds = []
                return held
        except FileNotFoundError:
            pass  # replaced between the two: look again
        finally:
            for fd in fds:
                os.close(fd)
    raise ContextInUse(str(path))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the context at `path`, checked, without its files.

    Raises ContextMissing, ContextIncomplete, ContextInUse, FormatUnsupported, ShardCorrupt or
    StoreReadFailed.
    """
    fd = _lock_manifest(path)
    try:
        return decode(_read_manifest(fd))
    finally:
        os.close(fd)


def read_summary(path: Path) -> Summary:
    """Read what a listing shows of the context at `path`: its manifest's fields, not its files.

    Raises what read_manifest raises.
    """
    fd = _lock_manifest(path)
    try:
        return decode_summary(_read_manifest(fd))
    finally:
        os.close(fd)


def open_manifest(path: Path) -> int:
    """Open the manifest of the context at `path` and return the descriptor.

    Raises ContextMissing without a directory there (a symlink is none), ContextIncomplete without
    a manifest in it, ShardCorrupt when that is no regular file.
    """
    try:
        is_directory = path.is_dir() and not path.is_symlink()
    except OSError as error:
        raise ContextMissing(str(path)) from error
    if not is_directory:
        raise ContextMissing(str(path))
    file = path / MANIFEST_NAME
    if not os.path.lexists(file) and not path.is_dir():
        raise ContextMissing(str(path))  # deleted between the two looks
    if not os.path.lexists(file):
        raise ContextIncomplete(str(path), f"it has no {MANIFEST_NAME}")
    with open_regular(file) as fd:
        return os.dup(fd)


def _lock_manifest(path: Path) -> int:
    """Lock the manifest shared, and make sure that it is still the one at `path`."""
    for _ in range(LOCK_TRIES_MAX):
        fd = open_manifest(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path / MANIFEST_NAME, follow_symlinks=False)):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass  # being deleted, or deleted between open and lock: look again
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(LOCK_WAIT_S)
    raise ContextInUse(str(path))


def _read_manifest(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > MANIFEST_BYTES_MAX:
        raise ShardCorrupt(MANIFEST_NAME, f"holds {size} bytes, the limit is {MANIFEST_BYTES_MAX}")
    with open(fd, "rb", closefd=False) as file:
        return file.read(MANIFEST_BYTES_MAX + 1)
