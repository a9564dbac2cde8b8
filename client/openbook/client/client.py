"""The client: one channel, and a method for each thing that the service does.

Knows: the calls of openbook.v1. Does not know: terminals, or how the service answers.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from openbook.client.answer import Answer
from openbook.client.asks import Budget, Plan, ask_request
from openbook.client.channel import Tls, call_metadata, open_channel
from openbook.client.errors import DeadlineExceeded, ServerFault, from_reason, from_rpc
from openbook.client.uploads import Document, Upload, opened, utf8
from openbook.client.views import LAYOUTS, ContextInfo, IngestProgress, Layout, Model
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc

UNARY_TIMEOUT_S = 30.0  # for calls that only look something up
TIMEOUT_S_MAX = (
    10 * 365 * 86_400.0
)  # far beyond that, gRPC's clock overflows and ends calls at once
SHOWN_MAX = 40  # characters of a wrong id that its error repeats
_ID = re.compile(r"[0-9a-f]{32}")

Response = TypeVar("Response")


class Client:
    """A connection to an openbook service; use it as a context manager, from any thread.

    `address` is host:port. `token` is sent as a bearer token, over TLS or to this machine only.
    `tls` None means an unencrypted connection. Connects at the first call. Every method that calls
    the service raises an OpenbookError (see openbook.client.errors) when the call fails.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = call_metadata(address, token=token, tls=tls)
        self._channel = open_channel(address, tls=tls)
        self._stub = contexts_pb2_grpc.ContextServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def ingest(
        self,
        document: Document,
        *,
        display_name: str = "",
        model: str = "",
        layout: Layout | None = None,
        on_accepted: Callable[[str], None] | None = None,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
    ) -> str:
        """Have the service read `document`, and return the context id once it can be asked.

        A str is text; bytes, a Path or an open binary file are a file of UTF-8 text. `layout` is
        "chat" (questions to an assistant) or "completion" (questions are sentences to continue);
        None is "chat" where the model has a chat template, else "completion".
        `on_accepted` is called with the id of a context that is now being read, `on_progress` for
        each layer. A document is read once for each model and layout, and keeps its id; reading
        goes on if this call is interrupted, until the context is deleted. `timeout` is in seconds,
        for all of it; the service has a limit of its own (1,800 by default). After either,
        ingesting again finds the reading where it is.

        Raises ValueError before any call for text that is not UTF-8, with the offset, and for a
        document that is empty or whitespace alone.
        """
        if layout is not None and layout not in LAYOUTS:
            raise ValueError("layout must be 'chat', 'completion' or None")
        utf8(display_name, "display_name")
        utf8(model, "model")
        deadline = _Deadline(timeout)
        with opened(document) as upload:
            metadata = pb.IngestContextRequest.Metadata(
                display_name=display_name or upload.name,
                model=model,
                prompt_layout=LAYOUTS[layout] if layout else pb.PROMPT_LAYOUT_UNSPECIFIED,
                sha256=upload.sha256,
            )
            context = self._upload(metadata, upload, deadline)
        if context.state == pb.CONTEXT_STATE_CREATING:
            if on_accepted is not None:
                on_accepted(context.name.removeprefix("contexts/"))
            context = self._watch(context.name, on_progress, deadline)
        if context.state == pb.CONTEXT_STATE_FAILED:
            raise from_reason(context.error.reason, context.error.message)
        if context.state != pb.CONTEXT_STATE_ACTIVE:
            raise ServerFault("the service stopped watching a context that is still being read")
        return context.name.removeprefix("contexts/")

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
        stored keys a generated token reads: "exact" for all, a number (or Keys) for the best of
        each query head, None for the service's 100; `estimate` False leaves out the estimate of
        the others. `plan` "scan" or "graph" forces the search, for measurements. `timeout` is in
        seconds, for the whole answer; the service has a limit of its own (120 by default), and the
        sooner of the two ends the answer with DeadlineExceeded.

        The question and its prefix are at most 1 MiB of UTF-8. Raises ValueError or TypeError at
        once for a setting that cannot be sent; what the service refuses is raised by the answer.
        """
        request = ask_request(
            _name(context_id),
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
        call = self._stub.Ask(request, timeout=_Deadline(timeout).left(), metadata=self._metadata)
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
        response = self._unary(self._stub.GetContext, pb.GetContextRequest(name=_name(context_id)))
        return ContextInfo.from_message(response.context)

    def delete(self, context_id: str) -> None:
        """Delete a context; its document must be ingested again to be asked about."""
        self._unary(self._stub.DeleteContext, pb.DeleteContextRequest(name=_name(context_id)))

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

    def _unary(self, method: "Callable[..., Response]", request: object) -> Response:
        """Send one message for one message."""
        try:
            return method(request, timeout=UNARY_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def _upload(
        self,
        metadata: pb.IngestContextRequest.Metadata,
        upload: Upload,
        deadline: "_Deadline",
    ) -> pb.Context:
        """Send the document and return the context that the service made or found."""

        def requests() -> Iterator[pb.IngestContextRequest]:
            yield pb.IngestContextRequest(metadata=metadata)
            for chunk in upload.chunks():
                yield pb.IngestContextRequest(chunk=chunk)

        try:
            response: pb.IngestContextResponse = self._stub.IngestContext(
                requests(), timeout=deadline.left(), metadata=self._metadata
            )
        except grpc.RpcError as error:
            if upload.failure is not None:  # the file could not be read to its end
                raise upload.failure from error
            raise from_rpc(error) from error
        return response.context

    def _watch(
        self,
        name: str,
        on_progress: Callable[[IngestProgress], None] | None,
        deadline: "_Deadline",
    ) -> pb.Context:
        """Follow a context until the service has nothing more to say, and return its last word."""
        context = pb.Context(name=name, state=pb.CONTEXT_STATE_CREATING)
        call = self._stub.WatchContext(
            pb.WatchContextRequest(name=name), timeout=deadline.left(), metadata=self._metadata
        )
        try:
            for message in call:
                context = message.context
                if on_progress is not None:
                    on_progress(IngestProgress.from_message(context))
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()  # on_progress may have raised
        return context


class _Deadline:
    """What is left of a timeout that several calls share."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is None:
            self._end = None
            return
        if not 0 < timeout < math.inf:
            raise ValueError(
                f"timeout is {timeout}; it must be a number of seconds above 0, or None for no end"
            )
        self._end = time.monotonic() + min(timeout, TIMEOUT_S_MAX)

    def left(self) -> float | None:
        """Return the seconds left, or None when there is no end; raises DeadlineExceeded."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the timeout has passed", status="DEADLINE_EXCEEDED")
        return left


def _name(context_id: str) -> str:
    """Return the resource name of a context given by id or by name.

    Raises TypeError or ValueError for what is neither; the latter repeats its beginning.
    """
    if not isinstance(context_id, str):
        raise TypeError(f"context_id must be a str, not {type(context_id).__name__}")
    plain = context_id.removeprefix("contexts/")
    if _ID.fullmatch(plain) is None:
        shown = plain if len(plain) <= SHOWN_MAX else f"{plain[: SHOWN_MAX - 1]}…"
        raise ValueError(  # repr escapes what a terminal would obey
            f"{shown!r} is not a context id (32 hexadecimal digits; see `openbook contexts list`)"
        )
    return f"contexts/{plain}"
