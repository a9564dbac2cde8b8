"""The data directory: made or checked, and held by one server.

Owns its mode, its lock and the kind of each name in it. It knows nothing of what the files hold.
What is of another kind than a server writes is refused here: a pipe would hang whoever opens it,
and a file where a folder belongs would fail every document.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import IO

TENANT = "local"  # a loopback server has one tenant
SECRET_NAME = "secret"
TENANT_ROOT = f"contexts/{TENANT}"
# The store's own folders are among them; it is not imported for two names, for it takes long.
FOLDERS = (
    "contexts",
    TENANT_ROOT,
    "contexts/.tmp",
    "contexts/.trash",
    "uploads",
    "labels",
    "lives",
)
FILES = ("lock", SECRET_NAME, "secret.new", "valkey.log")
SOCKET_NAME = "valkey.sock"
FREE_BYTES_LEAST = 64 << 20  # with less, the next document will not be stored
LOST_AND_FOUND = "lost+found"  # in the top of every ext4 file system
OWN_NAMES = frozenset({*FOLDERS, *FILES, SOCKET_NAME, LOST_AND_FOUND})


class DataDirectoryRefused(Exception):
    """The data directory cannot be used; the text is one line for a person."""


def open_data_directory(data: Path) -> IO[bytes]:
    """Make or check `data` and return its held lock; closing the file releases the directory.

    The directory must be ours, hold nothing but what a server writes, and be closed to group and
    others (its files are documents). Raises DataDirectoryRefused.
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
    if status.st_uid != os.geteuid():
        raise DataDirectoryRefused(f"the data directory {data} belongs to another user")
    try:
        _check_is_ours(data)
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise DataDirectoryRefused(
                f"the data directory {data} is open to other users; run: chmod 700 {data}"
            )
        _check_kinds(data)
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


def _check_is_ours(data: Path) -> None:
    """Refuse a directory of other things, which a mistyped path may well be."""
    names = set(os.listdir(data))
    if SECRET_NAME not in names and not names <= OWN_NAMES:
        raise DataDirectoryRefused(
            f"{data} is not empty and no openbook data directory; choose another"
        )


def _check_kinds(data: Path) -> None:
    for name in FOLDERS:
        mode = _mode_of(data / name)
        if mode is None:
            continue
        if not stat.S_ISDIR(mode):
            raise DataDirectoryRefused(f"{data / name} must be a directory, and no link to one")
        if not os.access(data / name, os.R_OK | os.W_OK | os.X_OK):
            raise DataDirectoryRefused(f"{data / name} cannot be read and written")
    for name in FILES:
        mode = _mode_of(data / name)
        if mode is not None and not stat.S_ISREG(mode):
            raise DataDirectoryRefused(f"{data / name} must be a regular file")
    mode = _mode_of(data / SOCKET_NAME)
    if mode is not None and stat.S_ISDIR(mode):
        raise DataDirectoryRefused(f"{data / SOCKET_NAME} must not be a directory")


def _mode_of(path: Path) -> int | None:
    """Return kind and permissions of what is at `path` itself, or None when nothing is."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def read_regular(path: Path, *, bytes_max: int) -> bytes | None:
    """Return the bytes of a regular file; None of a missing, other or larger one. Never waits.

    Raises OSError for any other failure.
    """
    mode = _mode_of(path)
    if mode is None or not stat.S_ISREG(mode):
        return None  # a socket cannot even be opened
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = file.read(bytes_max + 1)
    return content if len(content) <= bytes_max else None


def write_whole(path: Path, content: bytes) -> None:
    """Replace a small file, so that a reader finds the old or the new one whole."""
    draft = path.with_name(f"{uuid.uuid4().hex}.part")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def takes_writes(directory: Path) -> bool:
    """Tell whether a file can be written in `directory`, with some room to spare. May block.

    It is tried with a file that has no name, where the system has such (Linux).
    """
    try:
        free = os.statvfs(directory)
        if free.f_bavail * free.f_frsize < FREE_BYTES_LEAST:
            return False
        nameless = getattr(os, "O_TMPFILE", None)
        if nameless is None:
            return os.access(directory, os.W_OK)
        descriptor = os.open(directory, nameless | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.write(descriptor, b"x") == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove what is at a path, a folder too; a link and not what it names. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
