"""A Redis that is absent, frozen, slow or refusing costs a bounded time and nothing else."""

import asyncio
import os
import signal
import time

import pytest
import redis

from openbook.server import broker as broker_module
from openbook.server.broker import REFUSAL_TOLD_S, Broker
from openbook.server.errors import BrokerAway

from .real_redis import delayed


def test_an_absent_redis_fails_fast_and_then_at_once(tmp_path, log):
    async def run():
        broker = Broker(f"unix://{tmp_path}/none.sock", log=log)
        for _ in range(3):
            with pytest.raises(BrokerAway):
                await broker.command("PING")
        assert log.names() == ["redis_away"]  # said once, not at each call
        await broker.close()

    asyncio.run(run())


def test_a_frozen_redis_fails_within_a_second_and_is_used_again_when_it_thaws(redis_server, log):
    with redis.Redis(unix_socket_path=str(redis_server.socket_path), protocol=2) as client:
        pid = int(client.info("server")["process_id"])

    async def run():
        broker = Broker(redis_server.url, log=log)
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


def test_an_error_reply_counts_as_away(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        await broker.command("SET", "text", "x")
        with pytest.raises(BrokerAway):
            await broker.command("HGETALL", "text")
        await broker.close()

    asyncio.run(run())


def test_case_b44_a_cancelled_command_never_leaves_its_reply_to_the_next(redis_server, log):
    """A proxy holds every reply back, so that cancelling falls between the two."""

    async def run():
        async with delayed(redis_server, 0.0) as (url, delay):
            broker = Broker(url, log=log)
            await broker.command("ECHO", "warm")
            delay[0] = 0.1
            for turn in range(5):
                doomed = asyncio.create_task(broker.command("ECHO", f"first-{turn}"))
                await asyncio.sleep(0.03)
                doomed.cancel()
                assert await broker.command("ECHO", f"second-{turn}") == f"second-{turn}"
                with pytest.raises(asyncio.CancelledError):
                    await doomed
            await broker.close()

    asyncio.run(run())


def test_case_b44_a_command_that_came_too_late_never_leaves_its_reply_to_the_next(
    redis_server, log
):
    async def run():
        async with delayed(redis_server, 0.0) as (url, delay):
            broker = Broker(url, log=log)
            for turn in range(3):
                assert await broker.command("ECHO", f"before-{turn}") == f"before-{turn}"
                delay[0] = 0.4
                started = time.monotonic()
                late = [broker.command("ECHO", f"late-{turn}-{i}") for i in range(4)]
                replies = await asyncio.gather(*late, return_exceptions=True)
                assert [type(reply) for reply in replies] == [BrokerAway] * 4
                assert time.monotonic() - started < 1.0  # the promise, not a benchmark
                delay[0] = 0.0
                await asyncio.sleep(0.6)
            await broker.close()

    asyncio.run(run())


def test_more_commands_than_connections_wait_for_a_place(redis_server, log, monkeypatch):
    monkeypatch.setattr(broker_module, "SOCKET_TIMEOUT_S", 5.0)  # a busy machine
    monkeypatch.setattr(broker_module, "COMMAND_DEADLINE_S", 5.0)

    async def run():
        async with delayed(redis_server, 0.05) as (url, _):
            broker = Broker(url, log=log)
            words = [f"word-{i}" for i in range(40)]
            assert await asyncio.gather(*(broker.command("ECHO", w) for w in words)) == words
            assert log.names() == []
            await broker.close()

    asyncio.run(run())


def test_a_redis_that_refuses_is_told_of_once_and_holds_up_nothing_else(redis_server, log):
    now = [0.0]

    async def run():
        broker = Broker(redis_server.url, log=log, clock=lambda: now[0])
        await broker.command("SET", "text", "x")
        for _ in range(5):
            with pytest.raises(BrokerAway):
                await broker.command("HGETALL", "text")
            assert await broker.command("GET", "text") == "x"
        now[0] = REFUSAL_TOLD_S + 1
        with pytest.raises(BrokerAway):
            await broker.command("HGETALL", "text")
        assert log.events == [("warning", "redis_refuses", {"error": "WRONGTYPE"})] * 2
        await broker.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "harm", [("REPLICAOF", "127.0.0.1", "1"), ("CONFIG", "SET", "maxmemory", "1")]
)
def test_a_redis_that_takes_no_writes_does_not_count_as_well(redis_server, log, harm):
    async def run():
        broker = Broker(redis_server.url, log=log)
        assert await broker.answers()
        with redis_server.client() as client:
            client.execute_command(*harm)
        for _ in range(3):
            assert not await broker.answers()
        assert log.names() == ["redis_refuses"]
        await broker.close()

    asyncio.run(run())


