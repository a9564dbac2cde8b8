"""Leases: worker W keeps context C open until time T.

Owns the keys `openbook:lease:{C}`, and the task that renews what this worker holds. A lease only
tells others where a context is already open. It guards nothing: what is in use is guarded by locks
on the files, so a lease that is lost, evicted or held twice costs time and never an answer.

A key that no worker can have set (another type, without an end, far too long) is no lease, and
whoever wants one takes its place; it would be in the way for ever.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass

from openbook.server.broker import Broker
from openbook.server.errors import BrokerAway

# A lease of our own may be there that we do not know of: the reply was lost, and we hold it anew.
HOLD = """
if redis.call('TYPE', KEYS[1]).ok == 'string'
  and redis.call('STRLEN', KEYS[1]) <= tonumber(ARGV[5]) then
  local left_ms = redis.call('PTTL', KEYS[1])
  local is_lease = left_ms >= 0 and left_ms <= tonumber(ARGV[4])
  local is_ours = string.sub(redis.call('GET', KEYS[1]), 1, #ARGV[2]) == ARGV[2]
  if is_lease and not is_ours then return 0 end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return 1
"""
RENEW = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RELEASE = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
LEASE_MS_MAX = 24 * 3600 * 1000  # no setting allows a longer one
VALUE_BYTES_MAX = 256
RETRY_S = 0.25  # after a failure; a heartbeat later could be one too many
AT_ONCE = 8  # renewals under way: a slow Redis must not let the last lease of many lapse


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was held when this was made.

    `number` counts the leases this worker asked for, whatever became of them, and worker ids are
    never used twice: no two leases are alike, even where Redis was emptied between them. So nobody
    renews or releases one that he lost to another or took again.
    """

    context_id: str
    worker_id: str
    number: int

    @property
    def value(self) -> str:
        """What the key holds while this lease is the one."""
        return f"{self.worker_id} {self.number}"


class Leases:
    """Hold, renew and release leases in the name of one worker."""

    def __init__(self, broker: Broker, *, worker_id: str, ttl_s: float) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._numbers = itertools.count(1)

    async def hold(self, context_id: str) -> Lease | None:
        """Take the lease on a context; None when another holds it. Raises BrokerAway."""
        lease = Lease(context_id, self._worker_id, next(self._numbers))
        is_held = await self._broker.command(
            "EVAL", HOLD, 1, _lease_key(context_id),
            lease.value, f"{self._worker_id} ", self._ttl_ms, LEASE_MS_MAX, VALUE_BYTES_MAX,
        )  # fmt: skip
        return lease if is_held else None

    async def renew(self, lease: Lease) -> bool:
        """Extend a lease; False when it is no longer ours. Raises BrokerAway."""
        key = _lease_key(lease.context_id)
        return bool(await self._broker.command("EVAL", RENEW, 1, key, lease.value, self._ttl_ms))

    async def release(self, lease: Lease) -> bool:
        """Give a lease back; False when it was no longer ours. Raises BrokerAway."""
        key = _lease_key(lease.context_id)
        return bool(await self._broker.command("EVAL", RELEASE, 1, key, lease.value))


class LeaseKeeper:
    """Keep leases on the contexts this worker has open, as well as Redis allows."""

    def __init__(self, leases: Leases, *, renew_every_s: float) -> None:
        self._leases = leases
        self._renew_every_s = renew_every_s
        self._wanted: dict[str, Lease | None] = {}
        self._dropped: list[Lease] = []
        self._changed = asyncio.Event()

    def want(self, context_id: str) -> None:
        """Ask for a lease from now on; returns at once."""
        self._wanted.setdefault(context_id, None)
        self._changed.set()

    def drop(self, context_id: str) -> None:
        """Stop keeping a lease and give it back; returns at once."""
        lease = self._wanted.pop(context_id, None)
        if lease is not None:
            self._dropped.append(lease)
        self._changed.set()

    async def keep(self) -> None:
        """Renew, retake and give back until cancelled; a lost Redis is only tried again."""
        while True:
            self._changed.clear()
            is_done = await self.pass_once()
            rest_s = self._renew_every_s if is_done else min(RETRY_S, self._renew_every_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._changed.wait()

    async def pass_once(self) -> bool:
        """Bring Redis in line with what is wanted, once; False when it failed. Never raises."""
        try:
            while self._dropped:
                # Out of the list first: more may be dropped while Redis answers.
                await self._leases.release(self._dropped.pop())
            wanted = tuple(self._wanted)
            for start in range(0, len(wanted), AT_ONCE):
                await asyncio.gather(*map(self._keep_one, wanted[start : start + AT_ONCE]))
        except BrokerAway:
            # Whatever is held there may be gone; the next pass finds out.
            self._dropped.clear()
            return False
        return True

    async def _keep_one(self, context_id: str) -> None:
        lease = self._wanted.get(context_id)
        if lease is not None and await self._leases.renew(lease):
            return
        taken = await self._leases.hold(context_id)
        if context_id in self._wanted:
            self._wanted[context_id] = taken
        elif taken is not None:  # dropped while Redis answered
            self._dropped.append(taken)

    async def close(self) -> None:
        """Give back everything, if Redis answers. Never raises."""
        for context_id in tuple(self._wanted):
            self.drop(context_id)
        await self.pass_once()


def _lease_key(context_id: str) -> str:
    return f"openbook:lease:{{{context_id}}}"
