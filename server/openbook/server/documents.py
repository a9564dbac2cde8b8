"""Uploaded documents, from the first byte that arrives until they have been read.

Owns `<data>/uploads` and `<data>/labels`. It knows nothing of tokens or of when a document is read.

    uploads/<id>.doc    the document's bytes, mode 0600, removed once the context is ACTIVE
    uploads/<id>.json   what is known about it; without a .doc beside it: why reading it failed
    uploads/<uuid>.part an upload under way, swept at start
    labels/<id>         the context's display name, UTF-8

A pending document is there once both files are synced, so an answered upload survives anything.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openbook.indexstore.errors import StoreWriteFailed
from openbook.server.directory import read_regular, remove, sync_directory, write_whole
from openbook.server.errors import DocumentOversized, StorageFull, UploadCorrupt
from openbook.server.identity import is_context_id

FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (errno.EIO, errno.EROFS, errno.ENOENT, errno.ESTALE, errno.EMFILE, errno.ENFILE)
RECORD_BYTES_MAX = 16 << 10
NAME_BYTES_MAX = 1024
SECONDS_MAX = 2**53  # as in a manifest


class Upload(BaseModel):
    """What is known about one uploaded document."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context_id: str = Field(pattern="^[0-9a-f]{32}$")
    layout: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    received_unix_s: float = Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)
    attempts: int = Field(default=0, ge=0)
    error_reason: str = ""
    error_text: str = ""


class Receiving:
    """An upload under way. Every method may block on the disk: call it from a thread."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self.path = path
        self.bytes = 0
        self._bytes_max = bytes_max
        self._digest = sha256()
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def write(self, chunk: bytes) -> None:
        """Append bytes. Raises DocumentOversized, StorageFull or StoreWriteFailed."""
        if self.bytes + len(chunk) > self._bytes_max:
            raise DocumentOversized(self._bytes_max)
        with _disk_named():
            self._file.write(chunk)
        self._digest.update(chunk)
        self.bytes += len(chunk)

    def finish(self) -> bytes:
        """Return the SHA-256 of what was written. Raises StorageFull or StoreWriteFailed."""
        with _disk_named():
            self._file.flush()
        return self._digest.digest()

    def sync(self) -> None:
        """Make what was written durable, after `finish`, and close the file.

        A document that is there already need not wait for it.

        Raises StorageFull or StoreWriteFailed.
        """
        with _disk_named():
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Remove what was written, if it was not kept. May be called again."""
        with suppress(OSError):  # a full disk fails the flush of a file that goes away anyway
            self._file.close()
        self.path.unlink(missing_ok=True)


