"""The same document, however often it is sent, is one context and one reading."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Barrier

import grpc
import pytest

from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .fakes import FakeReading
from .running import active, ingest, until, upload

CALLERS = 16
REPEAT_S = 0.05  # what a repeat may take besides the hashing of its bytes
LOADED = 4  # a machine with other work: the cut of `make test` allows so many times as much
BIG = b"The keeper counts the ships. " * ((16 << 20) // 29)


class ReadsTheStart(FakeReading):
    """Reads the first hundred bytes of a document: one of many MiB is stored in no time."""

    def __call__(self, model, document, draft, **given):
        return super().__call__(model, document[:100], draft, **given)


def median_s(call, times=5):
    """Return the median of some runs of `call`, in seconds."""
    spent = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def contexts_of(server):
    """Return the names of the directories of published contexts."""
    return [path.name for path in (server.data / "contexts" / "local").iterdir()]


@pytest.mark.parametrize("announced", [True, False])
def test_sixteen_callers_at_once_are_one_reading(server, announced):
    document = b"The keeper of the light walks the long stair each night."
    metadata = {"sha256": sha256(document).digest()} if announced else {}
    start = Barrier(CALLERS)

    def call():
        with grpc.insecure_channel(
            server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = rpcs.ContextServiceStub(channel)
            start.wait(10)
            name = stub.IngestContext(upload(document, **metadata), timeout=20).context.name
            *_, last = stub.WatchContext(pb.WatchContextRequest(name=name), timeout=20)
            return name, last.context.state

    with ThreadPoolExecutor(CALLERS) as pool:
        ends = {future.result() for future in [pool.submit(call) for _ in range(CALLERS)]}
    ((name, state),) = ends
    assert state == pb.CONTEXT_STATE_ACTIVE
    assert server.reading.calls == contexts_of(server) == [name.rpartition("/")[2]]
    assert list((server.data / "uploads").iterdir()) == []


def assert_repeat_within(server, monkeypatch, limit_s, *, size, announced):
    """Store a document of so many bytes, send it again, and see how long that takes."""
    monkeypatch.setattr(server.app.ingest_worker, "_read", ReadsTheStart())
    document = BIG[:size]
    name = active(server, document).name

    def repeat():  # as a client does it, hash first
        metadata = {"sha256": sha256(document).digest()} if announced else {}
        assert ingest(server, document, **metadata).name == name

    hash_s = median_s(lambda: sha256(document).digest())
    repeat_s = median_s(repeat)
    print(f"{size} bytes, announced {announced}: hash {hash_s:.4f} s, repeat {repeat_s:.4f} s")
    assert repeat_s - hash_s <= limit_s


KINDS = [(1000, True), (1000, False), (len(BIG), True)]


@pytest.mark.parametrize(("size", "announced"), KINDS)
def test_a_repeat_costs_its_hash_and_little_else(server, monkeypatch, size, announced):
    limit_s = LOADED * REPEAT_S
    assert_repeat_within(server, monkeypatch, limit_s, size=size, announced=announced)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "announced"), KINDS)
def test_a_repeat_costs_its_hash_and_50_ms(server, monkeypatch, size, announced):
    assert_repeat_within(server, monkeypatch, REPEAT_S, size=size, announced=announced)


def test_a_repeat_is_not_synced_and_a_new_document_is(server, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    document = b"The keeper of the light."
    name = active(server, document).name
    assert synced
    until(lambda: list((server.data / "lives").glob("*.json")))  # its first use is noted
    synced.clear()
    assert ingest(server, document).name == name
    assert synced == []
    assert list((server.data / "uploads").iterdir()) == []
