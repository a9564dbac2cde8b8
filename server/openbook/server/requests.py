"""What a caller sends that is no message at all, or that never comes.

Owns the step from bytes to a request. grpc would answer with its library's words and without a
reason, so a request that cannot be parsed goes on as MALFORMED, and `served` refuses it. grpc would
also call a handler only once the request is there, and wait for it for ever: here a handler begins
with the call and awaits its request, so that the server's deadline covers that as well.
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
        """Return the handler of a method, begun at once, with a parser that never raises."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PREFIX):
            return handler  # None: there is no such method
        assert handler.request_deserializer is not None, "generated code always parses"
        parser = _unfailing(handler.request_deserializer)
        if handler.request_streaming:
            return handler._replace(request_deserializer=parser)  # type: ignore[attr-defined,no-any-return]
        return _begun_at_once(handler, parser)


class _Only:
    """The one request of a call, which may not have come yet."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self.requests = requests


def _begun_at_once(handler: Handler, parser: Callable[[bytes], Any]) -> Handler:
    """Return a handler that is given an `_Only` in place of its request."""
    method: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def begun(requests: AsyncIterator[Any], rpc: Any) -> Any:
        return await method(_Only(requests), rpc)

    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(
        begun,
        request_deserializer=parser,
        response_serializer=handler.response_serializer,
    )


def _unfailing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(message: bytes) -> Any:
        try:
            return parse(message)
        except DecodeError:
            return MALFORMED

    return parsed


async def received(request: Any) -> Any:
    """Return a request once it is there, or a stream of them; nothing in it is MALFORMED.

    Raises ArgumentInvalid; of a stream, once that message is reached.
    """
    if isinstance(request, _Only):
        only = await anext(aiter(request.requests), None)
        if only is None:
            raise ArgumentInvalid("request", "is missing")
        return _sound(only)
    return _each_sound(request)


def _sound(request: Any) -> Any:
    if request is MALFORMED:
        raise ArgumentInvalid("request", "is not a message of this method")
    return request


async def _each_sound(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _sound(request)
