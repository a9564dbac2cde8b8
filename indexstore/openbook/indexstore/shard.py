"""One LMDB file: writing its records, reading them from its map, its digests.

Owns what is in a file. Which files are mapped, and for how long, is in mapped.py. It knows
nothing of manifests' other fields, of layers or of contexts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.errors import ShardCorrupt, ShardTruncated, StoreReadFailed
from openbook.indexstore.layout import (
    ALIGNMENT,
    DTYPES,
    HEADER_BYTES,
    Kind,
    RecordInfo,
    map_bytes,
    pack_record,
    unpack_header,
)
from openbook.indexstore.manifest import CHUNK_BYTES, FileEntry, RecordEntry
from openbook.indexstore.mapped import LIB_VERSION, MAPPED, Lease

MODE_WRITING = 0o600
MODE_SEALED = 0o444
_NO_FILE = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link",
    errno.ENXIO: "not a regular file",  # a socket
}
_NOT_LMDB = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
)


def write_shard(path: Path, records: Mapping[RecordInfo, NDArray[Any]]) -> tuple[RecordEntry, ...]:
    """Write the records in order, one commit each, and return their digests.

    Nothing is synced: the file is private until its seal, which syncs it once. At most one record
    is in memory twice. Raises lmdb.Error or OSError as the disk has it.
    """
    entries = []
    env = lmdb.open(
        str(path),
        map_size=map_bytes(records),
        subdir=False,
        lock=False,  # one writer, in a private directory
        sync=False,
        writemap=False,  # with it, a full disk is a SIGBUS
        mode=MODE_WRITING,
        max_dbs=0,
        lib_version=LIB_VERSION,
    )
    try:
        for info, array in records.items():
            value = pack_record(info, array)
            with env.begin(write=True) as txn:
                txn.put(info.key, value, overwrite=False)
            entries.append(RecordEntry(info, hashlib.sha256(value).hexdigest()))
    finally:
        env.close()
    return tuple(entries)


def file_chunks(fd: int) -> Iterator[str]:
    """Yield the SHA-256 of each CHUNK_BYTES of an open file, read from its start."""
    buffer = bytearray(CHUNK_BYTES)
    offset = 0
    while count := _read_chunk(fd, buffer, offset):
        yield hashlib.sha256(memoryview(buffer)[:count]).hexdigest()
        offset += count


def _read_chunk(fd: int, buffer: bytearray, offset: int) -> int:
    """Fill the buffer from `offset` on; less only at the end of the file."""
    filled = 0
    with memoryview(buffer) as view:
        while filled < len(buffer):
            count = os.preadv(fd, [view[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
    return filled


@contextmanager
def open_regular(path: Path, directory_fd: int | None = None) -> Iterator[int]:
    """Open a regular file for reading: no symlink is followed, no FIFO waited for.

    With `directory_fd`, the file of that name in the open directory, whatever `path` is by now.
    Raises ShardCorrupt when there is no such file or it is of another type, StoreReadFailed when
    it cannot be opened or (while the caller has it) read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path if directory_fd is None else path.name, flags, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ShardCorrupt(path.name, _NO_FILE[error.errno]) from error
        raise StoreReadFailed(path.name, str(error.strerror)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ShardCorrupt(path.name, "not a regular file")
        yield fd
    except OSError as error:
        raise StoreReadFailed(path.name, str(error.strerror)) from error
    finally:
        os.close(fd)


def check_size(path: Path, fd: int, entry: FileEntry) -> None:
    """Compare a file's size with the manifest's, before any page of it is mapped.

    Raises ShardTruncated when it is shorter (reading a mapped page past the end is a SIGBUS),
    ShardCorrupt when it is longer.
    """
    found = os.fstat(fd).st_size
    if found < entry.bytes:
        raise ShardTruncated(path.name, entry.bytes, found)
    if found > entry.bytes:
        raise ShardCorrupt(path.name, f"holds {found} bytes, {entry.bytes} were sealed")


class _Payload:
    """A borrowed payload as NumPy asks for it; an array made from it keeps the lease."""

    __slots__ = ("__array_interface__", "_lease")

    def __init__(self, lease: Lease, info: RecordInfo, address: int) -> None:
        self._lease = lease
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": info.shape,
            "typestr": DTYPES[info.dtype][1].str,
        }


class Shard:
    """A sealed LMDB file, open for reading. Drop it and its views to unmap the file."""

    def __init__(self, path: Path, fd: int, entry: FileEntry) -> None:
        """Map the file at `path`, open as `fd`, whose size has been checked (check_size).

        Raises ShardCorrupt when it is no LMDB file of that size with as many records,
        StoreReadFailed when it cannot be mapped.
        """
        self.entry = entry
        try:
            self._lease = MAPPED.lease(path, fd)
        except _NOT_LMDB as error:
            raise ShardCorrupt(entry.name, f"LMDB refuses it: {error}") from error
        except lmdb.Error as error:
            raise StoreReadFailed(entry.name, str(error)) from error
        pages, found = self._lease.env.stat(), self._lease.env.info()
        if (found["last_pgno"] + 1) * pages["psize"] > entry.bytes:
            raise ShardCorrupt(entry.name, "LMDB's pages reach past the end of the file")
        if pages["entries"] != len(entry.records):
            raise ShardCorrupt(entry.name, f"{pages['entries']} records in LMDB's tree")

    def check(self) -> None:
        """Raise ShardTruncated or ShardCorrupt if a page was missing when it was read.

        What was computed from the map may then be wrong. Says so at every later call.
        """
        if not self._lease.is_damaged:
            return
        found = self._lease.file_bytes
        if found is not None and found < self.entry.bytes:
            raise ShardTruncated(self.entry.name, self.entry.bytes, found)
        raise ShardCorrupt(self.entry.name, "a page of it could not be read")

    def read(self, kind: Kind, head: int | None, *, check_digest: bool) -> NDArray[Any]:
        """Return a record as a read-only array, borrowed from the map (copied if unaligned).

        Raises ShardCorrupt when the record is not there, is not the one the manifest lists, or,
        with `check_digest`, does not have its digest.
        """
        entry = next(e for e in self.entry.records if (e.info.kind, e.info.head) == (kind, head))
        info, name = entry.info, self.entry.name
        where = info.key.decode()
        try:
            with self._lease.env.begin(buffers=True) as txn:
                value = txn.get(info.key)
        except lmdb.Error as error:
            raise ShardCorrupt(name, f"{where}: {error}") from error
        if value is None:
            raise ShardCorrupt(name, f"{where}: no such record")
        try:
            found = unpack_header(value)
        except ValueError as error:
            raise ShardCorrupt(name, f"{where}: {error}") from error
        if found != info:
            raise ShardCorrupt(name, f"{where}: the record is not the one that was sealed")
        if check_digest and hashlib.sha256(value).hexdigest() != entry.sha256:
            raise ShardCorrupt(name, f"{where}: its digest does not match")
        address = np.frombuffer(value, np.uint8).ctypes.data + HEADER_BYTES
        array = np.asarray(_Payload(self._lease, info, address))
        if address % ALIGNMENT:
            array = array.copy()
            array.flags.writeable = False
        return array
