"""An answer while it arrives: pieces of text, then usage and receipt.

Knows: the stream of one ask. Does not know: the channel, or how the question was put.
"""

from types import TracebackType
from typing import Protocol, Self

import grpc

from openbook.client.errors import OpenbookError, ServerFault, from_rpc
from openbook.client.views import Result
from openbook.v1 import contexts_pb2 as pb


class AskCall(Protocol):
    """What an answer needs of gRPC's call: messages in turn, and a way to stop them."""

    def __next__(self) -> pb.AskResponse:
        """Return the next message; raises grpc.RpcError."""

    def cancel(self) -> object:
        """Stop the call."""


class Answer:
    """An iterator of the answer's pieces of text, in order; joined they are the whole answer.

    Every piece ends on a whole character. Iterating raises an OpenbookError when the answer breaks
    off, so a loop that ends has seen all of it. One thread reads; any thread may cancel.
    """

    def __init__(self, call: AskCall) -> None:
        self._call = call
        self._pieces: list[str] = []
        self._final: pb.AskFinal | None = None
        self._failure: OpenbookError | None = None
        self._is_over = False

    def __iter__(self) -> Self:
        """Return the answer itself: it can be read once."""
        return self

    def __next__(self) -> str:
        """Return the next piece, or end; raises OpenbookError when the answer breaks off."""
        while not self._is_over:
            message = self._receive()
            if message is None:
                break
            if message.HasField("final"):
                self._final = message.final
            elif message.delta:
                self._pieces.append(message.delta)
                return message.delta
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def result(self) -> Result:
        """Read the answer to its end and return it whole, pieces already taken included.

        May be called again. Raises OpenbookError when the answer breaks off or was cancelled.
        """
        for _ in self:
            pass
        assert self._final is not None, "an answer that ended has its final message"
        return Result.from_message("".join(self._pieces), self._final)

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

    def _receive(self) -> pb.AskResponse | None:
        """Return the next message, or None once the stream is over, well or not."""
        try:
            return next(self._call)
        except StopIteration:
            if self._final is None:
                self._failure = ServerFault("the answer ended without its final message")
        except grpc.RpcError as error:
            self._failure = from_rpc(error)
            self._failure.__cause__ = error
        self._is_over = True
        return None
