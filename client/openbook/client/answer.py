"""An answer while it arrives: pieces of text, then usage and receipt.

Knows: the stream of one ask, read by a thread (Answer) or awaited (AsyncAnswer). Does not know: the
channel, or how the question was put.
"""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from openbook.client.errors import WORDS, Cancelled, OpenbookError, ServerFault, from_rpc
from openbook.client.views import Result
from openbook.v1 import contexts_pb2 as pb


class AskCall(Protocol):
    """What an answer needs of gRPC's call: messages in turn, and a way to stop them."""

    def __next__(self) -> pb.AskResponse:
        """Return the next message; raises grpc.RpcError."""

    def cancel(self) -> object:
        """Stop the call."""


class AsyncAskCall(Protocol):
    """What an awaited answer needs of gRPC's call."""

    def __aiter__(self) -> AsyncIterator[pb.AskResponse]:
        """Return the messages in turn; raises grpc.RpcError, CancelledError once cancelled."""

    def cancel(self) -> object:
        """Stop the call."""


class _Transcript:
    """What has come of an answer, and how it ended."""

    def __init__(self) -> None:
        self.is_over = False
        self._pieces: list[str] = []
        self._final: pb.AskFinal | None = None
        self._failure: OpenbookError | None = None

    def take(self, message: pb.AskResponse) -> str:
        """Keep a message, and return its piece of text or ""."""
        if message.HasField("final"):
            self._final = message.final
            return ""
        if message.delta:
            self._pieces.append(message.delta)
        return message.delta

    def end(self, failure: OpenbookError | None = None, cause: BaseException | None = None) -> None:
        """Keep that the stream is over, well or not."""
        self.is_over = True
        if failure is None and self._final is None:
            failure = ServerFault("the answer ended without its final message")
        self._failure = failure
        if failure is not None:
            failure.__cause__ = cause

    def check(self) -> None:
        """Raise what the answer broke off with, if it did."""
        if self._failure is not None:
            raise self._failure

    def result(self) -> Result:
        """Return the whole of an answer that has ended."""
        self.check()
        assert self._final is not None, "an answer that ended has its final message"
        return Result.from_message("".join(self._pieces), self._final)


class Answer:
    """An iterator of the answer's pieces of text, in order; joined they are the whole answer.

    Every piece ends on a whole character. Iterating raises an OpenbookError when the answer breaks
    off, so a loop that ends has seen all of it. One thread reads; any thread may cancel.
    """

    def __init__(self, call: AskCall) -> None:
        self._call = call
        self._transcript = _Transcript()

    def __iter__(self) -> Self:
        """Return the answer itself: it can be read once."""
        return self

    def __next__(self) -> str:
        """Return the next piece, or end; raises OpenbookError when the answer breaks off."""
        while not self._transcript.is_over:
            try:
                if piece := self._transcript.take(next(self._call)):
                    return piece
            except StopIteration:
                self._transcript.end()
            except grpc.RpcError as error:
                self._transcript.end(from_rpc(error), error)
        self._transcript.check()
        raise StopIteration

    def result(self) -> Result:
        """Read the answer to its end and return it whole, pieces already taken included.

        May be called again. Raises OpenbookError when the answer breaks off or was cancelled.
        """
        for _ in self:
            pass
        return self._transcript.result()

    def cancel(self) -> None:
        """Stop the answer, here and in the service; reading on raises Cancelled.

        Does nothing to an answer that has arrived whole.
        """
        self._call.cancel()

    def __enter__(self) -> Self:
        """Return the answer; leaving the block cancels what has not arrived."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what has not arrived."""
        self.cancel()


class AsyncAnswer:
    """An answer whose pieces and result are awaited; otherwise as Answer.

    One task reads. Cancelling that task stops the answer in the service as well.
    """

    def __init__(self, call: AsyncAskCall) -> None:
        self._call = call
        self._messages = aiter(call)
        self._transcript = _Transcript()

    def __aiter__(self) -> Self:
        """Return the answer itself: it can be read once."""
        return self

    async def __anext__(self) -> str:
        """Return the next piece, or end; raises OpenbookError when the answer breaks off."""
        while not self._transcript.is_over:
            try:
                if piece := self._transcript.take(await anext(self._messages)):
                    return piece
            except StopAsyncIteration:
                self._transcript.end()
            except grpc.RpcError as error:
                self._transcript.end(from_rpc(error), error)
            except asyncio.CancelledError as error:
                self._call.cancel()
                self._transcript.end(_cancelled(), error)
                if is_task_cancelled():
                    raise
        self._transcript.check()
        raise StopAsyncIteration

    async def result(self) -> Result:
        """Read the answer to its end and return it whole, pieces already taken included."""
        async for _ in self:
            pass
        return self._transcript.result()

    def cancel(self) -> None:
        """Stop the answer, here and in the service; reading on raises Cancelled."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        """Return the answer; leaving the block cancels what has not arrived."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what has not arrived."""
        self.cancel()


def is_task_cancelled() -> bool:
    """Tell whether the running task is to end; gRPC raises the same error for a cancelled call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cancelled(error: asyncio.CancelledError) -> Cancelled:
    """Return what a call that was cancelled on this side raises; raises `error` itself to end."""
    if is_task_cancelled():
        raise error
    return _cancelled()


def _cancelled() -> Cancelled:
    return Cancelled(WORDS[Cancelled], status=grpc.StatusCode.CANCELLED.name)
