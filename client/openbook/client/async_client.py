"""The client for an event loop: Client's methods, awaited.

Knows: the calls of openbook.v1 on grpc.aio. Does not know: terminals. Everything but the waiting is
shared with Client; files are read and sent by threads, so that the loop never waits for a disk.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from openbook.client.answer import AsyncAnswer, cancelled
from openbook.client.asks import Budget, Plan, ask_request
from openbook.client.channel import (
    Tls,
    call_metadata,
    check_address,
    open_async_channel,
    open_channel,
)
from openbook.client.errors import WORDS, Cancelled, from_rpc
from openbook.client.requests import (
    UNARY_TIMEOUT_S,
    Deadline,
    Ttl,
    context_name,
    count_request,
    describe,
    ingest_metadata,
    plain_id,
    settled_id,
    update_request,
    upload_requests,
)
from openbook.client.retries import SERVICE_CONFIG, Tries
from openbook.client.uploads import Document, Upload, opened
from openbook.client.views import (
    ContextInfo,
    IngestProgress,
    Layout,
    Model,
    TokenCost,
    Verification,
)
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc

Response = TypeVar("Response")


class AsyncClient:
    """A connection to an openbook service for one event loop; use it as `async with`.

    Arguments, methods and errors are Client's, which documents them; what calls the service is
    awaited, `contexts` and answers are iterated with `async for`. Cancelling a task that waits for
    a call cancels the call. Callbacks run in the loop and must not block.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: Tls | None = None) -> None:
        check_address(address)
        self._metadata = call_metadata(address, token=token, tls=tls)
        self._address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._uploads: set[grpc.Future[pb.IngestContextResponse]] = set()

    async def ingest(
        self,
        document: Document,
        *,
        display_name: str = "",
        model: str = "",
        layout: Layout | None = None,
        ttl: Ttl | None = None,
        on_accepted: Callable[[str], None] | None = None,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
    ) -> str:
        """Have the service read `document`, and return the context id once it can be asked."""
        metadata = ingest_metadata(display_name=display_name, model=model, layout=layout, ttl=ttl)
        deadline = Deadline(timeout)
        async with _opened(document) as upload:
            describe(metadata, upload)
            context = await self._upload(metadata, upload, deadline)
        if context.state == pb.CONTEXT_STATE_CREATING:
            if on_accepted is not None:
                on_accepted(plain_id(context))
            context = await self._watch(context.name, on_progress, deadline)
        return settled_id(context)

    def ask(
        self,
        context_id: str,
        question: str,
        *,
        answer_prefix: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        budget: Budget | None = None,
        estimate: bool | None = None,
        plan: Plan | None = None,
        timeout: float | None = None,
    ) -> AsyncAnswer:
        """Ask `question` about a context; the answer streams as it is iterated.

        Not awaited itself: `async for piece in client.ask(...)`, `await client.ask(...).result()`.
        """
        request = ask_request(
            context_name(context_id),
            question,
            answer_prefix=answer_prefix,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            budget=budget,
            estimate=estimate,
            plan=plan,
        )
        left = Deadline(timeout).left()
        return AsyncAnswer(self._stub().Ask(request, timeout=left, metadata=self._metadata))

    async def contexts(self) -> AsyncIterator[ContextInfo]:
        """Yield the contexts of this caller, newest first; pages are fetched as needed."""
        request = pb.ListContextsRequest()
        while True:
            page = await self._unary(self._stub().ListContexts, request)
            for message in page.contexts:
                yield ContextInfo.from_message(message)
            if not page.next_page_token:
                return
            request = pb.ListContextsRequest(page_token=page.next_page_token)

    async def context(self, context_id: str) -> ContextInfo:
        """Return what the service knows about one context."""
        request = pb.GetContextRequest(name=context_name(context_id))
        response = await self._unary(self._stub().GetContext, request)
        return ContextInfo.from_message(response.context)

    async def delete(self, context_id: str) -> None:
        """Delete a context; its document must be ingested again to be asked about."""
        request = pb.DeleteContextRequest(name=context_name(context_id))
        await self._unary(self._stub().DeleteContext, request)

    async def update(self, context_id: str, *, ttl: Ttl | None) -> ContextInfo:
        """Keep a context for `ttl` from now and from every later use; None: for ever."""
        request = update_request(context_id, ttl)
        response = await self._unary(self._stub().UpdateContext, request)
        return ContextInfo.from_message(response.context)

    async def verify(self, context_id: str, *, timeout: float | None = None) -> Verification:
        """Have the service read every byte of a context and answer its stored queries again."""
        request = pb.VerifyContextRequest(name=context_name(context_id))
        left = Deadline(timeout).left()
        response = await self._unary(self._stub().VerifyContext, request, timeout=left)
        return Verification.from_message(response)

    async def reindex(self, context_id: str, *, timeout: float | None = None) -> ContextInfo:
        """Have the service build a context's indexes anew; no model runs, and answers go on."""
        request = pb.ReindexContextRequest(name=context_name(context_id))
        left = Deadline(timeout).left()
        response = await self._unary(self._stub().ReindexContext, request, timeout=left)
        return ContextInfo.from_message(response.context)

    async def count_tokens(
        self, document: Document, *, layout: Layout | None = None, model: str = ""
    ) -> TokenCost:
        """Return what `document` would cost, by the checks of an ingest and without reading it."""
        async with _opened(document) as upload:
            request = await asyncio.to_thread(count_request, upload, model=model, layout=layout)
        return TokenCost.from_message(await self._unary(self._stub().CountTokens, request))

    async def models(self) -> tuple[Model, ...]:
        """Return the models that the service answers with."""
        response = await self._unary(self._stub().ListModels, pb.ListModelsRequest())
        return tuple(map(Model.from_message, response.models))

    async def close(self) -> None:
        """Close the connection; calls under way end as cancelled."""
        for upload in self._uploads:
            upload.cancel()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        """Return the client; leaving the block closes it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        await self.close()

    def _stub(self) -> Any:
        """Return the calls on the channel, which belongs to the loop of the first one."""
        if self._channel is None:
            self._channel = open_async_channel(
                self._address, tls=self._tls, service_config=SERVICE_CONFIG
            )
        return contexts_pb2_grpc.ContextServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def _unary(
        self,
        method: Callable[..., Awaitable[Response]],
        request: object,
        *,
        timeout: float | None = UNARY_TIMEOUT_S,
    ) -> Response:
        """Send one message for one message."""
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        except asyncio.CancelledError as error:
            raise cancelled(error) from error

    async def _upload(
        self, metadata: pb.IngestContextRequest.Metadata, upload: Upload, deadline: Deadline
    ) -> pb.Context:
        """Send the document and return the context that the service made or found."""
        tries = Tries(deadline)
        while True:
            try:
                return await self._sent(upload_requests(metadata, upload), deadline.left())
            except grpc.RpcError as error:
                if upload.failure is not None:  # the file could not be read to its end
                    raise upload.failure from error
                pause_s = tries.pause_s(error)
            await asyncio.sleep(pause_s)

    async def _sent(
        self, requests: Iterator[pb.IngestContextRequest], timeout: float | None
    ) -> pb.Context:
        """Send an ingest from gRPC's own thread, over a connection of its own.

        grpc.aio loses the service's status when a message cannot be sent because the service has
        already answered, and so a refusal of a long document would read as a fault.
        """
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        channel = open_channel(self._address, tls=self._tls, service_config=SERVICE_CONFIG)
        stub = contexts_pb2_grpc.ContextServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.IngestContext.future(requests, timeout=timeout, metadata=self._metadata)
        self._uploads.add(call)
        try:
            call.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
            await over.wait()
            response: pb.IngestContextResponse = call.result()
            return response.context
        except grpc.FutureCancelledError as error:
            raise Cancelled(WORDS[Cancelled], status="CANCELLED") from error
        finally:
            self._uploads.discard(call)
            call.cancel()  # the task may be what ends
            await asyncio.to_thread(channel.close)

    async def _watch(
        self, name: str, on_progress: Callable[[IngestProgress], None] | None, deadline: Deadline
    ) -> pb.Context:
        """Follow a context until the service has nothing more to say, and return its last word."""
        context = pb.Context(name=name, state=pb.CONTEXT_STATE_CREATING)
        tries = Tries(deadline)
        while True:
            call = self._stub().WatchContext(
                pb.WatchContextRequest(name=name), timeout=deadline.left(), metadata=self._metadata
            )
            try:
                async for message in call:
                    context = message.context
                    if on_progress is not None:
                        on_progress(IngestProgress.from_message(context))
                return context
            except grpc.RpcError as error:
                pause_s = tries.pause_s(error)
            except asyncio.CancelledError as error:
                raise cancelled(error) from error
            finally:
                call.cancel()  # on_progress may have raised
            await asyncio.sleep(pause_s)


@asynccontextmanager
async def _opened(document: Document) -> AsyncIterator[Upload]:
    """Open, check and hash `document` in a thread; close it on leaving, and when cancelled."""
    source = opened(document)
    opening = asyncio.ensure_future(asyncio.to_thread(source.__enter__))

    def leave(done: "asyncio.Future[Upload]") -> None:
        if not done.cancelled() and done.exception() is None:
            source.__exit__(None, None, None)

    try:
        yield await asyncio.shield(opening)
    finally:
        if opening.done():
            leave(opening)
        else:  # the task was cancelled, but its thread goes on
            opening.add_done_callback(leave)
