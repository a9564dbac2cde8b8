"""Documents are handed out once each, through Redis or without it."""

import asyncio

from openbook.server import ingest_queue
from openbook.server.broker import Broker
from openbook.server.ingest_queue import IngestQueue

A = "a" * 32
B = "b" * 32


def _queue(broker, worker="w1", store="s"):
    return IngestQueue(broker, store=store, worker_id=worker)


def test_documents_come_in_order_and_only_once(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        queue = _queue(broker)
        await queue.put(A)
        await queue.put(B)
        first = await queue.take()
        assert first.context_id == A and first.entry_id is not None
        await queue.done(first)
        second = await queue.take()
        assert second.context_id == B
        await queue.done(second)
        assert queue.waiting_count == 0
        assert await broker.command("XLEN", "openbook:{s}:ingest") == 0
        await broker.close()

    asyncio.run(run())


def test_take_wakes_for_a_document_put_later(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        queue = _queue(broker)
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0.05)
        await queue.put(A)
        async with asyncio.timeout(0.8):  # sooner than the next poll
            assert (await taking).context_id == A
        await broker.close()

    asyncio.run(run())


def test_two_workers_never_claim_the_same_entry(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        giver, one, two = _queue(broker), _queue(broker, "w1"), _queue(broker, "w2")
        await giver.put(A)
        await giver.put(B)
        claims = [await one.take(), await two.take()]
        assert {claim.context_id for claim in claims} == {A, B}
        await broker.close()

    asyncio.run(run())


def test_a_stale_claim_is_taken_over_and_a_beating_one_is_not(valkey, log, monkeypatch):
    monkeypatch.setattr(ingest_queue, "STALE_MS", 150)
    monkeypatch.setattr(ingest_queue, "POLL_S", 0.02)

    async def run():
        broker = Broker(valkey.url, log=log)
        giver, one, two = _queue(broker), _queue(broker, "w1"), _queue(broker, "w2")
        await giver.put(A)
        claim = await one.take()
        taking = asyncio.create_task(two.take())
        for _ in range(10):
            await asyncio.sleep(0.04)
            await one.beat(claim)
        assert not taking.done()
        async with asyncio.timeout(5):
            taken = await taking
        assert taken == claim
        await broker.close()

    asyncio.run(run())


def test_an_emptied_redis_loses_no_document(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        queue = _queue(broker)
        await queue.put(A)
        await broker.command("FLUSHALL")
        claim = await queue.take()
        assert claim.context_id == A and claim.entry_id is None
        await broker.close()

    asyncio.run(run())


def test_an_absent_redis_loses_no_document(tmp_path, log):
    async def run():
        broker = Broker(f"unix://{tmp_path}/none.sock", log=log)
        queue = _queue(broker)
        await queue.put(A)
        claim = await queue.take()
        assert claim.context_id == A
        await queue.beat(claim)
        await queue.tell(A, "reading", 1, 2)
        await queue.done(claim)
        assert queue.waiting_count == 0
        await broker.close()

    asyncio.run(run())


def test_two_stores_share_a_redis_without_seeing_each_other(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        await _queue(broker, store="one").put(A)
        taking = asyncio.create_task(_queue(broker, store="two").take())
        await asyncio.sleep(0.1)
        assert not taking.done()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await broker.close()

    asyncio.run(run())


def test_progress_is_told_and_forgotten_in_time(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        await _queue(broker).tell(A, "reading", 3, 30)
        key = f"openbook:progress:{{{A}}}"
        assert await broker.command("HGETALL", key) == {
            "stage": "reading", "layers_done": "3", "layers": "30",
        }  # fmt: skip
        assert await broker.command("PTTL", key) > 0
        await broker.close()

    asyncio.run(run())
