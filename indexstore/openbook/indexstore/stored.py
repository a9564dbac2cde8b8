"""Reading one context: verified, mapped read-only, held.

Owns the open context: its lock on the manifest, its mapped layers and the checks before them. It
knows nothing of models, of leases between workers or of where contexts are (store.py).

Order of an open: lock the manifest (shared) and see that it is still the one at its path; check
it and the model's fingerprint; compare every file's size, since a mapped page past the end is a
SIGBUS; then, layer by layer, check the digest of each MiB by read(), map the file, check each
record's header against the manifest and its digest, and each id that a search follows.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.canonical import MANIFEST_BYTES_MAX, decode, decode_summary
from openbook.indexstore.errors import (
    ContextIncomplete,
    ContextInUse,
    ContextMissing,
    FingerprintMismatch,
    ShardCorrupt,
)
from openbook.indexstore.layer import LayerRecords, check_head, layer_from
from openbook.indexstore.layout import Kind
from openbook.indexstore.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Summary,
)
from openbook.indexstore.shard import Shard, check_size, file_chunks, open_regular

LOCK_TRIES_MAX = 100
LOCK_WAIT_S = 0.01  # a deleter holds its lock for one rename

Verify = Literal["full", "size"]


class StoredContext:
    """An open context: its manifest, its tokens and its layers, until closed.

    The layers' arrays are borrowed and die at close: keep none. (One that is kept all the same
    keeps its layer mapped; it never becomes a wild pointer.) The shared flock on the manifest
    keeps the context from being deleted meanwhile. Several opens in one process share the maps.
    """

    def __init__(self, lock_fd: int, manifest: Manifest) -> None:
        """Take over a locked manifest's descriptor (open_context)."""
        self.manifest = manifest
        self.token_ids: NDArray[np.int32] = np.empty(0, np.int32)  # (n,)
        self.offsets: NDArray[np.int32] = np.empty((0, 2), np.int32)  # (n, 2)
        self._lock_fd: int | None = lock_fd
        self._layers: list[LayerRecords] = []

    @property
    def bytes_mapped(self) -> int:
        """The size of the mapped layer files; 0 once closed."""
        return sum(f.bytes for f in self.manifest.files[1 : len(self._layers) + 1])

    def layer(self, layer: int) -> LayerRecords:
        """Return a layer's arrays as read-only views. Raises ValueError once closed."""
        if self._lock_fd is None:
            raise ValueError("the context is closed")
        return self._layers[layer]

    def close(self) -> None:
        """Drop the views and the lock. May be called again."""
        self._layers = []
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> StoredContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_context(
    path: Path,
    *,
    model_fingerprint: str | None,
    verify: Verify = "full",
    on_layer: Callable[[int], None] | None = None,
) -> StoredContext:
    """Open the context at `path` for reading; the caller closes it.

    `verify="full"` reads and digests every byte first (and so warms the page cache). "size" trusts
    the pages' contents, LMDB's own included: only for files already verified. `on_layer` is called
    with each layer's number once it is ready, in order. `model_fingerprint=None` accepts any.

    Raises ContextMissing, ContextIncomplete, ContextInUse (being deleted), FormatUnsupported,
    FingerprintMismatch, ShardCorrupt, ShardTruncated or StoreReadFailed.
    """
    fd = _lock_manifest(path)
    try:
        manifest = decode(_read_manifest(fd))
    except BaseException:
        os.close(fd)
        raise
    context = StoredContext(fd, manifest)
    try:
        _check_fingerprint(manifest, model_fingerprint)
        for file in manifest.files:
            with open_regular(path / file.name) as file_fd:
                check_size(path / file.name, file_fd, file)
        tokens, *layers = manifest.files
        shard = _open_shard(path, tokens, verify)
        context.token_ids = _owned(shard.read(Kind.TOKENS, None, check_digest=verify == "full"))
        context.offsets = _owned(shard.read(Kind.OFFSETS, None, check_digest=verify == "full"))
        del shard
        for layer, file in enumerate(layers):
            context._layers.append(_open_layer(path, file, manifest, verify))
            if on_layer is not None:
                on_layer(layer)
    except BaseException:
        context.close()
        raise
    return context


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


def _check_fingerprint(manifest: Manifest, expected: str | None) -> None:
    if expected is not None and manifest.model_fingerprint != expected:
        raise FingerprintMismatch("model_fingerprint", expected, manifest.model_fingerprint)


def _owned(view: NDArray[np.int32]) -> NDArray[np.int32]:
    """Copy a small record, so that its file is unmapped again."""
    array = view.copy()
    array.flags.writeable = False
    return array


def _open_shard(path: Path, file: FileEntry, verify: Verify) -> Shard:
    """Check a file by read() and map it."""
    with open_regular(path / file.name) as fd:
        check_size(path / file.name, fd, file)
        if verify == "full":
            for chunk, (found, sealed) in enumerate(zip(file_chunks(fd), file.chunks, strict=True)):
                if found != sealed:
                    raise ShardCorrupt(file.name, f"MiB {chunk} does not match its digest")
        return Shard(path / file.name, fd, file)


def _open_layer(path: Path, file: FileEntry, manifest: Manifest, verify: Verify) -> LayerRecords:
    """Map a layer and check everything a search follows in it."""
    shard = _open_shard(path, file, verify)
    heads = manifest.kv_heads if manifest.middle_tokens else 0
    layer = layer_from(lambda k, h: shard.read(k, h, check_digest=verify == "full"), heads)
    for head, index in enumerate(layer.heads):
        try:
            check_head(index, head)
        except ValueError as error:
            raise ShardCorrupt(file.name, str(error)) from error
    return layer
