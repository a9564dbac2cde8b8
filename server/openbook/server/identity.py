"""Who a data directory is, and what its contexts are called.

Owns the directory's mode, lock and secret, and context ids. It knows nothing of what a context
holds, nor of the network. An id is a keyed hash: it can be computed without a
tokenizer, the same document under the same model gives the same id, and no one without the secret
can tell from an id which document it stands for.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
import stat
from hashlib import sha256
from pathlib import Path
from typing import IO

TENANT = "local"  # a loopback server has one tenant
SECRET_BYTES = 32
ID_PATTERN = re.compile(r"[0-9a-f]{32}")  # 128 bits of the keyed hash


class DataDirectoryRefused(Exception):
    """The data directory cannot be used; the text is one line for a person."""


def open_data_directory(data: Path) -> IO[bytes]:
    """Make or check `data` and return its held lock; closing the file releases the directory.

    The directory must be ours and closed to group and others (its files are documents).
    Raises DataDirectoryRefused.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = data.stat()
    except (FileExistsError, NotADirectoryError):
        raise DataDirectoryRefused(f"the data directory {data} is not a directory") from None
    except OSError as error:
        raise DataDirectoryRefused(
            f"the data directory {data} cannot be made: {error.strerror}"
        ) from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise DataDirectoryRefused(
            f"the data directory {data} is open to other users; run: chmod 700 {data}"
        )
    if status.st_uid != os.geteuid():
        raise DataDirectoryRefused(f"the data directory {data} belongs to another user")
    try:
        lock = (data / "lock").open("ab")
        os.chmod(data / "lock", 0o600)
    except OSError as error:
        raise DataDirectoryRefused(
            f"the data directory {data} cannot be written: {error.strerror}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DataDirectoryRefused(f"another server uses the data directory {data}") from None
    return lock


def load_secret(data: Path) -> bytes:
    """Return the secret of `data`, making it at the first start. Raises DataDirectoryRefused.

    It is renamed into place whole and synced, because every context id depends on it.
    """
    try:
        return _load_secret(data / "secret")
    except OSError as error:
        raise DataDirectoryRefused(
            f"the secret {data / 'secret'} cannot be read or made: {error.strerror}"
        ) from error


def _load_secret(path: Path) -> bytes:
    if not path.exists():
        draft = path.with_name("secret.new")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
        sync_directory(path.parent)
    status = path.stat()
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise DataDirectoryRefused(f"the secret {path} is open to other users; run: chmod 600 it")
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise DataDirectoryRefused(f"the secret {path} does not hold {SECRET_BYTES} bytes")
    return secret


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def context_id_of(
    secret: bytes, *, model_fingerprint: str, layout: str, document_sha256: bytes
) -> str:
    """Return the context id: 32 hexadecimal digits of HMAC-SHA256.

    Each part goes in with its length, so that no two different triples give the same bytes.
    """
    if len(document_sha256) != sha256().digest_size:
        raise ValueError(f"a SHA-256 digest has 32 bytes, got {len(document_sha256)}")
    keyed = hmac.new(secret, digestmod=sha256)
    for part in (model_fingerprint.encode(), layout.encode(), document_sha256):
        keyed.update(len(part).to_bytes(8, "big"))
        keyed.update(part)
    return keyed.hexdigest()[:32]


def is_context_id(text: str) -> bool:
    """Tell whether `text` has the form of a context id."""
    return ID_PATTERN.fullmatch(text) is not None
