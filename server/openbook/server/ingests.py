"""Taking a document in, and letting a context go.

Owns the single flight: the same document, however often and from however many callers at once, is
one context, one upload and one reading. It lives on the event loop's thread; the disk is touched
in threads. It knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from openbook.indexstore.errors import ContextMissing, ShardCorrupt
from openbook.indexstore.store import TRASH_NAME, delete, sweep
from openbook.server.catalog import Catalog, Entry, State, read_entries
from openbook.server.documents import Documents, Receiving, Upload
from openbook.server.errors import (
    CallerLimitReached,
    ContextInUse,
    IngestQueueFull,
    StoreQuotaReached,
)
from openbook.server.identity import is_context_id
from openbook.server.ingest_queue import IngestQueue
from openbook.server.ingest_worker import IngestWorker
from openbook.server.lives import Lives
from openbook.server.logs import Log, fault_fields
from openbook.server.naming import ContextNaming
from openbook.server.opened import OpenedContexts


@dataclass(frozen=True, slots=True)
class _Found:
    """What a start finds on disk. `uploads_foreign` have ids that are not what we would give."""

    swept: int
    entries: list[Entry]
    pending: list[Upload]
    uploads_foreign: int


class Ingests:
    """Accepts documents and deletes contexts."""

    def __init__(
        self,
        naming: ContextNaming,
        catalog: Catalog,
        documents: Documents,
        queue: IngestQueue,
        worker: IngestWorker,
        *,
        opened: OpenedContexts,
        lives: Lives,
        tenant_root: Path,
        model_name: str,
        waiting_max: int,
        per_caller_max: int,
        uploads_max: int,
        store_bytes_max: int | None,
        log: Log,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._naming = naming
        self._catalog = catalog
        self._documents = documents
        self._queue = queue
        self._worker = worker
        self._opened = opened
        self._lives = lives
        self._tenant_root = tenant_root
        self._trash = tenant_root.parent / TRASH_NAME
        self._model_name = model_name
        self._waiting_max = waiting_max
        self._per_caller_max = per_caller_max
        self._uploads_max = uploads_max
        self._store_bytes_max = store_bytes_max
        self._uploads = 0  # under way
        self._saving: set[asyncio.Task[None]] = set()
        self._storing = 0  # accepted, not in line yet
        self._log = log
        self._clock = clock

    async def find(self, layout: str, document_sha256: bytes, caller: str) -> Entry | None:
        """Return the context of a document that need not be sent: ACTIVE, or being read.

        Raises IngestQueueFull, CallerLimitReached or StoreQuotaReached for any other document when
        there is no room.
        """
        entry = await self._stored(self._naming.id_of(layout, document_sha256))
        if entry is None:
            self._check_room(caller)
        return entry

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Count an upload, from before its first byte. Raises IngestQueueFull.

        What the document is shows at its end, so one that needs no room in line is let in too.
        """
        if self._uploads >= self._uploads_max:
            raise IngestQueueFull(self._uploads_max, what="arrive now")
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1

    async def accept(
        self,
        receiving: Receiving,
        *,
        layout: str,
        document_sha256: bytes,
        display_name: str,
        caller: str,
        ttl_s: float | None,
    ) -> Entry:
        """Return the context of a finished upload: the one there is, else a new one to be read.

        The upload is ours from here on. A new context lives `ttl_s`, or as the settings say. One
        that FAILED, or that another model stored, is read again.
        """
        try:
            context_id = self._naming.id_of(layout, document_sha256)
            entry = await self._stored(context_id)
            if entry is not None:
                return entry
            # No await from the last look at the catalog to the new entry: two callers at once must
            # not both be the first.
            self._check_room(caller)
            self._opened.let_go(context_id)
            created = Entry(
                context_id,
                self._model_name,
                layout,
                State.CREATING,
                self._clock(),
                display_name=display_name,
                caller=caller,
            )
            self._catalog.put(created)
            upload = Upload(
                context_id=context_id,
                layout=layout,
                sha256=document_sha256.hex(),
                bytes=receiving.bytes,
                received_unix_s=created.created_unix_s,
            )
            self._storing += 1
            try:
                await self._store(receiving, upload, created, ttl_s)
            finally:
                self._storing -= 1
            if self._catalog.find(context_id) is created:  # else deleted meanwhile
                await self._queue.put(context_id)
            return created
        finally:
            await asyncio.to_thread(receiving.discard)

    async def _store(
        self, receiving: Receiving, upload: Upload, created: Entry, ttl_s: float | None
    ) -> None:
        context_id = upload.context_id
        async with self._catalog.changing(context_id):
            if self._catalog.find(context_id) is not created:  # deleted meanwhile
                return
            try:
                await asyncio.to_thread(self._bury, context_id)
                # Before the document, which must not be kept for ever by mistake.
                if ttl_s is not None:
                    self._lives.set_ttl(context_id, ttl_s)
                    await asyncio.to_thread(self._lives.save, context_id)
                await asyncio.to_thread(
                    self._documents.keep, receiving, upload, display_name=created.display_name
                )
            except Exception as error:
                if self._catalog.find(context_id) is created:
                    self._catalog.put(created.failed(error))
                raise

    async def _stored(self, context_id: str) -> Entry | None:
        """Return the entry of a context that need not be read again, or None.

        An answer promises that the document is on disk: while another caller's is being stored,
        wait for the end of that.
        """
        entry = self._found(context_id)
        if entry is None or entry.state is State.ACTIVE:
            return entry
        async with self._catalog.changing(context_id):
            return self._found(context_id)

    def _found(self, context_id: str) -> Entry | None:
        entry = self._catalog.find(context_id)
        if entry is None or entry.state is State.FAILED:
            return None
        return entry if entry.state is State.CREATING or self._naming.is_ours(entry) else None

    def _check_room(self, caller: str) -> None:
        if self._queue.waiting_count + self._storing >= self._waiting_max:
            raise IngestQueueFull(self._waiting_max)
        creating = [e for e in self._catalog.entries() if e.state is State.CREATING]
        if sum(entry.caller == caller for entry in creating) >= self._per_caller_max:
            raise CallerLimitReached(self._per_caller_max, what="documents that wait to be read")
        limit = self._store_bytes_max
        if limit is not None and stored_bytes(self._catalog) >= limit:
            raise StoreQuotaReached(limit)

    async def collect(self, context_id: str) -> None:
        """Remove a context that nobody uses. Raises ContextUnknown or ContextInUse."""
        if self._opened.is_in_use(context_id):
            raise ContextInUse()
        await self.delete(context_id, even_if_read=False)

    async def delete(self, context_id: str, *, even_if_read: bool = True) -> None:
        """Remove a context, its upload and its name; answers under way go on to their end.

        Raises ContextUnknown, and the store's ContextInUse if it is not to be removed while another
        process has it open.
        """
        entry = self._catalog.get(context_id)
        self._opened.let_go(context_id)
        self._worker.cancel(context_id)
        self._queue.forget(context_id)
        # Before the first await, so that whoever stores or publishes it meanwhile sees it gone.
        self._catalog.remove(context_id)
        try:
            async with self._catalog.changing(context_id):
                await asyncio.to_thread(self._clear, context_id, even_if_read)
        except Exception as error:
            if self._catalog.find(context_id) is None:
                is_unread = entry.state is State.CREATING  # and its reading was stopped
                self._catalog.put(entry.failed(error) if is_unread else entry)
            raise
        self._log.info("context_deleted", context=context_id)

    async def sweep(self) -> None:
        """Remove the files of contexts that were deleted or replaced while they were read."""
        await asyncio.to_thread(self._sweep)

    async def set_ttl(self, context_id: str, ttl_s: float | None) -> Entry:
        """Set the time to live of a context, durably; None: for ever. Raises ContextUnknown."""
        async with self._catalog.changing(context_id):
            entry = self._catalog.get(context_id)
            self._lives.set_ttl(context_id, ttl_s)
            await asyncio.to_thread(self._lives.save, context_id)
        return entry

    def use(self, context_id: str) -> None:
        """Note that a context is used now, so that it lives on; no caller waits for the disk."""
        if self._lives.use(context_id):
            saving = asyncio.create_task(self._save_life(context_id))
            self._saving.add(saving)  # the loop itself keeps no task alive
            saving.add_done_callback(self._saving.discard)

    async def _save_life(self, context_id: str) -> None:
        async with self._catalog.changing(context_id):
            if self._catalog.find(context_id) is not None:
                try:
                    await asyncio.to_thread(self._lives.save, context_id)
                except OSError as error:  # a full disk must not fail an ask
                    self._log.warning("life_not_saved", context=context_id, **fault_fields(error))

    def mark_damaged(self, context_id: str, error: Exception) -> None:
        """Note that an ACTIVE context cannot be read any more, so that it may be read anew."""
        entry = self._catalog.find(context_id)
        if entry is not None and entry.state is State.ACTIVE:
            self._catalog.put(entry.failed(error))

    async def recover(self) -> None:
        """Bring the catalog in line with the disk at start, and queue what waits there."""
        found = await asyncio.to_thread(self._look_at_disk)
        for entry in found.entries:
            self._catalog.put(entry)
        for upload in found.pending:
            await self._queue.put(upload.context_id)
        active = [entry for entry in found.entries if entry.state is State.ACTIVE]
        self._log.info(
            "recovered", contexts=len(active), pending=len(found.pending), swept=found.swept
        )
        foreign = sum(not self._naming.is_ours(entry) for entry in active)
        if foreign or found.uploads_foreign:
            # A secret that was exchanged shows in the uploads alone: a context does not tell which
            # document it is of.
            self._log.warning(
                "of_another_model_or_secret", contexts=foreign, uploads=found.uploads_foreign
            )

    def _look_at_disk(self) -> _Found:
        swept = self._sweep() + self._documents.sweep()
        entries = {entry.context_id: entry for entry in read_entries(self._tenant_root)}
        uploads = self._documents.pending() + self._documents.failed()
        known = entries.keys() | {upload.context_id for upload in uploads}
        swept += self._documents.sweep_names(known) + self._lives.load(known)
        waiting = []
        foreign = 0
        for upload in uploads:
            published = entries.get(upload.context_id)
            if published is not None and published.state is State.ACTIVE:
                self._documents.remove(upload.context_id)  # published, then we were stopped
                continue
            if self._naming.id_of(upload.layout, bytes.fromhex(upload.sha256)) != upload.context_id:
                foreign += 1  # uploaded for another model: it waits for that one
                continue
            entries[upload.context_id] = self._entry_of(upload)
            if not upload.error_reason:
                waiting.append(upload)
        named = [
            replace(entry, display_name=self._documents.display_name(entry.context_id))
            for entry in entries.values()
        ]
        return _Found(swept, named, waiting, foreign)

    def _sweep(self) -> int:
        """Remove dead drafts but those of documents that wait to be read on, and count them."""

        def waits(label: str) -> bool:
            return is_context_id(label) and self._documents.find(label) is not None

        return len(sweep(self._tenant_root.parent, keep=waits))

    def _entry_of(self, upload: Upload) -> Entry:
        return Entry(
            upload.context_id,
            self._model_name,
            upload.layout,
            State.FAILED if upload.error_reason else State.CREATING,
            upload.received_unix_s,
            error_reason=upload.error_reason,
            error_text=upload.error_text,
        )

    def _clear(self, context_id: str, even_if_read: bool) -> None:
        self._bury(context_id, even_if_read=even_if_read)
        self._documents.remove(context_id)
        self._documents.name(context_id, "")
        self._lives.remove(context_id)

    def _bury(self, context_id: str, *, even_if_read: bool = True) -> None:
        """Remove what is published under an id, if anything is. Raises the store's errors."""
        path = self._tenant_root / context_id
        try:
            delete(path, self._trash, even_if_read=even_if_read)
        except (ContextMissing, ShardCorrupt):
            # It is no directory, or its manifest is no file: nobody can hold it, and the next
            # sweep takes it from the trash. A link is moved itself, not what it names.
            if os.path.lexists(path):
                self._trash.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.rename(path, self._trash / uuid.uuid4().hex)


def stored_bytes(catalog: Catalog) -> int:
    """Return how many bytes the contexts on disk have; one that is being removed counts no more."""
    return sum(entry.bytes for entry in catalog.entries())
