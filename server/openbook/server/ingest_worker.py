"""The thread that reads documents, one at a time, from the queue to a published context.

Owns the order of an ingest's steps outside the worker: claim, read, publish, tell. It knows
nothing of tokens. Everything it does may be done twice: a publish that finds the same context in
place adopts it, and a document is removed only after its context is there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from openbook.indexstore.store import (
    TRASH_NAME,
    Draft,
    Manifest,
    begin,
    delete,
    publish,
    read_manifest,
)
from openbook.server.catalog import Catalog, Stage, State
from openbook.server.documents import Documents, Upload
from openbook.server.errors import IngestCancelled, IngestCrashed, describe, is_fault
from openbook.server.ingest_queue import Claim, IngestQueue
from openbook.server.logs import Log, fault_fields
from openbook.worker import IngestCancelled as WorkerCancelled
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
        """Read documents until cancelled."""
        while True:
            try:
                claim = await self._queue.take()
                async with self._working:
                    await self._work(claim)
            except Exception as error:  # a disk that fails must not end the line
                self._log.error("ingest_line_failed", **fault_fields(error))
                await asyncio.sleep(RETRY_S)

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
            await self._queue.done(claim)  # read before, or deleted
            return
        if self._is_stopping:
            return
        cancelled = self._cancelled[claim.context_id] = threading.Event()
        beating = asyncio.create_task(self._beat(claim))
        try:
            await self._read_upload(upload, cancelled)
        except (WorkerCancelled, IngestCancelled):
            self._log.info("ingest_cancelled", context=claim.context_id)
        except Exception as error:
            await self._give_up(upload, error)
        finally:
            beating.cancel()
            del self._cancelled[claim.context_id]
        if self._is_stopping:
            await asyncio.to_thread(self._documents.count_attempts, upload, upload.attempts)
            return
        await self._queue.done(claim)
        if self._is_wanted(claim.context_id):  # deleted and uploaded again meanwhile
            await self._queue.put(claim.context_id)

    async def _read_upload(self, upload: Upload, cancelled: threading.Event) -> None:
        if upload.attempts >= ATTEMPTS_MAX:
            raise IngestCrashed(upload.attempts)
        self._log.info("ingest_started", context=upload.context_id, bytes=upload.bytes)
        await asyncio.to_thread(self._documents.count_attempts, upload, upload.attempts + 1)
        loop = asyncio.get_running_loop()
        manifest = await loop.run_in_executor(self._thread, self._ingest, upload, cancelled, loop)
        await self._succeed(upload.context_id, manifest)

    def _is_wanted(self, context_id: str) -> bool:
        entry = self._catalog.find(context_id)
        return entry is not None and entry.state is State.CREATING

    def _ingest(
        self, upload: Upload, cancelled: threading.Event, loop: asyncio.AbstractEventLoop
    ) -> Manifest:
        """Read one document and publish its context; runs in the thread."""

        def tell(progress: IngestProgress) -> None:
            loop.call_soon_threadsafe(
                self._catalog.progress,
                upload.context_id,
                STAGES[progress.stage],
                progress.layers_done,
                progress.layers,
            )

        document = self._documents.read(upload)
        final = self._tenant_root / upload.context_id
        with begin(self._tenant_root.parent) as draft:
            manifest = self._read(
                self._model,
                document,
                draft,
                context_id=upload.context_id,
                settings=self._settings_for(upload.layout),
                on_progress=tell,
                is_cancelled=cancelled.is_set,
            )
            if cancelled.is_set():
                raise IngestCancelled()
            return manifest if publish(draft, final) else read_manifest(final)

    async def _succeed(self, context_id: str, manifest: Manifest) -> None:
        entry = self._catalog.find(context_id)
        if entry is None:  # deleted after the last look
            trash = self._tenant_root.parent / TRASH_NAME
            await asyncio.to_thread(delete, self._tenant_root / context_id, trash)
            raise IngestCancelled()
        self._catalog.put(entry.activated(manifest))
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

    async def _give_up(self, upload: Upload, error: Exception) -> None:
        wire = describe(error)
        fields = fault_fields(error) if is_fault(error) else {}
        self._log.warning("ingest_failed", context=upload.context_id, reason=wire.reason, **fields)
        await asyncio.to_thread(self._documents.fail, upload, reason=wire.reason, text=wire.text)
        entry = self._catalog.find(upload.context_id)
        if entry is not None:
            self._catalog.put(entry.failed(error))

    async def _beat(self, claim: Claim) -> None:
        """Show others that the claim is alive and how far it is."""
        while True:
            entry = self._catalog.find(claim.context_id)
            if entry is not None:
                stage = entry.stage.value
                await self._queue.tell(claim.context_id, stage, entry.layers_done, entry.layers)
            await self._queue.beat(claim)
            await asyncio.sleep(BEAT_S)
