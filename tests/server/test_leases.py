"""Leases are held by one worker at a time, and losing them costs nothing but time."""

import asyncio

import pytest

from openbook.server.broker import Broker
from openbook.server.leases import Lease, LeaseKeeper, Leases

A = "a" * 32
B = "b" * 32


def _leases(broker, worker, ttl_s=5.0):
    return Leases(broker, worker_id=worker, ttl_s=ttl_s)


def test_one_worker_holds_and_the_next_holds_after_release(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        first, second = _leases(broker, "w1"), _leases(broker, "w2")
        lease = await first.hold(A)
        assert lease is not None and lease.epoch == 1
        assert await second.hold(A) is None
        assert await _holder(broker, A) == "w1"
        assert await first.renew(lease)
        assert await first.release(lease)
        taken = await second.hold(A)
        assert taken is not None and taken.epoch == 2
        await broker.close()

    asyncio.run(run())


def test_a_lease_lost_to_another_is_neither_renewed_nor_released(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        first, second = _leases(broker, "w1", ttl_s=0.05), _leases(broker, "w2")
        stale = await first.hold(A)
        await asyncio.sleep(0.1)
        assert await second.hold(A) is not None
        assert not await first.renew(stale)
        assert not await first.release(stale)
        assert await _holder(broker, A) == "w2"
        await broker.close()

    asyncio.run(run())


def test_the_same_worker_cannot_renew_its_earlier_epoch(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        leases = _leases(broker, "w1", ttl_s=0.05)
        stale = await leases.hold(A)
        await asyncio.sleep(0.1)
        fresh = await leases.hold(A)
        assert fresh.epoch == stale.epoch + 1
        assert not await leases.renew(stale)
        await broker.close()

    asyncio.run(run())


def test_a_lease_ends_by_itself(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        await _leases(broker, "w1", ttl_s=0.05).hold(A)
        assert 0 < await broker.command("PTTL", f"openbook:lease:{{{A}}}") <= 50
        await broker.close()

    asyncio.run(run())


@pytest.mark.parametrize("loss", [("DEL", f"openbook:lease:{{{A}}}"), ("FLUSHALL",)])
def test_case_b46_the_keeper_takes_a_wiped_lease_again(valkey, log, loss):
    async def run():
        broker = Broker(valkey.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        keeper.want(A)
        await keeper.pass_once()
        assert await _holder(broker, A) == "w1"
        await broker.command(*loss)
        await keeper.pass_once()
        assert await _holder(broker, A) == "w1"
        await broker.close()

    asyncio.run(run())


def test_case_b46_the_keeper_survives_a_restart_of_redis(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        keeper.want(A)
        await keeper.pass_once()
        valkey.stop()
        await keeper.pass_once()  # no exception
        valkey.start()
        await asyncio.sleep(0.6)  # the broker rests after a failure
        await keeper.pass_once()
        assert await broker.command("GET", f"openbook:lease:{{{A}}}") == "w1 1"
        await broker.close()

    asyncio.run(run())


def test_the_keeper_gives_back_what_is_dropped(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        task = asyncio.create_task(keeper.keep())
        keeper.want(A)
        keeper.want(B)
        for context_id in (A, B):
            await _until_held(broker, context_id, "w1")
        keeper.drop(A)
        await _until_held(broker, A, None)
        assert await _holder(broker, B) == "w1"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await keeper.close()
        assert await _holder(broker, B) is None
        await broker.close()

    asyncio.run(run())


def test_a_lease_dropped_while_redis_answers_for_another_is_given_back():
    class SlowLeases:
        def __init__(self):
            self.released = []

        async def hold(self, context_id):
            return Lease(context_id, "w1", 1)

        async def release(self, lease):
            if not self.released:
                keeper.drop(B)  # while Redis answers for A
            self.released.append(lease.context_id)

    async def run():
        keeper.want(A)
        keeper.want(B)
        await keeper.pass_once()
        keeper.drop(A)
        await keeper.pass_once()
        assert leases.released == [A, B]

    leases = SlowLeases()
    keeper = LeaseKeeper(leases, renew_every_s=60)
    asyncio.run(run())


async def _holder(broker, context_id):
    value = await broker.command("GET", f"openbook:lease:{{{context_id}}}")
    return None if value is None else value.rpartition(" ")[0]


async def _until_held(broker, context_id, worker):
    async with asyncio.timeout(5):
        while await _holder(broker, context_id) != worker:
            await asyncio.sleep(0.01)
