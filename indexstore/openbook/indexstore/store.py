"""The contexts of a directory: published whole, listed, deleted, swept.

Owns the names in a store's directory and is the face of the store: begin, publish, replace,
open_context. It knows nothing of the files' contents (draft.py writes them, stored.py reads them).

    <root>/<…>/<context id>/       a published context, mode 0700, its files 0444
        manifest.json · tokens.mdb · layer-000.mdb …
    <root>/.tmp/<uuid>/            a draft, locked by its writer, or what a new one has replaced
    <root>/.trash/<uuid>/          a deleted context on its way out

A rename publishes, a rename replaces and a rename deletes, so a context is there whole or not at
all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from openbook.indexstore.checkpoint import read_checkpoint
from openbook.indexstore.draft import (
    MODE_DIRECTORY,
    TMP_NAME,
    Draft,
    adopt,
    begin,
    lock_directory,
    make_directories,
    sync_directory,
    write_error,
)
from openbook.indexstore.errors import (
    AlreadyPublished,
    ContextIncomplete,
    ContextInUse,
    ContextMissing,
    FingerprintMismatch,
    IndexStoreError,
)
from openbook.indexstore.exchange import exchange
from openbook.indexstore.held import open_manifest, read_manifest, read_summary
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestFields,
    StageSeconds,
    Summary,
)
from openbook.indexstore.stored import StoredContext, open_context

__all__ = [
    "Draft",
    "LayerRecords",
    "Manifest",
    "ManifestFields",
    "StageSeconds",
    "StoredContext",
    "Summary",
    "adopt",
    "begin",
    "delete",
    "list_contexts",
    "open_context",
    "publish",
    "read_manifest",
    "read_summary",
    "replace",
    "sweep",
]

TRASH_NAME = ".trash"


def publish(draft: Draft, final: Path) -> bool:
    """Make a sealed draft the context at `final`, durably; its parents are made if need be.

    Returns False when another writer published the same context first: that one is verified and
    stays, the draft is discarded. When it raises, the draft is still the caller's to discard or to
    publish again: a rename that happened is neither repeated nor undone.

    Raises ValueError for a draft that is not sealed, AlreadyPublished when another context is
    there, ShardCorrupt and its kin when the one there is damaged, StoreFull or StoreWriteFailed.
    """
    if draft.manifest is None:
        raise ValueError("the draft is not sealed")
    was_first = True
    try:
        make_directories(final.parent)
        if not draft.is_moved:
            try:
                os.rename(draft.path, final)
                draft.path, draft.is_moved = final, True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                was_first = False
        sync_directory(final.parent)
    except OSError as error:
        raise write_error(error, final.name, final.parent) from error
    if was_first:
        draft.release()
        return True
    _adopt(draft.manifest, final)
    draft.discard()
    return False


def replace(draft: Draft, final: Path) -> None:
    """Put a sealed draft in the place of the context at `final`, which it describes anew.

    One step swaps the two, durably: a crash leaves the old one or the new one, whole. Whoever has
    the old one open keeps it; its files go when nobody has, here or by a later sweep.

    Where the file system cannot swap names, the old one is deleted first, unless it is in use, and
    a crash before the new one is there loses both. When this raises StoreWriteFailed after the
    swap, it may be called again.

    Raises ValueError for a draft that is not sealed, AlreadyPublished when another context is
    there, FingerprintMismatch when it is another model's, ContextInUse (see above), what
    read_manifest raises of the old one, StoreFull or StoreWriteFailed.
    """
    if draft.manifest is None:
        raise ValueError("the draft is not sealed")
    if not draft.is_moved:
        _check_replaceable(draft.manifest, read_summary(final), final)
    old = draft.path
    try:
        if not draft.is_moved:
            if not exchange(draft.path, final):
                delete(final, draft.path.parent.parent / TRASH_NAME)
                publish(draft, final)
                return
            draft.path, draft.is_moved = final, True
        sync_directory(final.parent)
        sync_directory(old.parent)
    except OSError as error:
        raise write_error(error, final.name, final.parent) from error
    draft.release()
    if old != final and not _is_read(old):
        shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(manifest: Manifest, found: Summary, final: Path) -> None:
    """Check that a draft describes the context that it is to replace."""
    if found.context_id != manifest.context_id:
        raise AlreadyPublished(str(final), manifest.context_id, found.context_id)
    if found.model_fingerprint != manifest.model_fingerprint:
        raise FingerprintMismatch(
            "model_fingerprint", manifest.model_fingerprint, found.model_fingerprint
        )


def _is_read(path: Path) -> bool:
    """Say whether anyone has the context at `path`, out of the readers' sight, still open."""
    try:
        fd = open_manifest(path)
    except IndexStoreError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _adopt(manifest: Manifest, final: Path) -> None:
    """Verify that what is published at `final` is the context that `manifest` describes."""
    with open_context(final, model_fingerprint=manifest.model_fingerprint) as published:
        found = published.manifest.context_id
        if found != manifest.context_id:
            raise AlreadyPublished(str(final), manifest.context_id, found)


