"""The line of documents that wait to be read.

Owns the stream `openbook:{STORE}:ingest` with its consumer group, the progress hashes, and the
local list of what this process has put, which stands in when Redis is away. What waits is decided
by the uploads on disk: an entry without an upload is dropped, an upload without an entry is read
all the same. STORE names the data directory, so that two stores may share one Redis.

While Redis answers, a document is read by whoever claims its entry. What it has lost is put into
the stream again, so it comes out there once, whoever put it. While it is away each process reads
what it has put; another may then read the same, and the store keeps the first to publish.
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
# First what others left behind, then what is new, then what we claimed and were never told of.
# An entry that names no context is dropped here, so that it never stops those behind it.
TAKE = """
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then redis.call('DEL', KEYS[1]) end
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
local function read(from)
  local found = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', '1',
                           'STREAMS', KEYS[1], from)
  return found and found[1][2][1]
end
for _ = 1, 100 do
  local stale = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], '0', 'COUNT', '1')
  local entry = stale[2][1] or read('>') or read('0')
  if not entry then return false end
  local fields = entry[2]
  if fields and fields[1] == 'context' and #fields[2] == 32
    and not string.find(fields[2], '[^0-9a-f]') then return {entry[1], fields[2]} end
  redis.call('XACK', KEYS[1], ARGV[1], entry[1])
  redis.call('XDEL', KEYS[1], entry[1])
end
return false
"""
# Put documents in line that nobody holds, after a TAKE that found none: pairs of a context and its
# entry, or ''. An entry that is there all the same will not come out again, or came just now.
RESTORE = """
local ids = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i + 1]
  if id == '' or not redis.pcall('XPENDING', KEYS[1], ARGV[2], id, id, '1')[1] then
    if id ~= '' then redis.call('XDEL', KEYS[1], id) end
    id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'context', ARGV[i])
  end
  ids[#ids + 1] = id
end
return ids
"""
DONE = """
for i = 2, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
return 1
"""
# Only the holder's sign of life counts: one who was away must not claim back what he has lost.
BEAT = """
local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], '1')[1]
if not held then return 1 end
if held[2] ~= ARGV[2] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], '0', ARGV[3], 'JUSTID')
return 1
"""
PROGRESS = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'stage', ARGV[1], 'layers_done', ARGV[2], 'layers', ARGV[3])
return redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A document this worker is to read; `entry_id` is None where no entry of it is known."""

    context_id: str
    entry_id: str | None


class IngestQueue:
    """Hand out waiting documents, one claim each, through Redis when it answers."""

    def __init__(self, broker: Broker, *, store: str, worker_id: str) -> None:
        self._broker = broker
        self._stream = f"openbook:{{{store}}}:ingest"
        self._worker_id = worker_id
        self._waiting: dict[str, str | None] = {}  # its entry if known; in order of arrival
        self._arrived = asyncio.Event()

    @property
    def waiting_count(self) -> int:
        """How many documents this process has put and not yet finished."""
        return len(self._waiting)

    async def put(self, context_id: str) -> None:
        """Add a document at the end of the line. Never fails: the local list holds it too."""
        self._waiting[context_id] = None
        try:
            entry_id = await self._broker.command(
                "XADD", self._stream, "MAXLEN", "~", STREAM_LENGTH_MAX, "*", "context", context_id
            )
        except BrokerAway:
            pass
        else:
            self._note_entry(context_id, str(entry_id))
        finally:
            self._arrived.set()

    async def take(self) -> Claim:
        """Wait for a document and claim it: from the stream, else from the local list."""
        while True:
            self._arrived.clear()
            try:
                claim = await self._take_from_stream()
                if claim is None and await self._restore():
                    continue
            except BrokerAway:
                claim = self._take_from_list()
            if claim is not None:
                return claim
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._arrived.wait()

    async def done(self, claim: Claim) -> None:
        """Take a claimed document out of the line. Never fails."""
        known = {claim.entry_id, self._waiting.pop(claim.context_id, None)}
        entry_ids = [entry_id for entry_id in known if entry_id is not None]
        if entry_ids:
            with suppress(BrokerAway):
                await self._broker.command("EVAL", DONE, 1, self._stream, GROUP, *entry_ids)

    def forget(self, context_id: str) -> None:
        """Drop a document from the local list; its entry is dropped when it is claimed."""
        self._waiting.pop(context_id, None)

    async def beat(self, claim: Claim) -> bool:
        """Show that a claimed document is still worked on; False when another took it over.

        Never fails: while Redis is away nobody is known to have taken it.
        """
        if claim.entry_id is None:
            return True
        try:
            is_held = await self._broker.command(
                "EVAL", BEAT, 1, self._stream, GROUP, self._worker_id, claim.entry_id
            )
        except BrokerAway:
            return True
        return bool(is_held)

    async def tell(self, context_id: str, stage: str, layers_done: int, layers: int) -> None:
        """Show other processes how far a document is. Never fails."""
        with suppress(BrokerAway):
            await self._broker.command(
                "EVAL", PROGRESS, 1, f"openbook:progress:{{{context_id}}}",
                stage, layers_done, layers, PROGRESS_TTL_MS,
            )  # fmt: skip

    async def _take_from_stream(self) -> Claim | None:
        reply = await self._broker.command(
            "EVAL", TAKE, 1, self._stream, GROUP, self._worker_id, STALE_MS
        )
        return Claim(str(reply[1]), str(reply[0])) if reply else None

    async def _restore(self) -> bool:
        """Put into the stream what waits and is not in it; tell whether anything was."""
        waiting = tuple(self._waiting.items())
        if not waiting:
            return False
        words = [word for context_id, entry in waiting for word in (context_id, entry or "")]
        entry_ids = await self._broker.command(
            "EVAL", RESTORE, 1, self._stream, STREAM_LENGTH_MAX, GROUP, *words
        )
        for (context_id, _), entry_id in zip(waiting, entry_ids, strict=True):
            self._note_entry(context_id, str(entry_id))
        return [entry for _, entry in waiting] != list(map(str, entry_ids))

    def _take_from_list(self) -> Claim | None:
        for context_id, entry_id in self._waiting.items():
            return Claim(context_id, entry_id)
        return None

    def _note_entry(self, context_id: str, entry_id: str) -> None:
        if context_id in self._waiting:  # else it was finished or forgotten meanwhile
            self._waiting[context_id] = entry_id
