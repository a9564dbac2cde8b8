"""The thread that reads documents, one at a time, from the queue to a published context.

Owns the order of an ingest's steps outside the worker: claim, read, publish, tell. It knows
nothing of tokens. Everything it does may be done twice: a publish that finds the same context in
place adopts it, and a document is removed only after its context is there. A deletion sets the
reading's event first and then waits for the lock of the context's files: under that lock, an event
that is not set means that the context is still wanted. A reading that a stop or a crash cut short
leaves its draft, and the next one goes on from the draft's last checkpoint.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from openbook.indexstore.store import (
    Draft,
    Manifest,
    Summary,
    adopt,
    begin,
    publish,
    read_summary,
)
from openbook.server.catalog import Catalog, Stage, State
from openbook.server.documents import Documents, Upload
from openbook.server.errors import IngestCancelled, IngestCrashed, describe, is_fault
from openbook.server.ingest_queue import Claim, IngestQueue
from openbook.server.logs import Log, fault_fields
from openbook.worker import IngestProgress, IngestSettings, Model

ATTEMPTS_MAX = 3  # a document that took the server down so often is not read again
BEAT_S = 5.0
RETRY_S = 1.0
STAGES = {
    "tokenizing": Stage.READING,
    "reading": Stage.READING,
    "sealing": Stage.SEALING,
}


class ReadDocument(Protocol):
    """What reads one document into a draft: the worker's `ingest`."""

    def __call__(
        self,
        model: Model,
        document: bytes,
        draft: Draft,
        *,
        context_id: str,
        settings: IngestSettings,
        on_progress: Callable[[IngestProgress], None],
        is_cancelled: Callable[[], bool],
        created_unix_s: int,
    ) -> Manifest:
        """Read, index and seal; see openbook.worker.ingest."""


