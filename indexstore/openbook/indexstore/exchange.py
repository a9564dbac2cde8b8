"""One step that swaps two names, where the system has it (Linux renameat2).

Owns the system call alone. Which names are swapped, and why, is store.py's.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100  # fcntl.h of Linux: paths as they are
_RENAME_EXCHANGE = 2  # linux/fs.h
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def exchange(first: Path, second: Path) -> bool:
    """Swap what two paths of one file system name, at once: nobody sees either name missing.

    Returns False where the system or the file system cannot. Raises OSError as rename does.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    names = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code))
