"""The client: one channel, and a method for each thing that the service does.

Knows: the calls of openbook.v1. Does not know: terminals, or how the service answers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from openbook.client.answer import Answer
from openbook.client.asks import Budget, Plan, ask_request
from openbook.client.channel import Tls, call_metadata, open_channel
from openbook.client.errors import from_rpc
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


class Client:
    """A connection to an openbook service; use it as a context manager, from any thread.

    `address` is host:port. `token` is sent as a bearer token, over TLS or to this machine only.
    `tls` None means an unencrypted connection. Connects at the first call. Every method that calls
    the service raises an OpenbookError (see openbook.client.errors) when the call fails.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = call_metadata(address, token=token, tls=tls)
        self._channel = open_channel(address, tls=tls, service_config=SERVICE_CONFIG)
        self._stub = contexts_pb2_grpc.ContextServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def ingest(
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
        """Have the service read `document`, and return the context id once it can be asked.

        A str is text; bytes, a Path or an open binary file are a file of UTF-8 text. `layout` is
        "chat" (questions to an assistant) or "completion" (questions are sentences to continue);
        None is "chat" where the model has a chat template, else "completion". `ttl`, a timedelta
        or seconds, is how long after its last use the context is kept; None leaves that to the
        service, whose default is for ever.
        `on_accepted` is called with the id of a context that is now being read, `on_progress` for
        each layer. A document is read once for each model and layout, and keeps its id; reading
        goes on if this call is interrupted, until the context is deleted. `timeout` is in seconds,
        for all of it; the service has a limit of its own (1,800 by default). After either,
        ingesting again finds the reading where it is.

        Raises ValueError before any call for text that is not UTF-8, with the offset, and for a
        document that is empty or whitespace alone.
        """
        metadata = ingest_metadata(display_name=display_name, model=model, layout=layout, ttl=ttl)
        deadline = Deadline(timeout)
        with opened(document) as upload:
            describe(metadata, upload)
            context = self._upload(metadata, upload, deadline)
        if context.state == pb.CONTEXT_STATE_CREATING:
            if on_accepted is not None:
                on_accepted(plain_id(context))
            context = self._watch(context.name, on_progress, deadline)
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
    ) -> Answer:
        """Ask `question` about a context; the answer streams as it is iterated.

        `answer_prefix` opens the answer and is part of the question. `max_tokens` bounds the
        answer (service's default 256). `temperature` 0 or None is greedy; `top_p` and `seed` apply
        to sampling. `stop` strings end the answer and are not part of it. `budget` says which
        stored keys a generated token reads: "exact" for all, a number (or Keys) for at least so
        many of the best of each query head, None for the service's 100; `estimate` False leaves out
        the estimate of the others, and reads no more than the best. `plan` forces the search, for
        measurements, of a context that was stored for it. `timeout` is in seconds, for the whole
        answer; the service has a limit of its own (120 by default), and the sooner of the two ends
        the answer with DeadlineExceeded.

        The question and its prefix are at most 1 MiB of UTF-8. Raises ValueError or TypeError at
        once for a setting that cannot be sent; what the service refuses is raised by the answer.
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
        call = self._stub.Ask(request, timeout=Deadline(timeout).left(), metadata=self._metadata)
        return Answer(call)

    def contexts(self) -> Iterator[ContextInfo]:
        """Yield the contexts of this caller, newest first; pages are fetched as needed."""
        request = pb.ListContextsRequest()
        while True:
            page = self._unary(self._stub.ListContexts, request)
            yield from map(ContextInfo.from_message, page.contexts)
            if not page.next_page_token:
                return
            request = pb.ListContextsRequest(page_token=page.next_page_token)

    def context(self, context_id: str) -> ContextInfo:
        """Return what the service knows about one context."""
        response = self._unary(
            self._stub.GetContext, pb.GetContextRequest(name=context_name(context_id))
        )
        return ContextInfo.from_message(response.context)

    def delete(self, context_id: str) -> None:
        """Delete a context; its document must be ingested again to be asked about."""
        self._unary(
            self._stub.DeleteContext, pb.DeleteContextRequest(name=context_name(context_id))
        )

    def update(self, context_id: str, *, ttl: Ttl | None) -> ContextInfo:
        """Keep a context for `ttl` from now and from every later use; None: for ever."""
        response = self._unary(self._stub.UpdateContext, update_request(context_id, ttl))
        return ContextInfo.from_message(response.context)

    def verify(self, context_id: str, *, timeout: float | None = None) -> Verification:
        """Have the service read every byte of a context and answer its stored queries again.

        Raises ContextCorrupt for what is damaged. `timeout` is in seconds; the service has a limit
        of its own (1,800 by default).
        """
        request = pb.VerifyContextRequest(name=context_name(context_id))
        left = Deadline(timeout).left()
        return Verification.from_message(
            self._unary(self._stub.VerifyContext, request, timeout=left)
        )

    def reindex(self, context_id: str, *, timeout: float | None = None) -> ContextInfo:
        """Have the service build a context's indexes anew, as after an update; no model runs.

        Answers go on meanwhile. `timeout` is in seconds; the service has a limit of its own (1,800
        by default), and waits for other contexts that are being indexed.
        """
        request = pb.ReindexContextRequest(name=context_name(context_id))
        left = Deadline(timeout).left()
        response = self._unary(self._stub.ReindexContext, request, timeout=left)
        return ContextInfo.from_message(response.context)

    def count_tokens(
        self, document: Document, *, layout: Layout | None = None, model: str = ""
    ) -> TokenCost:
        """Return what `document` would cost, by the checks of an ingest and without reading it.

        At most COUNT_BYTES_MAX bytes (just under 4 MiB) are counted; ValueError beyond that.
        """
        with opened(document) as upload:
            request = count_request(upload, model=model, layout=layout)
        return TokenCost.from_message(self._unary(self._stub.CountTokens, request))

    def models(self) -> tuple[Model, ...]:
        """Return the models that the service answers with."""
        response = self._unary(self._stub.ListModels, pb.ListModelsRequest())
        return tuple(map(Model.from_message, response.models))

    def close(self) -> None:
        """Close the connection; calls under way end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        """Return the client; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()

    def _unary(
        self,
        method: Callable[..., Response],
        request: object,
        *,
        timeout: float | None = UNARY_TIMEOUT_S,
    ) -> Response:
        """Send one message for one message."""
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def _upload(
        self, metadata: pb.IngestContextRequest.Metadata, upload: Upload, deadline: Deadline
    ) -> pb.Context:
        """Send the document and return the context that the service made or found."""
        tries = Tries(deadline)
        while True:
            try:
                response: pb.IngestContextResponse = self._stub.IngestContext(
                    upload_requests(metadata, upload),
                    timeout=deadline.left(),
                    metadata=self._metadata,
                )
                return response.context
            except grpc.RpcError as error:
                if upload.failure is not None:  # the file could not be read to its end
                    raise upload.failure from error
                time.sleep(tries.pause_s(error))

    def _watch(
        self, name: str, on_progress: Callable[[IngestProgress], None] | None, deadline: Deadline
    ) -> pb.Context:
        """Follow a context until the service has nothing more to say, and return its last word."""
        context = pb.Context(name=name, state=pb.CONTEXT_STATE_CREATING)
        tries = Tries(deadline)
        while True:
            call = self._stub.WatchContext(
                pb.WatchContextRequest(name=name), timeout=deadline.left(), metadata=self._metadata
            )
            try:
                for message in call:
                    context = message.context
                    if on_progress is not None:
                        on_progress(IngestProgress.from_message(context))
                return context
            except grpc.RpcError as error:
                pause_s = tries.pause_s(error)
            finally:
                call.cancel()  # on_progress may have raised
            time.sleep(pause_s)
