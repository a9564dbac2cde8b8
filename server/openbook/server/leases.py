"""Leases: worker W keeps context C open until time T.

Owns the keys `openbook:lease:{C}` and `openbook:epoch:{C}`, and the task that renews what this
worker holds. A lease only tells others where a context is already open. It guards nothing: what
is in use is guarded by locks on the files, so a lease that is lost, evicted or held twice costs
time and never an answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from openbook.server.broker import Broker
from openbook.server.errors import BrokerAway

# The holder's value names worker and epoch, so that a worker that lost its lease to another, or
# took it again, never renews or releases one it does not hold. The epoch counts the holders of a
# context; it starts again when Redis is emptied, and worker ids are never used twice.
HOLD = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local epoch = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. epoch, 'NX', 'PX', ARGV[2])
return epoch
"""
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
EPOCH_TTL_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was held when this was made."""

    context_id: str
    worker_id: str
    epoch: int

    @property
    def value(self) -> str:
        """What the key holds while this lease is the one."""
        return f"{self.worker_id} {self.epoch}"


class Leases:
    """Hold, renew and release leases in the name of one worker."""

    def __init__(self, broker: Broker, *, worker_id: str, ttl_s: float) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._ttl_ms = max(1, round(ttl_s * 1000))

    async def hold(self, context_id: str) -> Lease | None:
        """Take the lease on a context; None when someone holds it. Raises BrokerAway."""
        epoch = await self._broker.command(
            "EVAL", HOLD, 2, _lease_key(context_id), _epoch_key(context_id),
            self._worker_id, self._ttl_ms, EPOCH_TTL_MS,
        )  # fmt: skip
        return Lease(context_id, self._worker_id, int(epoch)) if int(epoch) > 0 else None

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
            await self.pass_once()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._renew_every_s):
                    await self._changed.wait()

    async def pass_once(self) -> None:
        """Bring Redis in line with what is wanted, once. Never raises."""
        try:
            while self._dropped:
                # Out of the list first: more may be dropped while Redis answers.
                await self._leases.release(self._dropped.pop())
            for context_id in tuple(self._wanted):
                await self._keep_one(context_id)
        except BrokerAway:
            # Whatever is held there may be gone; the next pass finds out.
            self._dropped.clear()

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


def _epoch_key(context_id: str) -> str:
    return f"openbook:epoch:{{{context_id}}}"
