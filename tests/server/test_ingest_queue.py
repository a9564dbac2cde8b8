"""Documents are handed out once each, through Redis or without it."""

import asyncio

import pytest

from openbook.server import broker as broker_module
from openbook.server import ingest_queue
from openbook.server.broker import Broker
from openbook.server.ingest_queue import GROUP, Claim, IngestQueue

A = "a" * 32
B = "b" * 32
STREAM = "openbook:{s}:ingest"
PROGRESS = f"openbook:progress:{{{A}}}"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait for Redis as long as a busy machine may need; what a server waits is shown elsewhere."""
    monkeypatch.setattr(broker_module, "SOCKET_TIMEOUT_S", 5.0)
    monkeypatch.setattr(broker_module, "COMMAND_DEADLINE_S", 5.0)


def _queue(broker, worker="w1", store="s"):
    return IngestQueue(broker, store=store, worker_id=worker)


def test_documents_come_in_order_and_only_once(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
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


def test_take_wakes_for_a_document_put_later(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        queue = _queue(broker)
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0.05)
        await queue.put(A)
        async with asyncio.timeout(0.8):  # sooner than the next poll
            assert (await taking).context_id == A
        await broker.close()

    asyncio.run(run())


def test_two_workers_never_claim_the_same_entry(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        giver, one, two = _queue(broker), _queue(broker, "w1"), _queue(broker, "w2")
        await giver.put(A)
        await giver.put(B)
        claims = [await one.take(), await two.take()]
        assert {claim.context_id for claim in claims} == {A, B}
        await broker.close()

    asyncio.run(run())


def test_a_stale_claim_is_taken_over_and_a_beating_one_is_not(redis_server, log, monkeypatch):
    monkeypatch.setattr(ingest_queue, "STALE_MS", 1000)
    monkeypatch.setattr(ingest_queue, "POLL_S", 0.02)

    async def run():
        broker = Broker(redis_server.url, log=log)
        giver, one, two = _queue(broker), _queue(broker, "w1"), _queue(broker, "w2")
        await giver.put(A)
        claim = await one.take()
        taking = asyncio.create_task(two.take())
        for _ in range(25):
            await asyncio.sleep(0.05)
            await one.beat(claim)
        assert not taking.done()
        async with asyncio.timeout(5):
            taken = await taking
        assert taken == claim
        await broker.close()

    asyncio.run(run())


def test_an_emptied_redis_loses_no_document(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        queue = _queue(broker)
        await queue.put(A)
        await broker.command("FLUSHALL")
        claim = await queue.take()
        assert claim.context_id == A
        await queue.beat(claim)
        await queue.done(claim)
        assert await broker.command("XLEN", STREAM) == 0 and queue.waiting_count == 0
        await broker.close()

    asyncio.run(run())


def test_an_absent_redis_loses_no_document(tmp_path, log):
    async def run():
        broker = Broker(f"unix://{tmp_path}/none.sock", log=log)
        queue = _queue(broker)
        await queue.put(A)
        claim = await queue.take()
        assert claim == Claim(A, None)
        assert await queue.beat(claim)
        await queue.tell(A, "reading", 1, 2)
        await queue.done(claim)
        assert queue.waiting_count == 0
        await broker.close()

    asyncio.run(run())


def test_two_stores_share_a_redis_without_seeing_each_other(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        await _queue(broker, store="one").put(A)
        taking = asyncio.create_task(_queue(broker, store="two").take())
        await asyncio.sleep(0.1)
        assert not taking.done()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await broker.close()

    asyncio.run(run())


def test_progress_is_told_and_forgotten_in_time(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        await _queue(broker).tell(A, "reading", 3, 30)
        key = f"openbook:progress:{{{A}}}"
        assert await broker.command("HGETALL", key) == {
            "stage": "reading", "layers_done": "3", "layers": "30",
        }  # fmt: skip
        assert await broker.command("PTTL", key) > 0
        await broker.close()

    asyncio.run(run())


POISON = {
    "another field": (b"text", b"x"),
    "no id": (b"context", b"../../etc/passwd"),
    "no UTF-8": (b"context", b"\xff" * 32),
    "upper case": (b"context", b"A" * 32),
    "10 MB": (b"context", b"a" * 10_000_000),
}


@pytest.mark.parametrize("harm", POISON)
def test_an_entry_that_names_no_context_never_stops_the_line(redis_server, log, harm):
    async def run():
        broker = Broker(redis_server.url, log=log)
        queue = _queue(broker)
        with redis_server.client() as client:
            for _ in range(3):
                client.execute_command("XADD", STREAM, "*", *POISON[harm])
        await queue.put(A)
        async with asyncio.timeout(2):
            claim = await queue.take()
        assert claim.context_id == A
        await queue.done(claim)
        assert await broker.command("XLEN", STREAM) == 0
        assert (await broker.command("XPENDING", STREAM, GROUP))["pending"] == 0
        assert log.names() == []
        await broker.close()

    asyncio.run(run())


HARM = {
    "wrong type": [("DEL", STREAM), ("SET", STREAM, "x")],
    "group gone": [("XGROUP", "DESTROY", STREAM, GROUP)],
    "claim forgotten": [("XGROUP", "DELCONSUMER", STREAM, GROUP, "w1")],
    "entry trimmed": [("XTRIM", STREAM, "MAXLEN", "0")],
}


@pytest.mark.parametrize("harm", HARM)
def test_a_document_that_the_stream_has_lost_is_put_there_again(redis_server, log, harm):
    async def run():
        broker = Broker(redis_server.url, log=log)
        queue = _queue(broker)
        await queue.put(A)
        await queue._take_from_stream()  # and the worker was cancelled before it knew
        for words in HARM[harm]:
            await broker.command(*words)
        async with asyncio.timeout(3):
            claim = await queue.take()
        assert claim.context_id == A and claim.entry_id is not None
        await queue.done(claim)
        assert await broker.command("XLEN", STREAM) == 0
        assert log.names() == []
        await broker.close()

    asyncio.run(run())


def test_a_claim_whose_reply_was_lost_is_given_again_at_once(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        queue = _queue(broker)
        await queue.put(A)
        lost = await queue._take_from_stream()
        assert await queue.take() == lost
        assert await broker.command("XLEN", STREAM) == 1
        await broker.close()

    asyncio.run(run())


def test_what_was_put_while_redis_was_away_comes_out_of_the_stream_once(
    redis_server, log, monkeypatch
):
    monkeypatch.setattr(ingest_queue, "POLL_S", 0.05)

    async def run():
        broker, other = Broker(redis_server.url, log=log), Broker(redis_server.url, log=log)
        one, two = _queue(broker, "w1"), _queue(other, "w2")
        ids = [f"{i:032x}" for i in range(20)]
        for context_id in ids[:5]:
            await one.put(context_id)
        await asyncio.to_thread(redis_server.kill)
        for context_id in ids[5:]:
            await one.put(context_id)
        await asyncio.to_thread(redis_server.start)
        await asyncio.sleep(0.6)
        read, uploads = [], set(ids)

        async def work(queue):
            while True:
                claim = await queue.take()
                if claim.context_id in uploads:  # else read before, and put there again
                    read.append(claim.context_id)
                    await asyncio.sleep(0.01)
                    uploads.remove(claim.context_id)
                await queue.done(claim)

        workers = [asyncio.create_task(work(queue)) for queue in (one, two)]
        async with asyncio.timeout(10):
            while one.waiting_count or await broker.command("XLEN", STREAM):
                await asyncio.sleep(0.02)
        assert sorted(read) == ids
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await broker.close()
        await other.close()

    asyncio.run(run())


def test_what_another_worker_reads_is_not_read_here_as_well(redis_server, log, monkeypatch):
    monkeypatch.setattr(ingest_queue, "POLL_S", 0.02)

    async def run():
        broker = Broker(redis_server.url, log=log)
        one, two = _queue(broker, "w1"), _queue(broker, "w2")
        await one.put(A)
        assert (await two.take()).context_id == A
        taking = asyncio.create_task(one.take())
        await asyncio.sleep(0.3)
        assert not taking.done()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await broker.close()

    asyncio.run(run())


def test_a_beat_of_one_who_lost_the_claim_does_not_take_it_back(redis_server, log, monkeypatch):
    monkeypatch.setattr(ingest_queue, "STALE_MS", 50)

    async def run():
        broker = Broker(redis_server.url, log=log)
        one, two = _queue(broker, "w1"), _queue(broker, "w2")
        await one.put(A)
        claim = await one.take()
        assert await one.beat(claim)
        await asyncio.sleep(0.1)
        assert await two.take() == claim
        assert not await one.beat(claim)
        assert await two.beat(claim)
        await broker.command("FLUSHALL")
        assert await one.beat(claim) and await two.beat(claim)  # nobody is known to have it
        assert log.names() == []
        await broker.close()

    asyncio.run(run())


@pytest.mark.parametrize("harm", [("SET", "x" * 10_000_000), ("RPUSH", "x"), ("HSET", "a", "b")])
def test_progress_takes_the_place_of_whatever_is_there(redis_server, log, harm):
    async def run():
        broker = Broker(redis_server.url, log=log)
        with redis_server.client() as client:
            client.execute_command(harm[0], PROGRESS, *harm[1:])
        await _queue(broker).tell(A, "reading", 1, 2)
        told = {"stage": "reading", "layers_done": "1", "layers": "2"}
        assert await broker.command("HGETALL", PROGRESS) == told
        assert log.names() == []
        await broker.close()

    asyncio.run(run())
