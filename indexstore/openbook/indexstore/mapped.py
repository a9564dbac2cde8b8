"""The files this process has mapped: each once, guarded, until the last view of it is gone.

Owns every LMDB environment that reads, and the guard over its pages. It knows nothing of records.

LMDB maps a file once per process, and a NumPy view of an unmapped page is a segmentation fault.
So one registry holds the environments, one per file, and each view holds a lease: the file is
unmapped when the last lease is gone, never under a running search. Environments must not cross a
fork: use threads, or processes started by spawn.

A file that is cut short while it is mapped would end the process by SIGBUS. The guard (guard.h)
puts zeros where the pages were and notes it; Lease.is_damaged tells. That is Linux's doing, as
/proc is: elsewhere a map is not guarded. Inside a system call (write() from a mapped page) the
kernel reports EFAULT instead, which is an OSError.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import lmdb

from openbook.indexstore import _guard
from openbook.indexstore.errors import ShardCorrupt

LIB_VERSION = 0  # LMDB 0.9: a page header of 16 bytes, on which the records' alignment rests


@dataclass(slots=True)
class _File:
    """A mapped file; `slot` is the guard's, None where there is no guard."""

    path: Path
    env: lmdb.Environment
    slot: int | None
    leases: int = 0


class Lease:
    """A claim on a mapped file, given back when it is no longer referenced."""

    def __init__(self, registry: Registry, key: tuple[int, int], file: _File) -> None:
        self._registry = registry
        self._key = key
        self._path = file.path
        self._slot = file.slot
        self.env = file.env

    @property
    def is_damaged(self) -> bool:
        """Whether a page was missing when it was read, so that zeros were read in its place."""
        return self._slot is not None and _guard.is_hit(self._slot)

    @property
    def file_bytes(self) -> int | None:
        """The size of the mapped file now; None if it is no longer at its path."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_size if (status.st_dev, status.st_ino) == self._key else None

    def __del__(self) -> None:
        self._registry.give_back(self._key)


class Registry:
    """The process's environments by (device, inode), each mapped once, with their leases."""

    def __init__(self) -> None:
        # Re-entrant: a lease may be collected while this thread is in `lease`.
        self._lock = threading.RLock()
        self._files: dict[tuple[int, int], _File] = {}

    def lease(self, path: Path, fd: int) -> Lease:
        """Map the file that is open as `fd`, at `path` unless moved, or share its map.

        Raises ShardCorrupt when it was moved and cannot be found, lmdb.Error when not LMDB's.
        """
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            if key not in self._files:
                before = _spans(status, path)  # someone else may have it mapped
                by_fd = Path(f"/proc/self/fd/{fd}")
                reached = by_fd if by_fd.exists() else path
                env = _map(reached, status.st_size)
                if not os.path.samestat(os.stat(reached), status):
                    env.close()
                    raise ShardCorrupt(path.name, "was replaced while it was opened")
                slot = next((_guard.add(*span) for span in _spans(status, path) - before), None)
                self._files[key] = _File(path, env, slot)
            file = self._files[key]
            file.leases += 1
            return Lease(self, key, file)

    def give_back(self, key: tuple[int, int]) -> None:
        """End one lease; the last one unmaps the file."""
        with self._lock:
            file = self._files[key]
            file.leases -= 1
            if file.leases == 0:
                del self._files[key]
                if file.slot is not None:
                    _guard.remove(file.slot)
                file.env.close()

    @property
    def count(self) -> int:
        """The number of files mapped now."""
        with self._lock:
            return len(self._files)


# Global because LMDB's rule is: one environment per file and *process*.
MAPPED = Registry()


def mapped_files() -> int:
    """Return the number of shard files this process has mapped (one descriptor each)."""
    return MAPPED.count


def any_damage() -> bool:
    """Say whether any mapped page was ever missing in this process: cheap enough for every step."""
    return _guard.hit_count() > 0


def _spans(status: os.stat_result, path: Path) -> set[tuple[int, int]]:
    """Return where a file is mapped, first address and last + 1; nothing where /proc cannot tell.

    The device and inode are compared, or the path, as some file systems show another device here.
    """
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    inode, name = str(status.st_ino), str(path)
    spans = set()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                span, _, _, found, number, *rest = line.rstrip("\n").split(maxsplit=5)
                if (found, number) == (device, inode) or (rest and rest[0] == name):
                    first, last = span.split("-")
                    spans.add((int(first, 16), int(last, 16)))
    except OSError:
        return set()  # not Linux
    return spans


def _map(path: Path, size: int) -> lmdb.Environment:
    """Map a sealed file read-only."""
    return lmdb.open(
        str(path),
        map_size=size,
        subdir=False,
        readonly=True,
        lock=False,  # sealed files never change: no readers' table, no lock file
        create=False,
        max_dbs=0,
        lib_version=LIB_VERSION,
    )
