"""The secret of a data directory, and what its contexts are called.

Owns the file `secret`, and context ids. It knows nothing of what a context holds, nor of the
network. An id is a keyed hash: it can be computed without a tokenizer, the same document under the
same model gives the same id, and no one without the secret can tell from an id which document it
stands for.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from hashlib import sha256
from pathlib import Path

from openbook.server.directory import (
    SECRET_NAME,
    TENANT_ROOT,
    DataDirectoryRefused,
    read_regular,
    sync_directory,
)

SECRET_BYTES = 32
ID_PATTERN = re.compile(r"[0-9a-f]{32}")  # 128 bits of the keyed hash


def load_secret(data: Path) -> bytes:
    """Return the secret of `data`, making it at the first start. Raises DataDirectoryRefused.

    It is renamed into place whole and synced, because every context id depends on it.
    """
    path = data / SECRET_NAME
    try:
        if not os.path.lexists(path):
            _refuse_orphans(data)
            _make_secret(path)
        status = path.lstat()
        secret = read_regular(path, bytes_max=SECRET_BYTES)
    except OSError as error:
        raise DataDirectoryRefused(
            f"the secret {path} cannot be read or made: {error.strerror}"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataDirectoryRefused(f"the secret {path} is not a regular file")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise DataDirectoryRefused(
            f"the secret {path} is open to other users; run: chmod 600 {path}"
        )
    if secret is None or len(secret) != SECRET_BYTES:
        raise DataDirectoryRefused(f"the secret {path} does not hold {SECRET_BYTES} bytes")
    return secret


def _refuse_orphans(data: Path) -> None:
    """Refuse to make a secret where one has been lost: no document would find its context again."""
    for folder in (data / TENANT_ROOT, data / "uploads"):
        if folder.is_dir() and any(path.suffix != ".part" for path in folder.iterdir()):
            raise DataDirectoryRefused(
                f"{data / SECRET_NAME} is missing, but {folder} is not empty; "
                "put the secret back, or choose another data directory"
            )


def _make_secret(path: Path) -> None:
    draft = path.with_name("secret.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)
    sync_directory(path.parent)


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
