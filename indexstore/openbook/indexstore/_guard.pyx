"""Mapped ranges whose missing pages read as zeros instead of ending the process (guard.h).

The caller holds a lock around add and remove.
"""

from libc.stdint cimport uintptr_t

cdef extern from "guard.h":
    int OB_GUARD_SLOTS
    int ob_guard_add(uintptr_t start, uintptr_t end)
    void ob_guard_remove(int slot)
    int ob_guard_is_hit(int slot)
    int ob_guard_hit_count()


def add(uintptr_t start, uintptr_t end):
    """Cover the addresses from `start` to before `end`; return the slot, None if none is left."""
    cdef int slot = ob_guard_add(start, end)
    return None if slot == OB_GUARD_SLOTS else slot


def remove(int slot):
    """Cover the range no longer: before it is unmapped."""
    ob_guard_remove(slot)


def is_hit(int slot):
    """Say whether a page of the range was missing and has been read as zeros."""
    return bool(ob_guard_is_hit(slot))


def hit_count():
    """Return the number of pages of all ranges that were missing since the process began."""
    return ob_guard_hit_count()
