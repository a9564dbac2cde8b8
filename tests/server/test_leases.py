"""Leases are held by one worker at a time, and losing them costs nothing but time."""

import asyncio

import pytest

from openbook.server.broker import Broker
from openbook.server.leases import Lease, LeaseKeeper, Leases

from .real_redis import delayed

A = "a" * 32
B = "b" * 32
KEY = f"openbook:lease:{{{A}}}"


def _leases(broker, worker, ttl_s=5.0):
    return Leases(broker, worker_id=worker, ttl_s=ttl_s)


def test_one_worker_holds_and_the_next_holds_after_release(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        first, second = _leases(broker, "w1"), _leases(broker, "w2")
        lease = await first.hold(A)
        assert lease is not None
        assert await second.hold(A) is None
        assert await _holder(broker, A) == "w1"
        assert await first.renew(lease)
        assert await first.release(lease)
        taken = await second.hold(A)
        assert taken is not None and await _holder(broker, A) == "w2"
        await broker.close()

    asyncio.run(run())


def test_a_lease_lost_to_another_is_neither_renewed_nor_released(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        first, second = _leases(broker, "w1", ttl_s=0.05), _leases(broker, "w2")
        stale = await first.hold(A)
        await asyncio.sleep(0.1)
        assert await second.hold(A) is not None
        assert not await first.renew(stale)
        assert not await first.release(stale)
        assert await _holder(broker, A) == "w2"
        await broker.close()

    asyncio.run(run())


def test_the_same_worker_cannot_renew_its_earlier_lease(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        leases = _leases(broker, "w1", ttl_s=0.05)
        stale = await leases.hold(A)
        await asyncio.sleep(0.1)
        fresh = await leases.hold(A)
        assert not await leases.renew(stale)
        assert not await leases.release(stale)
        assert await leases.renew(fresh)
        await broker.close()

    asyncio.run(run())


def test_a_lease_ends_by_itself(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        await _leases(broker, "w1", ttl_s=0.05).hold(A)
        assert 0 < await broker.command("PTTL", f"openbook:lease:{{{A}}}") <= 50
        await broker.close()

    asyncio.run(run())


@pytest.mark.parametrize("loss", [("DEL", f"openbook:lease:{{{A}}}"), ("FLUSHALL",)])
def test_case_b46_the_keeper_takes_a_wiped_lease_again(redis_server, log, loss):
    async def run():
        broker = Broker(redis_server.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        keeper.want(A)
        await keeper.pass_once()
        assert await _holder(broker, A) == "w1"
        await broker.command(*loss)
        await keeper.pass_once()
        assert await _holder(broker, A) == "w1"
        await broker.close()

    asyncio.run(run())


def test_case_b46_the_keeper_survives_a_restart_of_redis(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        keeper.want(A)
        await keeper.pass_once()
        redis_server.stop()
        await keeper.pass_once()  # no exception
        redis_server.start()
        await asyncio.sleep(0.6)  # the broker rests after a failure
        await keeper.pass_once()
        assert await _holder(broker, A) == "w1"
        await broker.close()

    asyncio.run(run())


def test_the_keeper_gives_back_what_is_dropped(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
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


# What a key can hold that is no lease: each would be in the way for ever.
NO_LEASES = {
    "list": ("RPUSH", KEY, "x"),
    "hash": ("HSET", KEY, "x", "y"),
    "without end": ("SET", KEY, "dead 1"),
    "endless": ("SET", KEY, "dead 1", "PX", 30 * 24 * 3600 * 1000),
    "10 MB": ("SET", KEY, "x" * 10_000_000, "PX", 60_000),
}


@pytest.mark.parametrize("harm", NO_LEASES)
def test_a_key_that_is_no_lease_is_in_nobody_s_way(redis_server, log, harm):
    async def run():
        broker = Broker(redis_server.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        keeper.want(A)
        keeper.want(B)
        await keeper.pass_once()
        with redis_server.client() as client:
            client.delete(KEY)
            client.execute_command(*NO_LEASES[harm])
        assert await keeper.pass_once()
        for context_id in (A, B):
            assert await _holder(broker, context_id) == "w1"
            assert 0 < await broker.command("PTTL", _key(context_id)) <= 5000
        assert log.names() == []
        await broker.close()

    asyncio.run(run())


def test_a_dead_worker_s_lease_ends_and_is_taken(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        await _leases(broker, "dead", ttl_s=0.3).hold(A)
        keeper = LeaseKeeper(_leases(broker, "w2"), renew_every_s=0.05)
        keeper.want(A)
        await keeper.pass_once()
        assert await _holder(broker, A) == "dead"
        task = asyncio.create_task(keeper.keep())
        await _until_held(broker, A, "w2")
        await _end(task)
        await broker.close()

    asyncio.run(run())


def test_of_many_workers_that_ask_at_once_one_gets_the_lease(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        workers = [_leases(broker, f"w{i}") for i in range(12)]
        for context_id in (A, B):
            taken = await asyncio.gather(*(worker.hold(context_id) for worker in workers))
            (lease,) = [lease for lease in taken if lease is not None]
            assert await _holder(broker, context_id) == lease.worker_id
        await broker.close()

    asyncio.run(run())


@pytest.mark.parametrize("loss", ["flushed", "restarted"])
@pytest.mark.parametrize("next_worker", ["w1", "w2"])
def test_no_lease_of_an_earlier_life_is_renewed_or_released(redis_server, log, loss, next_worker):
    async def run():
        broker = Broker(redis_server.url, log=log)
        first = _leases(broker, "w1")
        stale = await first.hold(A)
        if loss == "flushed":
            await broker.command("FLUSHALL")
        else:
            await asyncio.to_thread(redis_server.kill)
            await asyncio.to_thread(redis_server.start)
        holder = first if next_worker == "w1" else _leases(broker, "w2")
        fresh = await holder.hold(A)
        assert fresh is not None and fresh.value != stale.value
        assert not await first.renew(stale)
        assert not await first.release(stale)
        assert await broker.command("GET", KEY) == fresh.value
        assert await holder.renew(fresh)
        await broker.close()

    asyncio.run(run())


def test_a_lease_that_was_taken_and_not_told_of_is_taken_again_at_once(redis_server, log):
    async def run():
        async with delayed(redis_server, 0.6) as (url, delay):  # later than any deadline
            broker = Broker(url, log=log)
            keeper = LeaseKeeper(_leases(broker, "w1", ttl_s=60), renew_every_s=60)
            keeper.want(A)
            assert not await keeper.pass_once()
            with redis_server.client() as client:
                while not client.exists(KEY):
                    await asyncio.sleep(0.01)
                    client.set(KEY, "w1 1", nx=True, px=60_000)  # where it never got so far
            delay[0] = 0.0
            await asyncio.sleep(0.7)
            assert await keeper.pass_once()
            keeper.drop(A)
            assert await keeper.pass_once()
            assert await _holder(broker, A) is None  # so the keeper knew that it had it
            await broker.close()

    asyncio.run(run())


def test_after_an_outage_leases_are_back_before_the_next_heartbeat(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        keeper = LeaseKeeper(_leases(broker, "w1"), renew_every_s=60)
        keeper.want(A)
        redis_server.kill()
        task = asyncio.create_task(keeper.keep())
        await asyncio.sleep(0.3)
        await asyncio.to_thread(redis_server.start)
        async with asyncio.timeout(3):
            with redis_server.client() as client:
                while not client.exists(KEY):
                    await asyncio.sleep(0.02)
        await _end(task)
        await broker.close()

    asyncio.run(run())


def test_a_slow_redis_lets_no_lease_of_many_lapse(redis_server, log):
    """At 100 ms a reply, renewing 40 leases in turn would take 4 s, and they last 2 s."""

    async def run():
        contexts = [f"{i:032x}" for i in range(40)]
        async with delayed(redis_server, 0.1) as (url, _):
            broker = Broker(url, log=log)
            keeper = LeaseKeeper(_leases(broker, "w1", ttl_s=2.0), renew_every_s=0.5)
            for context_id in contexts:
                keeper.want(context_id)
            task = asyncio.create_task(keeper.keep())
            with redis_server.client(decode_responses=True) as client:
                keys = [_key(context_id) for context_id in contexts]
                async with asyncio.timeout(5):
                    while None in client.mget(keys):
                        await asyncio.sleep(0.02)
                held = client.mget(keys)
                await asyncio.sleep(3.0)
                assert client.mget(keys) == held  # renewed, never taken anew
            await _end(task)
            await broker.close()

    asyncio.run(run())


async def _end(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _key(context_id):
    return f"openbook:lease:{{{context_id}}}"


async def _holder(broker, context_id):
    value = await broker.command("GET", _key(context_id))
    return None if value is None else value.rpartition(" ")[0]


async def _until_held(broker, context_id, worker):
    async with asyncio.timeout(5):
        while await _holder(broker, context_id) != worker:
            await asyncio.sleep(0.01)
