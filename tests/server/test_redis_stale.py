"""A worker that was away cannot overwrite what another has done, and clocks may jump."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openbook.indexstore.store import read_manifest
from openbook.server import broker, ingest_queue, leases, valkey
from openbook.server.broker import Broker
from openbook.server.ingest_queue import IngestQueue
from openbook.server.leases import LeaseKeeper, Leases

from .running import KeptLog

TESTS = Path(__file__).parent.parent
CONTEXT_ID = "0123456789abcdef0123456789abcdef"
KEY = f"openbook:lease:{{{CONTEXT_ID}}}"
STREAM = "openbook:{s}:ingest"


class Worker:
    """One process of queue_process.py."""

    def __init__(self, root, server, name):
        program = TESTS / "server" / "queue_process.py"
        self.process = subprocess.Popen(
            # -P: the tests' conftest that it imports is that of indexstore, not its neighbour
            [sys.executable, "-P", str(program), str(root), str(server.socket_path), name],
            env={**os.environ, "PYTHONPATH": str(TESTS / "indexstore")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def says(self):
        return self.process.stdout.readline().strip()

    def take(self):
        """Let it claim, and return what it says then."""
        assert self.says() == "ready"
        self.go_on()
        return self.says()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _digests(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def _put(server):
    async def run():
        one = Broker(server.url, log=KeptLog())
        await IngestQueue(one, store="s", worker_id="giver").put(CONTEXT_ID)
        await one.close()

    asyncio.run(run())


# Slow: two processes load the libraries. test_ingest_queue.py has the same for claims alone.
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stopped_at", ["claimed", "sealed"])
def test_a_worker_stopped_past_its_claim_cannot_overwrite(redis_server, tmp_path, stopped_at):
    root = tmp_path / "contexts"
    _put(redis_server)
    stale, fresh = (Worker(root, redis_server, name) for name in ("w1", "w2"))
    try:
        assert stale.take() == f"claimed {CONTEXT_ID}"
        if stopped_at == "sealed":
            assert stale.says() == "sealed"
        stale.signal(signal.SIGSTOP)
        assert fresh.take() == f"claimed {CONTEXT_ID}"  # taken over by XAUTOCLAIM
        assert fresh.says() == "sealed"
        fresh.go_on()
        assert fresh.says() == "published True held True"
        assert fresh.process.wait(10) == 0
        final = root / "local" / CONTEXT_ID
        before, inode = _digests(final), final.stat().st_ino
        stale.signal(signal.SIGCONT)
        if stopped_at == "claimed":
            assert stale.says() == "sealed"
        stale.go_on()
        assert stale.says().startswith("published False")
        assert stale.process.wait(10) == 0
    finally:
        for worker in (stale, fresh):
            worker.end()
    assert [path.name for path in (root / "local").iterdir()] == [CONTEXT_ID]
    assert (_digests(final), final.stat().st_ino) == (before, inode)
    assert list((root / ".tmp").iterdir()) == []
    assert read_manifest(final).context_id == CONTEXT_ID
    with redis_server.client() as client:
        assert client.xlen(STREAM) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_goes_on_while_another_reads_does_not_take_the_claim_back(
    redis_server, tmp_path
):
    root = tmp_path / "contexts"
    _put(redis_server)
    stale, fresh = (Worker(root, redis_server, name) for name in ("w1", "w2"))
    try:
        assert [stale.take(), stale.says()] == [f"claimed {CONTEXT_ID}", "sealed"]
        stale.signal(signal.SIGSTOP)
        assert [fresh.take(), fresh.says()] == [f"claimed {CONTEXT_ID}", "sealed"]
        stale.signal(signal.SIGCONT)
        stale.go_on()  # it is the first to publish, and knows that it has lost its claim
        assert stale.says() == "published True held False"
        before = _digests(root / "local" / CONTEXT_ID)
        fresh.go_on()
        assert fresh.says().startswith("published False")
        assert fresh.process.wait(10) == 0
    finally:
        for worker in (stale, fresh):
            worker.end()
    assert _digests(root / "local" / CONTEXT_ID) == before


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_calendar_that_jumps_costs_no_lease(redis_server, log, monkeypatch, jump_s):
    now = [1_800_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    taken = []

    class Counting(Leases):
        async def hold(self, context_id):
            lease = await super().hold(context_id)
            taken.append(lease)
            return lease

    async def run():
        one = Broker(redis_server.url, log=log)
        keeper = LeaseKeeper(Counting(one, worker_id="w1", ttl_s=0.6), renew_every_s=0.2)
        queue = IngestQueue(one, store="s", worker_id="w1")
        await queue.put(CONTEXT_ID)
        claim = await queue.take()
        keeper.want(CONTEXT_ID)
        task = asyncio.create_task(keeper.keep())
        for _ in range(4):
            await asyncio.sleep(0.25)
            now[0] += jump_s
            assert await queue.beat(claim)
        assert len(taken) == 1 and await one.command("GET", KEY) == taken[0].value
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.close()

    asyncio.run(run())
    assert log.names() == []


def test_a_jump_of_redis_own_clock_costs_one_registration(redis_server, log):
    """An hour on, every lease of Redis is over and every claim stale, though nobody was away."""

    async def run():
        one = Broker(redis_server.url, log=log)
        keeper = LeaseKeeper(Leases(one, worker_id="w1", ttl_s=5.0), renew_every_s=60)
        queue = IngestQueue(one, store="s", worker_id="w1")
        await queue.put(CONTEXT_ID)
        claim = await queue.take()
        keeper.want(CONTEXT_ID)
        await keeper.pass_once()
        first = await one.command("GET", KEY)
        await one.command("PEXPIRE", KEY, 1)
        idle = ("IDLE", 3_600_000, "JUSTID")
        await one.command("XCLAIM", STREAM, "ingest", "w1", 0, claim.entry_id, *idle)
        await asyncio.sleep(0.02)
        for _ in range(3):
            await keeper.pass_once()
        assert [first, await one.command("GET", KEY)] == ["w1 1", "w1 2"]
        assert await queue.beat(claim)  # the next beat makes it fresh again
        other = IngestQueue(one, store="s", worker_id="w2")
        assert await other._take_from_stream() is None
        await one.close()

    asyncio.run(run())


@pytest.mark.parametrize("module", [broker, leases, ingest_queue, valkey])
def test_nothing_here_reads_a_calendar(module):
    tree = ast.parse(Path(module.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not names & {"time_ns", "now", "today", "utcnow", "localtime", "gmtime", "ctime"}
    assert not imported & {"datetime", "calendar", "time_ns"}
    reads = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
    ]
    assert set(reads) <= {"monotonic", "sleep"}
