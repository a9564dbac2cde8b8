"""The contexts this process keeps open, up to a number of bytes and of contexts.

Owns which contexts stay open between asks, and the look at their files before each one: files that
changed are opened anew, and whoever had the old ones open keeps them. It lives on the event loop's
thread; opening runs in threads, once per context however many ask. It knows nothing of what an open
context is: the engine opens and closes it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from openbook.server.errors import OpenedFull
from openbook.server.leases import LeaseKeeper
from openbook.server.threads import in_thread, made
from openbook.worker import Engine, OpenedContext

DESCRIPTORS_KEPT = 48  # for calls, the reading of a document, Redis and the libraries
# What a file is known by: name, inode, bytes, and when content and inode last changed. Whoever
# changes a file changes its stamp, short of setting the machine's clock back.
Stamp = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class InUse:
    """One ask's claim on an open context; given back by OpenedContexts.release."""

    claim: OpenedContext
    slot: _Slot


@dataclass(eq=False, slots=True)
class _Slot:
    """One context: the claim that keeps it open between asks, and who uses it now."""

    context_id: str
    path: Path
    bytes: int
    users: int = 0
    kept: OpenedContext | None = None
    stamp: Stamp = ()
    opening: asyncio.Task[OpenedContext] | None = None


class OpenedContexts:
    """Open contexts for asks, and close the least recently used ones when room is needed."""

    def __init__(
        self, engine: Engine, keeper: LeaseKeeper, *, bytes_max: int, contexts_max: int
    ) -> None:
        """Keep at most `contexts_max` open, each of which holds descriptors, and `bytes_max`."""
        self._engine = engine
        self._keeper = keeper
        self._bytes_max = bytes_max
        self._contexts_max = contexts_max
        self._slots: dict[str, _Slot] = {}  # least recently used first
        self._retired: set[_Slot] = set()  # deleted under asks that have not ended

    async def acquire(self, context_id: str, path: Path, *, size: int) -> InUse:
        """Return a claim on a context whose files are those that were verified.

        The caller gives it back by `release`. Raises the store's errors, or OpenedFull.
        """
        slot = self._slots.pop(context_id, None) or _Slot(context_id, path, size)
        self._slots[context_id] = slot
        slot.users += 1
        try:
            while slot.opening is not None:  # the same files, opened for someone else just now
                await asyncio.wait([slot.opening])
            slot.opening = asyncio.create_task(self._open(slot))
            slot.opening.add_done_callback(lambda _: setattr(slot, "opening", None))
            return InUse(await made(slot.opening, undo=_close_claim), slot)
        except BaseException:
            self._leave(slot)
            raise

    def release(self, in_use: InUse) -> None:
        """Give a claim back; the context stays open until its room is needed."""
        in_use.claim.close()
        self._leave(in_use.slot)

    def is_in_use(self, context_id: str) -> bool:
        """Tell whether an ask uses a context, or waits for it to be opened."""
        slot = self._slots.get(context_id)
        return slot is not None and slot.users > 0

    def let_go(self, context_id: str) -> None:
        """Forget a context that is about to be deleted; asks that use it keep it to their end."""
        slot = self._slots.get(context_id)
        if slot is None:
            return
        self._close(slot)
        self._engine.retire(slot.path, context_id)
        if slot.users:
            self._retired.add(slot)

    def close(self) -> None:
        """Close everything that no ask uses."""
        for slot in tuple(self._slots.values()):
            if slot.users == 0:
                self._close(slot)

    async def _open(self, slot: _Slot) -> OpenedContext:
        stamp = await asyncio.to_thread(_stamp, slot.path)
        if slot.kept is not None and stamp != slot.stamp:
            self._engine.retire(slot.path, slot.context_id)
            slot.kept.close()
            slot.kept = None
        if slot.kept is None:
            self._make_room(slot)
        claim = await in_thread(self._engine.open, slot.path, slot.context_id)
        if slot.kept is None and self._slots.get(slot.context_id) is slot:
            slot.kept = claim.hold()
            self._keeper.want(slot.context_id)
        slot.stamp = stamp  # taken before the files were read: a later change is seen next time
        return claim

    def _make_room(self, slot: _Slot) -> None:
        others = [other for other in (*self._slots.values(), *self._retired) if other is not slot]
        is_open = [other for other in others if other.kept is not None or other.users]
        taken, count = sum(other.bytes for other in is_open), len(is_open)
        for other in is_open:
            if taken + slot.bytes <= self._bytes_max and count < self._contexts_max:
                return
            if other.users == 0:
                taken, count = taken - other.bytes, count - 1
                self._close(other)
        if taken and taken + slot.bytes > self._bytes_max:
            raise OpenedFull(self._bytes_max)
        if count >= self._contexts_max:
            raise OpenedFull(self._contexts_max, what="places that the limit of open files leaves")

    def _leave(self, slot: _Slot) -> None:
        slot.users -= 1
        if slot.users:
            return
        self._retired.discard(slot)
        if slot.kept is None and self._slots.get(slot.context_id) is slot:
            del self._slots[slot.context_id]
            self._keeper.drop(slot.context_id)

    def _close(self, slot: _Slot) -> None:
        self._slots.pop(slot.context_id, None)
        self._keeper.drop(slot.context_id)
        if slot.kept is not None:
            slot.kept.close()
            slot.kept = None


def contexts_max(descriptors: int, *, layers: int) -> int:
    """Return how many contexts of `layers` layers may be open under a limit of descriptors."""
    return max(1, (descriptors - DESCRIPTORS_KEPT) // (layers + 1))  # a lock, and a file a layer


def _close_claim(claim: OpenedContext) -> None:
    claim.close()


def _stamp(path: Path) -> Stamp:
    """Return the stamp of a context's files; of a missing context, an empty one."""
    try:
        files = sorted(path.iterdir())
        stats = [(file.name, file.stat(follow_symlinks=False)) for file in files]
    except OSError:
        return ()
    return tuple((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats)