def delete(path: Path, trash: Path, *, even_if_read: bool = False) -> None:
    """Remove the context at `path`, by way of the directory `trash` on the same file system.

    Nobody can open it from then on. With `even_if_read` whoever has it open keeps it, and its files
    wait in `trash` for a sweep that finds it closed; otherwise it is left alone while it is open.

    Raises ContextMissing, ContextInUse (see above, or a second deletion at the same time),
    ShardCorrupt when its manifest is no regular file, StoreReadFailed, StoreWriteFailed.
    """
    grave = trash / uuid.uuid4().hex
    is_read = False
    try:
        fd = open_manifest(path)
    except ContextIncomplete:
        fd = None  # without a manifest nobody can hold it
    try:
        trash.mkdir(mode=MODE_DIRECTORY, parents=True, exist_ok=True)
        if fd is not None:
            is_read = not _lock_for_deletion(fd, even_if_read=even_if_read)
            if not os.path.samestat(os.fstat(fd), os.stat(path / MANIFEST_NAME)):
                raise ContextInUse(str(path))
        os.rename(path, grave)
        sync_directory(path.parent)
    except BlockingIOError as error:
        raise ContextInUse(str(path)) from error
    except FileNotFoundError as error:
        raise ContextMissing(str(path)) from error
    except OSError as error:
        raise write_error(error, path.name, path.parent) from error
    finally:
        if fd is not None:
            os.close(fd)
    if not is_read:
        shutil.rmtree(grave, ignore_errors=True)


def _lock_for_deletion(fd: int, *, even_if_read: bool) -> bool:
    """Lock a manifest against new readers; False when it has some that are to be left in peace.

    Raises BlockingIOError when they are not.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not even_if_read:
            raise
        return False
    return True


def sweep(root: Path, *, keep: Callable[[str], bool] = lambda _: False) -> list[Path]:
    """Remove the drafts of dead writers and what deletions left; return their former paths.

    A draft whose writer lives is locked, and stays; so does one with a checkpoint of a label that
    `keep` says yes to, and a replaced or deleted context that is still open.
    """
    removed = []
    for folder in (root / TMP_NAME, root / TRASH_NAME):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in entries:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                removed.append(path)
                continue
            fd = lock_directory(path)
            if fd is not None:
                found = read_checkpoint(path)
                if not _is_read(path) and (found is None or not keep(found.label)):
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path)
                os.close(fd)
    return removed


def list_contexts(root: Path) -> list[Path]:
    """Return the published contexts directly under `root`, by name; none without such a directory.

    Only names are looked at: a damaged context is listed too.
    """
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:  # a path each would be most of the work
        names = sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".")
            and not entry.is_symlink()
            and os.path.lexists(f"{entry.path}/{MANIFEST_NAME}")
        )
    return [root / name for name in names]
