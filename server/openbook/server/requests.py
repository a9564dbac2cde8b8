"""What a caller sends that is no message at all.

Owns the step from bytes to a request. grpc would answer with its library's words and without a
reason, so a request that cannot be parsed goes on as MALFORMED, and `served` refuses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from openbook.server.errors import ArgumentInvalid
from openbook.v1 import contexts_pb2 as pb

MALFORMED = object()
PREFIX = f"/{pb.DESCRIPTOR.services_by_name['ContextService'].full_name}/"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Parsing(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Hand requests of the service on parsed, or as MALFORMED."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the handler of a method, with a parser that never raises."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PREFIX):
            return handler  # None: there is no such method
        assert handler.request_deserializer is not None, "generated code always parses"
        parser = _unfailing(handler.request_deserializer)
        return handler._replace(request_deserializer=parser)  # type: ignore[attr-defined,no-any-return]


def _unfailing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(message: bytes) -> Any:
        try:
            return parse(message)
        except DecodeError:
            return MALFORMED

    return parsed


def sound(request: Any) -> Any:
    """Return a request, or a stream of them, in which nothing is MALFORMED.

    Raises ArgumentInvalid; of a stream, once that message is reached.
    """
    if isinstance(request, AsyncIterator):
        return _each_sound(request)
    if request is MALFORMED:
        raise ArgumentInvalid("request", "is not a message of this method")
    return request


async def _each_sound(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield sound(request)