class IngestWorker:
    """Reads claimed documents in one thread and tells the catalog how far it is."""

    def __init__(
        self,
        model: Model,
        catalog: Catalog,
        documents: Documents,
        queue: IngestQueue,
        *,
        tenant_root: Path,
        settings_for: Callable[[str], IngestSettings],
        read: ReadDocument,
        log: Log,
    ) -> None:
        self._model = model
        self._catalog = catalog
        self._documents = documents
        self._queue = queue
        self._tenant_root = tenant_root
        self._settings_for = settings_for
        self._read = read
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingest")
        self._cancelled: dict[str, threading.Event] = {}
        self._working = asyncio.Lock()
        self._is_stopping = False

    async def run(self) -> None:
        """Read documents until cancelled; told to stop, take no more."""
        while not self._is_stopping:
            try:
                claim = await self._queue.take()
                async with self._working:
                    await self._work(claim)
            except Exception as error:  # a disk that fails must not end the line
                self._log.error("ingest_line_failed", **fault_fields(error))
                await asyncio.sleep(RETRY_S)
        await asyncio.Event().wait()  # what is claimed and waits is read after a restart

    def cancel(self, context_id: str) -> None:
        """Stop reading a document before its next layer, if it is being read."""
        cancelled = self._cancelled.get(context_id)
        if cancelled is not None:
            cancelled.set()

    async def stop(self) -> None:
        """Stop reading before the next layer; the document is read again after a restart."""
        self._is_stopping = True
        for cancelled in self._cancelled.values():
            cancelled.set()
        async with self._working:  # the document under way has been given back
            self._thread.shutdown(wait=False)

    async def _work(self, claim: Claim) -> None:
        upload = await asyncio.to_thread(self._documents.find, claim.context_id)
        if upload is None or not self._is_wanted(claim.context_id):
            await self._finish(claim)  # read before, or deleted
            return
        if self._is_stopping:
            return
        cancelled = self._cancelled[claim.context_id] = threading.Event()
        beating = asyncio.create_task(self._beat(claim))
        try:
            await self._read_upload(upload, cancelled)
        except Exception as error:
            await self._give_up(upload, error, cancelled)
        finally:
            beating.cancel()
            del self._cancelled[claim.context_id]
        if not self._is_stopping:
            await self._finish(claim)

    async def _finish(self, claim: Claim) -> None:
        """Take a claim out of the line, unless its document was deleted and uploaded again."""
        await self._queue.done(claim)
        if not self._is_wanted(claim.context_id):
            return
        if await asyncio.to_thread(self._documents.find, claim.context_id) is not None:
            await self._queue.put(claim.context_id)

    async def _read_upload(self, upload: Upload, cancelled: threading.Event) -> None:
        if upload.attempts >= ATTEMPTS_MAX:
            raise IngestCrashed(upload.attempts)
        self._log.info("ingest_started", context=upload.context_id, bytes=upload.bytes)
        async with self._catalog.changing(upload.context_id):
            if cancelled.is_set():
                raise IngestCancelled()
            await asyncio.to_thread(self._documents.count_attempts, upload, upload.attempts + 1)
        loop = asyncio.get_running_loop()
        draft = await loop.run_in_executor(self._thread, self._draft, upload.context_id)
        if draft.checkpoint is not None:
            self._log.info(
                "ingest_resumed",
                context=upload.context_id,
                layers_done=len(draft.checkpoint.files) - 1,  # the first file has the tokens
            )
        try:
            manifest = await loop.run_in_executor(
                self._thread, self._ingest, upload, draft, cancelled, loop
            )
            await self._publish(draft, manifest, cancelled)
        finally:
            is_wanted = self._is_stopping and self._is_wanted(upload.context_id)
            is_left = is_wanted and draft.checkpoint is not None
            await asyncio.to_thread(draft.release if is_left else draft.discard)

    def _draft(self, context_id: str) -> Draft:
        """Return the draft that an earlier try of a document left, else an empty one; blocks."""
        root = self._tenant_root.parent
        return adopt(root, context_id) or begin(root)

    def _is_wanted(self, context_id: str) -> bool:
        entry = self._catalog.find(context_id)
        return entry is not None and entry.state is State.CREATING

    def _ingest(
        self,
        upload: Upload,
        draft: Draft,
        cancelled: threading.Event,
        loop: asyncio.AbstractEventLoop,
    ) -> Manifest:
        """Read one document into a draft; runs in the thread."""

        def note(progress: IngestProgress) -> None:
            if not cancelled.is_set():  # else the entry is that of a later upload, or gone
                stage = STAGES[progress.stage]
                self._catalog.progress(
                    upload.context_id, stage, progress.layers_done, progress.layers
                )

        def tell(progress: IngestProgress) -> None:
            loop.call_soon_threadsafe(note, progress)

        return self._read(
            self._model,
            self._documents.read(upload),
            draft,
            context_id=upload.context_id,
            settings=self._settings_for(upload.layout),
            on_progress=tell,
            is_cancelled=cancelled.is_set,
            created_unix_s=int(upload.received_unix_s),
        )

    async def _publish(self, draft: Draft, manifest: Manifest, cancelled: threading.Event) -> None:
        """Put a sealed draft in place and make its entry ACTIVE. Raises IngestCancelled."""
        context_id = manifest.context_id
        async with self._catalog.changing(context_id):
            if cancelled.is_set():
                raise IngestCancelled()
            summary = await asyncio.to_thread(_published, draft, self._tenant_root / context_id)
            entry = self._catalog.find(context_id)
            if cancelled.is_set() or entry is None:
                raise IngestCancelled()  # whoever deletes it waits for the lock
            self._catalog.put(entry.activated(summary))
            await asyncio.to_thread(self._documents.remove, context_id)
        spent = manifest.stages_s
        self._log.info(
            "ingest_done",
            context=context_id,
            tokens=manifest.token_count,
            bytes=manifest.bytes_total,
            prefill_s=round(spent.prefill, 3),
            build_s=round(spent.build, 3),
            write_s=round(spent.write, 3),
        )

    async def _give_up(self, upload: Upload, error: Exception, cancelled: threading.Event) -> None:
        """Note that a document was not read: for good, unless deleted or to be read again."""
        context_id = upload.context_id
        async with self._catalog.changing(context_id):
            if cancelled.is_set():
                self._log.info("ingest_cancelled", context=context_id)
                if self._is_stopping and self._is_wanted(context_id):  # a stop is no attempt
                    await asyncio.to_thread(self._documents.count_attempts, upload, upload.attempts)
                return
            if _passes(error):  # no fault of the document's: it waits
                self._log.warning("ingest_put_off", context=context_id, **fault_fields(error))
                await asyncio.to_thread(self._documents.count_attempts, upload, upload.attempts)
                await asyncio.sleep(RETRY_S)
                return
            wire = describe(error)
            fields = fault_fields(error) if is_fault(error) else {}
            self._log.warning("ingest_failed", context=context_id, reason=wire.reason, **fields)
            await asyncio.to_thread(
                self._documents.fail, upload, reason=wire.reason, text=wire.text
            )
            if self._is_wanted(context_id) and not cancelled.is_set():
                self._catalog.put(self._catalog.get(context_id).failed(error))

    async def _beat(self, claim: Claim) -> None:
        """Show others that the claim is alive and how far it is."""
        while True:
            entry = self._catalog.find(claim.context_id)
            if entry is not None:
                stage = entry.stage.value
                await self._queue.tell(claim.context_id, stage, entry.layers_done, entry.layers)
            await self._queue.beat(claim)
            await asyncio.sleep(BEAT_S)


def _passes(error: BaseException) -> bool:
    """Tell whether it was open files that were short, which others may close any moment."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return True
        cause = cause.__cause__
    return False


def _published(draft: Draft, final: Path) -> Summary:
    """Publish a sealed draft and return what is in place: it, or the same one of another writer."""
    if publish(draft, final) and draft.manifest is not None:
        return draft.manifest
    return read_summary(final)
