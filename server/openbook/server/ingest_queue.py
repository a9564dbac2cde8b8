"""The line of documents that wait to be read.

Owns the stream `openbook:{STORE}:ingest` with its consumer group, the progress hashes, and the
local list that stands in when Redis is away or was emptied. What waits is decided by the uploads on
disk: an entry without an upload is dropped, an upload without an entry is read all the same.
STORE names the data directory, so that two stores may share one Redis.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from openbook.server.broker import Broker
from openbook.server.errors import BrokerAway

GROUP = "ingest"
POLL_S = 1.0
STALE_MS = 60_000  # a claim without a sign of life for so long is taken over
PROGRESS_TTL_MS = 3600 * 1000
STREAM_LENGTH_MAX = 10_000

# One round trip, and a group that is missing (first start, emptied Redis) is made on the way.
TAKE = """
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
local stale = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], '0', 'COUNT', '1')
if #stale[2] > 0 then return {stale[2][1][1], stale[2][1][2][2]} end
local fresh = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', '1',
                         'STREAMS', KEYS[1], '>')
if not fresh then return false end
local entry = fresh[1][2][1]
return {entry[1], entry[2][2]}
"""
DONE = """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[2])
"""
BEAT = """
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], '0', ARGV[3], 'JUSTID')
return 1
"""
PROGRESS = """
redis.call('HSET', KEYS[1], 'stage', ARGV[1], 'layers_done', ARGV[2], 'layers', ARGV[3])
return redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A document this worker is to read; `entry_id` is None when it came from the local list."""

    context_id: str
    entry_id: str | None


class IngestQueue:
    """Hand out waiting documents, one claim each, through Redis when it answers."""

    def __init__(self, broker: Broker, *, store: str, worker_id: str) -> None:
        self._broker = broker
        self._store = store
        self._worker_id = worker_id
        self._waiting: dict[str, None] = {}  # in order of arrival
        self._arrived = asyncio.Event()

    @property
    def waiting_count(self) -> int:
        """How many documents this process has put and not yet finished."""
        return len(self._waiting)

    async def put(self, context_id: str) -> None:
        """Add a document at the end of the line. Never fails: the local list holds it too."""
        self._waiting[context_id] = None
        self._arrived.set()
        with suppress(BrokerAway):
            await self._broker.command(
                "XADD", self._stream, "MAXLEN", "~", STREAM_LENGTH_MAX, "*", "context", context_id
            )

    async def take(self) -> Claim:
        """Wait for a document and claim it: from the stream, else from the local list."""
        while True:
            self._arrived.clear()
            claim = await self._take_from_stream()
            if claim is None and self._waiting:
                claim = Claim(next(iter(self._waiting)), None)
            if claim is not None:
                return claim
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._arrived.wait()

    async def done(self, claim: Claim) -> None:
        """Take a claimed document out of the line. Never fails."""
        self._waiting.pop(claim.context_id, None)
        if claim.entry_id is not None:
            with suppress(BrokerAway):
                await self._broker.command("EVAL", DONE, 1, self._stream, GROUP, claim.entry_id)

    def forget(self, context_id: str) -> None:
        """Drop a document from the local list; its entry is dropped when it is claimed."""
        self._waiting.pop(context_id, None)

    async def beat(self, claim: Claim) -> None:
        """Show that a claimed document is still worked on. Never fails."""
        if claim.entry_id is not None:
            with suppress(BrokerAway):
                await self._broker.command(
                    "EVAL", BEAT, 1, self._stream, GROUP, self._worker_id, claim.entry_id
                )

    async def tell(self, context_id: str, stage: str, layers_done: int, layers: int) -> None:
        """Show other processes how far a document is. Never fails."""
        with suppress(BrokerAway):
            await self._broker.command(
                "EVAL", PROGRESS, 1, f"openbook:progress:{{{context_id}}}",
                stage, layers_done, layers, PROGRESS_TTL_MS,
            )  # fmt: skip

    @property
    def _stream(self) -> str:
        return f"openbook:{{{self._store}}}:ingest"

    async def _take_from_stream(self) -> Claim | None:
        try:
            reply = await self._broker.command(
                "EVAL", TAKE, 1, self._stream, GROUP, self._worker_id, STALE_MS
            )
        except BrokerAway:
            return None
        return Claim(str(reply[1]), str(reply[0])) if reply else None
