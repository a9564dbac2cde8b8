"""Looking after stored contexts: reading one whole to see that it is sound, and indexing it anew.

Owns the order of the steps of both, and that a caller who leaves leaves nothing behind. Bytes and
indexes are the store's. It lives on the event loop's thread; the work is done in threads, one new
index at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from openbook.indexstore.build import IndexParams
from openbook.indexstore.errors import (
    ContextIncomplete,
    ContextMissing,
    OperationCancelled,
    ShardCorrupt,
)
from openbook.indexstore.reindex import reindex
from openbook.indexstore.store import Draft, begin, replace
from openbook.indexstore.verify import VerifyReport, verify_context
from openbook.server.catalog import Catalog, Entry, State
from openbook.server.errors import ContextFailed, ContextNotReady, ContextUnknown, IngestQueueFull
from openbook.server.ingests import Ingests
from openbook.server.logs import Log
from openbook.server.threads import Pool, in_thread, made

DAMAGES = (ShardCorrupt, ContextMissing, ContextIncomplete)
WAITING_MAX = 8  # each waits for all before it, under its own deadline
VERIFIED_AT_ONCE = 1


class Upkeep:
    """Verifies contexts and builds their indexes anew."""

    def __init__(
        self, catalog: Catalog, ingests: Ingests, *, tenant_root: Path, threads: int, log: Log
    ) -> None:
        self._catalog = catalog
        self._ingests = ingests
        self._tenant_root = tenant_root
        self._threads = threads
        self._log = log
        self._indexing = asyncio.Lock()
        self._waiting = 0
        self._verifying = Pool(VERIFIED_AT_ONCE, waiting_max=WAITING_MAX, what="contexts to verify")

    def close(self) -> None:
        """Verify no more."""
        self._verifying.close()

    def readable(self, context_id: str) -> Entry:
        """Return the entry of an ACTIVE context. Raises what keeps any other from being read."""
        entry = self._catalog.get(context_id)
        if entry.state is State.CREATING:
            raise ContextNotReady()
        if entry.state is State.FAILED:
            raise ContextFailed(entry.error_reason, entry.error_text)
        return entry

    def damaged(self, entry: Entry, error: Exception) -> None:
        """Note what reading a context met. Raises ContextUnknown if it was deleted meanwhile.

        Another may be in its place by now, sent and read anew; that one is well.
        """
        found = self._catalog.find(entry.context_id)
        if found is entry:
            self._ingests.mark_damaged(entry.context_id, error)
        elif found is None or found.state is not State.FAILED:  # else noted already
            raise ContextUnknown() from error

    async def verify(self, context_id: str) -> VerifyReport:
        """Read every byte of a context and answer its stored queries again.

        Raises what `readable` and the store raise, CallsFull when too many wait.
        """
        entry = self.readable(context_id)
        gone = threading.Event()
        path = self._tenant_root / context_id
        try:
            return await self._verifying.run(verify_context, path, is_cancelled=gone.is_set)
        except DAMAGES as error:
            self.damaged(entry, error)
            raise
        finally:
            gone.set()

    async def reindex(self, context_id: str) -> Entry:
        """Build the indexes of a context anew and return its new entry; answers go on meanwhile.

        Raises what `readable` and the store raise, IngestQueueFull when too many wait.
        """
        entry = self.readable(context_id)
        if self._waiting >= WAITING_MAX:
            raise IngestQueueFull(WAITING_MAX, what="are or wait to be indexed anew")
        self._waiting += 1
        try:
            async with self._indexing:
                return await self._reindex(context_id)
        except DAMAGES as error:
            self.damaged(entry, error)
            raise
        finally:
            self._waiting -= 1

    async def _reindex(self, context_id: str) -> Entry:
        gone = threading.Event()
        path = self._tenant_root / context_id

        def is_cancelled() -> bool:
            found = self._catalog.find(context_id)
            return gone.is_set() or found is None or found.state is not State.ACTIVE

        building = asyncio.create_task(in_thread(self._rebuilt, path, is_cancelled))
        try:
            draft = await made(building, undo=_discard_soon)
        except OperationCancelled as error:  # deleted, or found damaged: say which
            self.readable(context_id)
            raise ContextUnknown() from error
        finally:
            gone.set()
        # A caller that goes away now must not tear the exchange.
        return await asyncio.shield(asyncio.create_task(self._put_in_place(draft, path)))

    def _rebuilt(self, path: Path, is_cancelled: Callable[[], bool]) -> Draft:
        """Return a sealed draft of the context at `path` with new indexes; runs in a thread."""
        draft = begin(self._tenant_root.parent)
        try:
            reindex(path, draft, IndexParams(), threads=self._threads, is_cancelled=is_cancelled)
        except BaseException:
            draft.discard()
            raise
        return draft

    async def _put_in_place(self, draft: Draft, path: Path) -> Entry:
        """Exchange the old files for the new. Raises the store's errors and ContextUnknown."""
        context_id = path.name
        try:
            async with self._catalog.changing(context_id):
                entry = self.readable(context_id)
                await asyncio.to_thread(replace, draft, path)
                if draft.manifest is None:
                    raise AssertionError("a sealed draft has a manifest")
                indexed = entry.activated(draft.manifest)
                if self._catalog.find(context_id) is not None:  # else deleted: it waits for us
                    self._catalog.put(indexed)
        finally:
            await asyncio.to_thread(draft.discard)
        self._log.info(
            "context_indexed",
            context=context_id,
            bytes=indexed.bytes,
            build_s=round(indexed.timing.build_s, 3),
        )
        return indexed


def _discard_soon(draft: Draft) -> None:
    """Have a draft that nobody waits for any more removed, in a thread."""
    asyncio.get_running_loop().run_in_executor(None, draft.discard)
