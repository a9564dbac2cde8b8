"""A Redis that may be absent, frozen, emptied or replaced at any moment.

Owns the connection, its deadlines, and the restart of the embedded Valkey. Every command of the
server goes through `Broker.command`. It knows nothing of what the commands mean.

redis-py's defaults take seconds to fail, and a cancelled command can leave its reply to the next
caller. So: no retries, short socket timeouts, an outer deadline, and every command runs in a task
of its own that its caller's cancellation does not reach.

A Redis that refuses (READONLY, OOM, BUSY, a wrong type) is another thing than one that does not
answer: the command fails the same way, but the next one is tried at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from openbook.server.errors import BrokerAway
from openbook.server.logs import Log
from openbook.server.valkey import EmbeddedValkey, ValkeyFailed

SOCKET_TIMEOUT_S = 0.25
COMMAND_DEADLINE_S = 0.5
REST_S = 0.5  # after a failure: fail at once for this long instead of making each caller wait
WATCH_S = 1.0
CONNECTIONS_MAX = 16  # further commands wait for a place, within their deadline
POLICY_S = 60.0  # how often a Redis is asked whether it evicts
REFUSAL_TOLD_S = 60.0  # a Redis that refuses is told of so often, however many commands it refuses
SEEN_KEY = "openbook:seen"
SEEN_MS = 10_000


class Broker:
    """Commands to one Redis, each bounded in time; BrokerAway when it does not answer."""

    def __init__(
        self,
        url: str,
        *,
        log: Log,
        embedded: EmbeddedValkey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._embedded = embedded
        self._clock = clock
        self._rest_until = 0.0
        self._is_away = False
        self._refusal_told_at: float | None = None
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._running: set[asyncio.Task[Any]] = set()
        self._client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            encoding_errors="replace",  # what is no UTF-8 is nothing of ours
            protocol=2,  # the replies of Redis 7.0
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            max_connections=CONNECTIONS_MAX,
        )
        # The one untyped call of redis-py that every command goes through.
        self._execute: Callable[..., Awaitable[Any]] = self._client.execute_command

    async def command(self, *words: str | int | float) -> Any:
        """Run one command and return its reply as redis-py parses it. Raises BrokerAway.

        Any error reply counts as away for the caller: Redis only advises.
        """
        if self._clock() < self._rest_until:
            raise BrokerAway()
        task = asyncio.create_task(self._bounded(words))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def answers(self) -> bool:
        """Tell whether Redis takes writes now, or did not a moment ago."""
        try:
            await self.command("SET", SEEN_KEY, "1", "PX", SEEN_MS)
        except BrokerAway:
            return False
        return True

    async def _bounded(self, words: tuple[str | int | float, ...]) -> Any:
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S), self._places:
                reply = await self._execute(*words)
        except ResponseError as error:
            self._note_back()
            self._note_refusal(error)
            raise BrokerAway() from error
        except (RedisError, OSError, TimeoutError) as error:
            self._rest_until = self._clock() + REST_S
            if not self._is_away:
                self._is_away = True
                # redis-py wraps what a new connection fails of, such as a wrong password.
                cause = error.__cause__ if isinstance(error.__cause__, RedisError) else error
                self._log.warning("redis_away", error=type(cause).__name__)
            raise BrokerAway() from error
        self._note_back()
        return reply

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._log.info("redis_back")

    def _note_refusal(self, error: ResponseError) -> None:
        now = self._clock()
        if self._refusal_told_at is None or now - self._refusal_told_at >= REFUSAL_TOLD_S:
            self._refusal_told_at = now
            word = str(error).partition(" ")[0]  # Redis' code, where redis-py has left it in place
            code = word if word.isascii() and word.isupper() else type(error).__name__
            self._log.warning("redis_refuses", error=code)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have been cancelled

    async def watch_policy(self) -> None:
        """Log a warning whenever this Redis begins to evict live leases, until cancelled.

        One that does not let itself be asked, as those of cloud services, is not asked again.
        """
        told, is_told = "", True
        while is_told:
            try:
                policy = await self._policy()
            except BrokerAway as error:
                is_told = not isinstance(error.__cause__, ResponseError)
                policy = None
            if policy is not None and policy != told:
                told = policy
                if policy.startswith("allkeys-"):
                    self._log.warning("redis_evicts_leases", policy=policy)
            await asyncio.sleep(POLICY_S)
        await asyncio.Event().wait()

    async def _policy(self) -> str | None:
        """Return what this Redis does when its memory is full. Raises BrokerAway."""
        reply = await self.command("CONFIG GET", "maxmemory-policy")
        policy = reply.get("maxmemory-policy") if isinstance(reply, dict) else None
        return policy if isinstance(policy, str) else None

    async def keep(self) -> None:
        """Start the embedded Valkey whenever it does not run, until cancelled."""
        has_failed = False  # one line for any number of failures in a row
        while True:
            await asyncio.sleep(WATCH_S)
            if self._embedded is None or self._embedded.is_running():
                continue
            try:
                await asyncio.to_thread(self._embedded.start)
            except ValkeyFailed:
                if not has_failed:
                    self._log.warning("valkey_failed")
                has_failed = True
            else:
                self._log.info("valkey_started")
                has_failed = False

    async def close(self) -> None:
        """Drop every connection; commands under way fail."""
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._client.aclose()
