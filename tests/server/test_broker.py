"""A Redis that is absent, frozen, slow or refusing costs a bounded time and nothing else."""

import asyncio
import os
import signal
import time

import pytest
import redis

from openbook.server.broker import Broker
from openbook.server.errors import BrokerAway


def test_an_absent_redis_fails_fast_and_then_at_once(tmp_path, log):
    async def run():
        broker = Broker(f"unix://{tmp_path}/none.sock", log=log)
        for _ in range(3):
            with pytest.raises(BrokerAway):
                await broker.command("PING")
        assert log.names() == ["redis_away"]  # said once, not at each call
        await broker.close()

    asyncio.run(run())


def test_a_frozen_redis_fails_within_a_second_and_is_used_again_when_it_thaws(valkey, log):
    with redis.Redis(unix_socket_path=str(valkey.socket_path), protocol=2) as client:
        pid = int(client.info("server")["process_id"])

    async def run():
        broker = Broker(valkey.url, log=log)
        assert await broker.command("PING") in ("PONG", True)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(BrokerAway):
                await broker.command("PING")
            assert time.monotonic() - started < 1.0  # the promise, not a benchmark
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.6)
        assert await broker.command("ECHO", "x") == "x"
        assert log.names() == ["redis_away", "redis_back"]
        await broker.close()

    asyncio.run(run())


def test_an_error_reply_counts_as_away(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        await broker.command("SET", "text", "x")
        with pytest.raises(BrokerAway):
            await broker.command("HGETALL", "text")
        await broker.close()

    asyncio.run(run())


def test_case_b44_a_cancelled_command_never_leaves_its_reply_to_the_next(valkey, log):
    """A proxy holds every reply back for 100 ms, so that cancelling falls between the two."""

    async def forward(reader, writer, delay_s):
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader, writer):
        back_reader, back_writer = await asyncio.open_unix_connection(str(valkey.socket_path))
        await asyncio.gather(forward(reader, back_writer, 0.0), forward(back_reader, writer, 0.1))

    async def run():
        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        broker = Broker(f"redis://127.0.0.1:{port}", log=log)
        await broker.command("ECHO", "warm")
        for turn in range(5):
            doomed = asyncio.create_task(broker.command("ECHO", f"first-{turn}"))
            await asyncio.sleep(0.03)
            doomed.cancel()
            assert await broker.command("ECHO", f"second-{turn}") == f"second-{turn}"
            with pytest.raises(asyncio.CancelledError):
                await doomed
        await broker.close()
        proxy.close()

    asyncio.run(run())


def test_the_broker_warns_when_leases_may_be_evicted(valkey, log):
    async def run():
        broker = Broker(valkey.url, log=log)
        await broker.warn_about_eviction()
        assert log.names() == []
        await broker.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        await broker.warn_about_eviction()
        assert log.names() == ["redis_evicts_leases"]
        await broker.close()

    asyncio.run(run())


def test_the_keeper_starts_a_dead_embedded_valkey_again(valkey, log, monkeypatch):
    monkeypatch.setattr("openbook.server.broker.WATCH_S", 0.02)
    with redis.Redis(unix_socket_path=str(valkey.socket_path), protocol=2) as client:
        pid = int(client.info("server")["process_id"])

    async def run():
        broker = Broker(valkey.url, log=log, embedded=valkey)
        keeper = asyncio.create_task(broker.keep())
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while "valkey_started" not in log.names() or not valkey.is_running():
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert await broker.command("ECHO", "x") == "x"
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await broker.close()

    asyncio.run(run())
