"""openbook.v1.ContextService: what each method does, in the server's own words.

Owns the order of checks in each method. Everything it decides is decided elsewhere: messages and
asks translate, catalog and ingests know the contexts, decode_worker answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from openbook.server.asks import ask_spec
from openbook.server.callers import Callers
from openbook.server.calls import Rpc, caller_of, served
from openbook.server.catalog import Catalog, Entry
from openbook.server.decode_worker import DecodeWorker
from openbook.server.documents import Documents, Receiving
from openbook.server.errors import (
    ArgumentInvalid,
    ChunkOversized,
    DigestMismatch,
    Draining,
    ReaderStalled,
)
from openbook.server.gate import Gate
from openbook.server.ingests import Ingests
from openbook.server.lives import Lives
from openbook.server.logs import Log
from openbook.server.messages import (
    check_layout,
    check_metadata,
    context_message,
    cost_message,
    final_message,
    model_message,
    page_size,
    refuse_unknown_fields,
    ttl_s,
    verify_message,
)
from openbook.server.naming import parse_name
from openbook.server.threads import Pool, made
from openbook.server.upkeep import DAMAGES, Upkeep
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs
from openbook.worker import Finished, Model, count_tokens

CHUNK_BYTES_MAX = 1 << 20
COUNTS_AT_ONCE, COUNTS_WAITING_MAX = 1, 16  # a count of 4 MiB may take a second
STALL_S = 30.0  # how long an answer waits for its reader


@dataclass(frozen=True, slots=True)
class Limits:
    """How long calls may take and how much they may ask for."""

    answer_tokens_max: int
    ask_deadline_s: float
    call_deadline_s: float
    ingest_deadline_s: float


class ContextService(rpcs.ContextServiceServicer):
    """The servicer; every method maps its errors by the one table in errors.py."""

    def __init__(
        self,
        model: Model,
        catalog: Catalog,
        documents: Documents,
        ingests: Ingests,
        decode: DecodeWorker,
        *,
        upkeep: Upkeep,
        lives: Lives,
        tenant_root: Path,
        limits: Limits,
        gate: Gate,
        callers: Callers,
        log: Log,
    ) -> None:
        self.log = log
        self.gate = gate
        self.callers = callers
        self.running = 0
        self.is_draining = False
        self._model = model
        self._catalog = catalog
        self._documents = documents
        self._ingests = ingests
        self._decode = decode
        self._upkeep = upkeep
        self._lives = lives
        self._tenant_root = tenant_root
        self._limits = limits
        self._counting = Pool(
            COUNTS_AT_ONCE, waiting_max=COUNTS_WAITING_MAX, what="documents to count"
        )

    def close(self) -> None:
        """Let go of the threads; called once no call is left."""
        self._counting.close()
        self._upkeep.close()

    def deadline_s(self, method: str) -> float:
        """Return how long a method may take, whatever its caller says."""
        if method == "Ask":
            return self._limits.ask_deadline_s
        if method in ("IngestContext", "WatchContext", "VerifyContext", "ReindexContext"):
            return self._limits.ingest_deadline_s
        return self._limits.call_deadline_s

    @served
    async def IngestContext(
        self, requests: AsyncIterator[pb.IngestContextRequest], rpc: Rpc
    ) -> pb.IngestContextResponse:
        """Store an upload and have it read; the same document again is the same context.

        A document that is there and whose digest comes first need not be sent.
        """
        self._check_taking()
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("metadata"):
            raise ArgumentInvalid("metadata", "must be the first message")
        layout = check_metadata(first.metadata, self._model)
        caller = caller_of(self, rpc)
        seconds = ttl_s(first.metadata.ttl) if first.metadata.HasField("ttl") else None
        announced = first.metadata.sha256
        entry = await self._ingests.find(layout, announced, caller) if announced else None
        if entry is None:
            with self._ingests.uploading():
                receiving, digest = await self._received(requests, announced, rpc)
                accepting = self._ingests.accept(
                    receiving,
                    layout=layout,
                    document_sha256=digest,
                    display_name=first.metadata.display_name,
                    caller=caller,
                    ttl_s=seconds,
                )
                # A caller that goes away now must not tear an upload that is being stored.
                entry = await asyncio.shield(asyncio.create_task(accepting))
        if seconds is not None:
            setting = self._ingests.set_ttl(entry.context_id, seconds)
            entry = await asyncio.shield(asyncio.create_task(setting))
        else:
            self._ingests.use(entry.context_id)
        return pb.IngestContextResponse(context=self._message(entry))

    @served
    async def WatchContext(self, request: pb.WatchContextRequest, rpc: Rpc) -> None:
        """Send the context now and at each change, until it is ACTIVE or FAILED."""
        refuse_unknown_fields(request)
        async with aclosing(self._catalog.watch(parse_name(request.name))) as entries:
            async for entry in entries:
                await rpc.write(pb.WatchContextResponse(context=self._message(entry)))

    @served
    async def GetContext(self, request: pb.GetContextRequest, rpc: Rpc) -> pb.GetContextResponse:
        """Return one context."""
        refuse_unknown_fields(request)
        entry = self._catalog.get(parse_name(request.name))
        return pb.GetContextResponse(context=self._message(entry))

    @served
    async def ListContexts(
        self, request: pb.ListContextsRequest, rpc: Rpc
    ) -> pb.ListContextsResponse:
        """Return one page of the contexts, newest first."""
        refuse_unknown_fields(request)
        entries, token = self._catalog.page(page_size(request), request.page_token)
        return pb.ListContextsResponse(
            contexts=[self._message(entry) for entry in entries], next_page_token=token
        )

    @served
    async def DeleteContext(
        self, request: pb.DeleteContextRequest, rpc: Rpc
    ) -> pb.DeleteContextResponse:
        """Remove a context; its reading stops if it is being read."""
        refuse_unknown_fields(request)
        context_id = parse_name(request.name)
        await asyncio.shield(asyncio.create_task(self._ingests.delete(context_id)))
        return pb.DeleteContextResponse()

    @served
    async def Ask(self, request: pb.AskRequest, rpc: Rpc) -> None:
        """Stream an answer: deltas of text, then usage, finish reason and receipt."""
        asked_at = time.monotonic()  # the receipt counts from here
        self._check_taking()
        context_id = parse_name(request.context)
        spec = ask_spec(
            request,
            answer_tokens_max=self._limits.answer_tokens_max,
            caller=caller_of(self, rpc),
        )
        entry = self._upkeep.readable(context_id)
        self._ingests.use(context_id)
        answer = self._decode.answer(
            spec,
            context_id,
            self._tenant_root / context_id,
            size=entry.bytes,
            asked_at=asked_at,
        )
        try:
            async with aclosing(answer) as pieces:
                stall_s = None  # the first always finds room; no error reaches a caller after one
                async for piece in pieces:  # that was given up while the call's headers went out
                    await _write(rpc, piece, stall_s)
                    stall_s = STALL_S
        except DAMAGES as error:
            self._upkeep.damaged(entry, error)
            raise

    @served
    async def ListModels(self, request: pb.ListModelsRequest, rpc: Rpc) -> pb.ListModelsResponse:
        """Return the served model."""
        refuse_unknown_fields(request)
        return pb.ListModelsResponse(models=[model_message(self._model)])

    @served
    async def UpdateContext(
        self, request: pb.UpdateContextRequest, rpc: Rpc
    ) -> pb.UpdateContextResponse:
        """Set the time to live, counted from now; without one the context is kept for ever."""
        refuse_unknown_fields(request)
        context_id = parse_name(request.name)
        seconds = ttl_s(request.ttl) if request.HasField("ttl") else None
        setting = self._ingests.set_ttl(context_id, seconds)
        entry = await asyncio.shield(asyncio.create_task(setting))
        return pb.UpdateContextResponse(context=self._message(entry))

    @served
    async def VerifyContext(
        self, request: pb.VerifyContextRequest, rpc: Rpc
    ) -> pb.VerifyContextResponse:
        """Read every byte of a context and answer its stored queries again."""
        refuse_unknown_fields(request)
        report = await self._upkeep.verify(parse_name(request.name))
        return verify_message(report)

    @served
    async def ReindexContext(
        self, request: pb.ReindexContextRequest, rpc: Rpc
    ) -> pb.ReindexContextResponse:
        """Build the indexes of a context anew from what is stored; no model runs."""
        refuse_unknown_fields(request)
        entry = await self._upkeep.reindex(parse_name(request.name))
        return pb.ReindexContextResponse(context=self._message(entry))

    @served
    async def CountTokens(self, request: pb.CountTokensRequest, rpc: Rpc) -> pb.CountTokensResponse:
        """Return what a document would cost, by the checks of an ingest and without reading it."""
        refuse_unknown_fields(request)
        layout = check_layout(request.model, request.prompt_layout, self._model)
        count = await self._counting.run(count_tokens, self._model, request.document, layout)
        return cost_message(count, self._model)

    async def _received(
        self, requests: AsyncIterator[pb.IngestContextRequest], announced: bytes, rpc: Rpc
    ) -> tuple[Receiving, bytes]:
        """Take an upload in, and return it with its digest; a torn one leaves nothing.

        To grpc the messages of a call that was cancelled end like those of one that is whole; that
        it was cancelled arrives later, but before anything else of the call does.
        """
        beginning = asyncio.create_task(asyncio.to_thread(self._documents.receive))
        receiving = await made(beginning, undo=Receiving.discard)  # of an empty file: no wait
        try:
            await _receive(requests, receiving)
            await rpc.send_initial_metadata(())
            digest = await asyncio.to_thread(receiving.finish)
            if announced and announced != digest:
                raise DigestMismatch()
        except BaseException:
            await asyncio.shield(asyncio.to_thread(receiving.discard))
            raise
        return receiving, digest

    def _message(self, entry: Entry) -> pb.Context:
        return context_message(entry, self._lives.expire_unix_s(entry.context_id))

    def _check_taking(self) -> None:
        if self.is_draining:
            raise Draining()


async def _receive(requests: AsyncIterator[pb.IngestContextRequest], receiving: Receiving) -> None:
    """Write the chunks of an upload in the order they come."""
    async for request in requests:
        if not request.HasField("chunk"):
            raise ArgumentInvalid("chunk", "must be in every message after the first")
        if len(request.chunk) > CHUNK_BYTES_MAX:
            raise ChunkOversized(len(request.chunk), CHUNK_BYTES_MAX)
        await asyncio.to_thread(receiving.write, request.chunk)


async def _write(rpc: Rpc, piece: str | Finished, stall_s: float | None) -> None:
    """Send one part of an answer. Raises ReaderStalled when the caller does not read."""
    message = pb.AskResponse(delta=piece) if isinstance(piece, str) else final_message(piece)
    try:
        async with asyncio.timeout(stall_s) as stall:
            await rpc.write(message)
    except TimeoutError as error:
        if stall.expired():
            raise ReaderStalled() from error
        raise
