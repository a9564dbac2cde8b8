"""What the C library is told about freed memory, so that an ingest's peak stays near a forward's.

Owns the calls to glibc. Where there is another library they do nothing.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_LARGE_BLOCK_BYTES = 4 << 20  # a page fault costs less than a copy; below it nothing changes


def unmap_large_blocks() -> None:
    """Have the C library (glibc) give each large block back to the system when it is freed.

    By default its threshold grows with what it sees, and the activations and tiles of every layer
    leave holes that stay part of the peak. The promise is a peak near that of a bare forward.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def return_free_memory() -> None:
    """Give the freed small blocks of a layer's build back to the system as well (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
