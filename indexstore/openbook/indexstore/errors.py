"""What can go wrong with a store, one class per kind.

    IndexStoreError
    ├── ContextMissing         no such context
    ├── ContextIncomplete      a directory without a manifest: never sealed, or not a context
    ├── ContextInUse           held by a reader, or just being deleted: try again later
    ├── AlreadyPublished       another context lives where this one should go
    ├── FormatUnsupported      written by a newer (or a too old) openbook
    ├── FingerprintMismatch    made by another model than the one that asks
    ├── ShardCorrupt           the bytes on disk are not the bytes that were sealed
    │   └── ShardTruncated     a file is shorter than it was
    ├── StoreReadFailed        a file cannot be read now, though it may be sound
    └── StoreWriteFailed       a write, fsync or rename failed
        └── StoreFull          no space left, or no quota left

OperationCancelled is no failure and stands apart: the caller asked for it.

Messages hold file names, sizes and ids, never anything a user wrote. A caller's own mistake (a
wrong shape, a second seal) is a ValueError and not in this tree.
"""

from __future__ import annotations


class IndexStoreError(Exception):
    """Any failure of the store that is not the caller's mistake."""


class ContextMissing(IndexStoreError):
    """No context is published at `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"no context at {path}")
        self.path = path


class ContextIncomplete(IndexStoreError):
    """`path` is there, but `problem` shows that it is no sealed context."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} is not a sealed context: {problem}")
        self.path = path
        self.problem = problem


class ContextInUse(IndexStoreError):
    """Another holder keeps the context at `path` locked."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the context at {path} is in use")
        self.path = path


class AlreadyPublished(IndexStoreError):
    """`path` holds the context `found`, not `expected`."""

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(f"{path} already holds context {found}, not {expected}")
        self.path = path
        self.expected = expected
        self.found = found


class FormatUnsupported(IndexStoreError):
    """The manifest's format version `found` is outside what this openbook reads."""

    def __init__(self, found: int, oldest: int, newest: int) -> None:
        super().__init__(
            f"context format {found} is not readable here: this openbook reads {oldest} to {newest}"
        )
        self.found = found
        self.oldest = oldest
        self.newest = newest


class FingerprintMismatch(IndexStoreError):
    """`field` of the manifest is `found`, the caller needs `expected`."""

    def __init__(self, field: str, expected: str, found: str) -> None:
        super().__init__(f"{field} is {found}, expected {expected}")
        self.field = field
        self.expected = expected
        self.found = found


class ShardCorrupt(IndexStoreError):
    """`file` of a context is not what was sealed; `problem` says how that showed."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        self.problem = problem


class ShardTruncated(ShardCorrupt):
    """`file` holds `found` bytes where `expected` were sealed."""

    def __init__(self, file: str, expected: int, found: int) -> None:
        super().__init__(file, f"holds {found} bytes, {expected} were sealed")
        self.expected = expected
        self.found = found


class StoreReadFailed(IndexStoreError):
    """`file` of a context cannot be read for `reason`: no descriptor, no memory, no permission."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"reading {file} failed: {reason}")
        self.file = file
        self.reason = reason


class StoreWriteFailed(IndexStoreError):
    """Writing `file` failed for `reason`.

    A draft is discarded with it; a publish that failed may be tried again.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"writing {file} failed: {reason}")
        self.file = file
        self.reason = reason


class StoreFull(StoreWriteFailed):
    """Writing `file` failed because the disk or the quota is full."""


class OperationCancelled(Exception):
    """The caller's `is_cancelled` said so; nothing has changed on disk."""