def test_a_wrong_password_is_told_of_once(redis_server, log):
    async def run():
        with redis_server.client() as client:
            client.config_set("requirepass", "right")
        broker = Broker(f"{redis_server.url}?password=wrong", log=log)
        for _ in range(3):
            with pytest.raises(BrokerAway):
                await broker.command("ECHO", "x")
        assert log.events == [("warning", "redis_away", {"error": "AuthenticationError"})]
        await broker.close()
        broker = Broker(f"{redis_server.url}?password=right", log=log)
        assert await broker.command("ECHO", "x") == "x"
        await broker.close()

    asyncio.run(run())


def test_the_broker_warns_whenever_leases_begin_to_be_evicted(redis_server, log, monkeypatch):
    monkeypatch.setattr(broker_module, "POLICY_S", 0.01)

    async def run():
        broker = Broker(redis_server.url, log=log)
        watching = asyncio.create_task(broker.watch_policy())
        for policy, warnings in (
            ("noeviction", 0), ("allkeys-lru", 1), ("volatile-lru", 1), ("allkeys-lfu", 2),
        ):  # fmt: skip
            await broker.command("CONFIG", "SET", "maxmemory-policy", policy)
            async with asyncio.timeout(10):
                while log.names().count("redis_evicts_leases") < warnings:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # some looks more
            assert log.names().count("redis_evicts_leases") == warnings
        redis_server.stop()
        await asyncio.sleep(0.1)
        assert not watching.done()
        watching.cancel()
        await broker.close()

    asyncio.run(run())


def test_the_keeper_starts_a_dead_embedded_valkey_again(redis_server, log, monkeypatch):
    monkeypatch.setattr("openbook.server.broker.WATCH_S", 0.02)
    with redis.Redis(unix_socket_path=str(redis_server.socket_path), protocol=2) as client:
        pid = int(client.info("server")["process_id"])

    async def run():
        broker = Broker(redis_server.url, log=log, embedded=redis_server)
        keeper = asyncio.create_task(broker.keep())
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while "valkey_started" not in log.names() or not redis_server.is_running():
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert await broker.command("ECHO", "x") == "x"
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await broker.close()

    asyncio.run(run())


def test_a_restart_costs_no_command_that_comes_after_it(redis_server, log):
    async def run():
        broker = Broker(redis_server.url, log=log)
        words = [f"word-{i}" for i in range(8)]
        runs = [await broker.command("INFO", "server")]
        await asyncio.gather(*(broker.command("ECHO", word) for word in words))
        await asyncio.to_thread(redis_server.kill)
        await asyncio.to_thread(redis_server.start)
        # Eight connections of the old life are in the pool: none may fail a command of the new.
        assert await asyncio.gather(*(broker.command("ECHO", word) for word in words)) == words
        runs.append(await broker.command("INFO", "server"))
        assert runs[0]["run_id"] != runs[1]["run_id"]
        assert log.names() == []
        await broker.close()

    asyncio.run(run())


def test_a_redis_that_does_not_tell_its_policy_is_asked_once(redis_server, log, monkeypatch):
    monkeypatch.setattr(broker_module, "POLICY_S", 0.01)
    monkeypatch.setattr(broker_module, "REFUSAL_TOLD_S", 0.0)  # every refusal would be told

    async def run():
        broker = Broker(redis_server.url, log=log)
        await broker.command("ACL", "SETUSER", "default", "-config")
        watching = asyncio.create_task(broker.watch_policy())
        await asyncio.sleep(0.3)
        assert log.names().count("redis_refuses") == 1 and not watching.done()
        watching.cancel()
        await broker.close()

    asyncio.run(run())
