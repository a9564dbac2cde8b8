"""Removing contexts whose time is over, and those that must make room.

Owns the order in which contexts go. It knows nothing of files: ingests.py deletes. A context that
an answer reads is left alone until the next look; one without a time to live never goes by itself.

    1. every context whose time to live is over
    2. while the store holds more than its bytes: contexts with a time to live, longest unused first
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from openbook.indexstore.errors import ContextInUse as HeldElsewhere
from openbook.server.catalog import Catalog, State
from openbook.server.errors import ContextInUse, ContextUnknown
from openbook.server.ingests import stored_bytes
from openbook.server.lives import Lives
from openbook.server.logs import Log, fault_fields

LOOK_S = 5.0

Delete = Callable[[str], Awaitable[None]]
Sweep = Callable[[], Awaitable[None]]


class Collector:
    """Looks now and then for contexts that are to go."""

    def __init__(
        self,
        catalog: Catalog,
        lives: Lives,
        *,
        delete: Delete,
        sweep: Sweep,
        bytes_max: int | None,
        log: Log,
    ) -> None:
        """Remove contexts by `delete`, and by `sweep` the files of those whose readers are done."""
        self._catalog = catalog
        self._lives = lives
        self._delete = delete
        self._sweep = sweep
        self._bytes_max = bytes_max
        self._log = log

    async def keep(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await self.look()
            await self._sweep()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Remove what is to go now."""
        settled = []
        for entry in self._catalog.entries():
            if entry.state is State.CREATING:
                self._lives.use(entry.context_id)  # a life begins when its reading ends
            else:
                settled.append(entry.context_id)
        for context_id in self._lives.expired(settled):
            if self._lives.expired([context_id]):  # not used or kept since
                await self._remove(context_id, "expired")
        mortal = [each for each in settled if self._lives.ttl_s(each) is not None]
        for context_id in self._lives.by_use(mortal):
            if self._bytes_max is None or stored_bytes(self._catalog) <= self._bytes_max:
                return
            found = self._catalog.find(context_id)
            is_mortal = self._lives.ttl_s(context_id) is not None  # still
            if found is not None and found.bytes and is_mortal:
                await self._remove(context_id, "evicted")

    async def _remove(self, context_id: str, why: str) -> None:
        try:
            await self._delete(context_id)
        except (ContextInUse, HeldElsewhere, ContextUnknown):
            return  # in use, or gone meanwhile: the next look sees
        except Exception as error:  # one that cannot be removed must not keep the others
            self._log.error("collect_failed", context=context_id, **fault_fields(error))
            return
        self._log.info("context_collected", context=context_id, why=why)