class Documents:
    """The uploads of one data directory. Every method may block: call it from a thread."""

    def __init__(self, data: Path, *, bytes_max: int) -> None:
        self._uploads = data / "uploads"
        self._labels = data / "labels"
        self._bytes_max = bytes_max
        self._uploads.mkdir(mode=0o700, exist_ok=True)
        self._labels.mkdir(mode=0o700, exist_ok=True)

    def receive(self) -> Receiving:
        """Open a new upload. Raises StorageFull or StoreWriteFailed."""
        with _disk_named():
            return Receiving(self._uploads / f"{uuid.uuid4().hex}.part", self._bytes_max)

    def keep(self, receiving: Receiving, upload: Upload, *, display_name: str) -> None:
        """Make a finished upload pending, durably, or leave nothing of it.

        Raises StorageFull or StoreWriteFailed.
        """
        try:
            receiving.sync()
            with _disk_named():
                self.name(upload.context_id, display_name)
                self._write_record(upload)
                os.rename(receiving.path, self._document(upload.context_id))
                sync_directory(self._uploads)
        except BaseException:
            # What cannot be removed is swept at the next start, or read then if it is whole.
            with suppress(OSError):
                self.remove(upload.context_id)
                self.name(upload.context_id, "")
            raise

    def pending(self) -> list[Upload]:
        """Return the documents that wait to be read, oldest first."""
        uploads = [u for u in self._records() if self._document(u.context_id).is_file()]
        return sorted(uploads, key=lambda upload: upload.received_unix_s)

    def failed(self) -> list[Upload]:
        """Return what is known of the documents that could not be read."""
        return [upload for upload in self._records() if upload.error_reason]

    def find(self, context_id: str) -> Upload | None:
        """Return a pending document's record, or None."""
        upload = self._read_record(self._record(context_id))
        return upload if upload is not None and self._document(context_id).is_file() else None

    def read(self, upload: Upload) -> bytes:
        """Return a pending document's bytes. Raises UploadCorrupt when they are not the same."""
        document = read_regular(self._document(upload.context_id), bytes_max=upload.bytes)
        if document is None or sha256(document).hexdigest() != upload.sha256:
            raise UploadCorrupt()
        return document

    def count_attempts(self, upload: Upload, attempts: int) -> Upload:
        """Note, durably, how often the document was begun and neither read nor given back.

        Raises StorageFull or StoreWriteFailed.
        """
        counted = upload.model_copy(update={"attempts": attempts})
        with _disk_named():
            self._write_record(counted)
            sync_directory(self._uploads)
        return counted

    def fail(self, upload: Upload, *, reason: str, text: str) -> None:
        """Remove the document and keep why it could not be read."""
        failed = upload.model_copy(update={"error_reason": reason, "error_text": text})
        try:
            self._write_record(failed)
        except OSError:  # without a record the failure is forgotten at the next start
            self.remove(upload.context_id)
        self._document(upload.context_id).unlink(missing_ok=True)

    def remove(self, context_id: str) -> None:
        """Remove the document and its record; the display name stays."""
        self._document(context_id).unlink(missing_ok=True)
        self._record(context_id).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove uploads that were under way, and whatever makes no sense; count them."""
        known = {upload.context_id for upload in self.pending() + self.failed()}
        strangers = [
            path
            for path in self._uploads.iterdir()
            if path.suffix not in (".doc", ".json") or path.stem not in known
        ]
        for path in strangers:
            remove(path)
        return len(strangers)

    def name(self, context_id: str, display_name: str) -> None:
        """Set the display name of a context; an empty one removes it."""
        path = self._labels / context_id
        if display_name:
            write_whole(path, display_name.encode())
        else:
            path.unlink(missing_ok=True)

    def sweep_names(self, known: Collection[str]) -> int:
        """Remove the names of all contexts but the known ones, and half-written ones; count them.

        A name is a user's text: it must not outlive a deletion that a crash cut short.
        """
        strangers = [
            path
            for path in self._labels.iterdir()
            if path.name not in known or path.is_symlink() or not path.is_file()
        ]
        for path in strangers:
            remove(path)
        return len(strangers)

    def display_name(self, context_id: str) -> str:
        """Return the display name of a context, or an empty one."""
        name = read_regular(self._labels / context_id, bytes_max=NAME_BYTES_MAX)
        try:
            return name.decode() if name is not None else ""
        except UnicodeDecodeError:
            return ""

    def _document(self, context_id: str) -> Path:
        return self._uploads / f"{context_id}.doc"

    def _record(self, context_id: str) -> Path:
        return self._uploads / f"{context_id}.json"

    def _records(self) -> Iterator[Upload]:
        for path in sorted(self._uploads.glob("*.json")):
            upload = self._read_record(path) if is_context_id(path.stem) else None
            if upload is not None:
                yield upload

    def _read_record(self, path: Path) -> Upload | None:
        record = read_regular(path, bytes_max=RECORD_BYTES_MAX)
        if record is None:
            return None
        try:
            upload = Upload.model_validate_json(record)
        except ValidationError:
            return None
        return upload if upload.context_id == path.stem else None

    def _write_record(self, upload: Upload) -> None:
        write_whole(self._record(upload.context_id), upload.model_dump_json().encode())


@contextmanager
def _disk_named() -> Iterator[None]:
    """Raise StorageFull of a full disk and StoreWriteFailed of one that is broken or gone."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageFull() from error
        if error.errno in BROKEN:
            raise StoreWriteFailed("an upload", str(error)) from error
        raise
