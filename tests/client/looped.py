"""AsyncClient with Client's face: every call is awaited in a loop of its own thread.

So one test says what both clients do.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self

from openbook.client import AsyncAnswer, AsyncClient, ContextInfo, Result


class LoopedClient:
    """An AsyncClient and its running loop."""

    def __init__(self, address: str, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._client = AsyncClient(address, **settings)

    def wait(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Begin and await a call in the loop."""

        async def called() -> Any:
            return await call()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(timeout=60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *given, **named: self.wait(lambda: method(*given, **named))

    def contexts(self) -> list[ContextInfo]:
        async def listed() -> list[ContextInfo]:
            return [info async for info in self._client.contexts()]

        return self.wait(listed)

    def ask(self, *given: Any, **named: Any) -> "LoopedAnswer":
        async def asked() -> AsyncAnswer:
            return self._client.ask(*given, **named)

        return LoopedAnswer(self, self.wait(asked))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.wait(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LoopedAnswer:
    """An AsyncAnswer with Answer's face."""

    def __init__(self, client: LoopedClient, answer: AsyncAnswer) -> None:
        self._client = client
        self._answer = answer

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        async def piece() -> str | None:
            return await anext(self._answer, None)

        taken = self._client.wait(piece)
        if taken is None:
            raise StopIteration
        return taken

    def result(self) -> Result:
        return self._client.wait(self._answer.result)

    def cancel(self) -> None:
        async def cancelled() -> None:
            self._answer.cancel()

        self._client.wait(cancelled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.wait(lambda: self._answer.__aexit__(None, None, None))
