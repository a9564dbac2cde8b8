"""Health tells the truth about each part within seconds, and questions go on without the others."""

import asyncio
import gc
import os
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.server import directory, health
from openbook.server.directory import takes_writes
from openbook.server.health import Health

from .running import active, ask, refusal, text_of, until

WELL = health_pb2.HealthCheckResponse.SERVING
ILL = health_pb2.HealthCheckResponse.NOT_SERVING
PARTS = ("openbook.contexts", "openbook.store", "openbook.redis")


def status(server, service):
    stub = health_pb2_grpc.HealthStub(server.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


def test_every_part_is_well_at_first(server):
    for service in ("", "openbook.v1.ContextService", *PARTS):
        until(lambda service=service: status(server, service) == WELL)


def test_a_redis_that_is_gone_is_told_and_questions_go_on(server):
    context = active(server)
    until(lambda: status(server, "openbook.redis") == WELL)
    server.valkey.start = lambda: None  # nothing brings it back
    server.valkey.stop()
    until(lambda: status(server, "openbook.redis") == ILL, 5)
    assert status(server, "openbook.v1.ContextService") == WELL
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


def test_a_disk_without_room_is_told_and_questions_go_on(server, monkeypatch):
    context = active(server)
    until(lambda: status(server, "openbook.store") == WELL)
    monkeypatch.setattr(directory, "FREE_BYTES_LEAST", 1 << 62)
    until(lambda: status(server, "openbook.store") == ILL, 5)
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    monkeypatch.undo()
    until(lambda: status(server, "openbook.store") == WELL, 5)


def test_an_engine_that_died_is_told(server):
    context = active(server)
    until(lambda: status(server, "openbook.v1.ContextService") == WELL)
    server.engine.crash = RuntimeError("its thread ends")
    for service in ("", "openbook.v1.ContextService"):
        until(lambda service=service: status(server, service) == ILL, 5)
    assert status(server, "openbook.store") == WELL
    refused = refusal(lambda: ask(server, context.name, max_tokens=1))
    assert refused[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")


def test_a_data_directory_that_is_gone_is_told_until_it_is_back(server, tmp_path):
    active(server)
    until(lambda: status(server, "openbook.store") == WELL)
    server.data.rename(tmp_path / "aside")
    for service in ("", "openbook.v1.ContextService", "openbook.contexts", "openbook.store"):
        until(lambda service=service: status(server, service) == ILL, 5)
    (tmp_path / "aside").rename(server.data)
    for service in ("", "openbook.v1.ContextService", "openbook.contexts", "openbook.store"):
        until(lambda service=service: status(server, service) == WELL, 5)


@pytest.mark.parametrize("folder", ["uploads", "contexts"])
def test_a_folder_that_takes_no_documents_is_told_and_questions_go_on(server, monkeypatch, folder):
    context = active(server)
    until(lambda: status(server, "openbook.store") == WELL)
    real = os.open

    def read_only(path, flags, *args, **named):
        if path == server.data / folder:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        until(lambda: status(server, "openbook.store") == ILL, 5)
        assert status(server, "") == WELL
        assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    until(lambda: status(server, "openbook.store") == WELL, 5)


def test_a_check_that_hangs_or_fails_says_no_and_hides_no_other(monkeypatch):
    """As on a network disk that is gone: what is tried there never returns."""
    monkeypatch.setattr(health, "CHECK_S", 0.1)
    gate, begun = threading.Event(), []

    async def hangs():
        begun.append(1)
        return await asyncio.to_thread(gate.wait, 20)

    async def fails():
        raise OSError(5, "Input/output error")

    async def answers():
        return True

    async def tell():
        parts = {"hangs": hangs, "fails": fails, "answers": answers}
        told = Health(lambda: True, parts)
        for _ in range(3):
            await told.tell()
            found = told._servicer._statuses
            assert (found["hangs"], found["fails"], found["answers"]) == (ILL, ILL, WELL)
        assert len(begun) == 1  # else a thread more each second
        gate.set()
        await told.tell()
        assert told._servicer._statuses["hangs"] == WELL

    asyncio.run(tell())


def test_who_drains_is_not_called_well_by_a_look_begun_before():
    async def tell():
        entered, gate = asyncio.Event(), asyncio.Event()

        async def slow():
            entered.set()
            return await gate.wait()

        told = Health(lambda: True, {"slow": slow})
        looking = asyncio.create_task(told.tell())
        await entered.wait()
        await told.drain()
        gate.set()
        await looking
        assert set(told._servicer._statuses.values()) == {ILL}

    asyncio.run(tell())


def test_every_watcher_hears_of_a_change_though_another_has_left(server):
    until(lambda: status(server, "openbook.store") == WELL)
    stub = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest(service="openbook.v1.ContextService")
    first, second = stub.Watch(request, timeout=20), stub.Watch(request, timeout=20)
    assert next(first).status == next(second).status == WELL
    first.cancel()
    with pytest.raises(grpc.RpcError):
        next(first)
    server.engine.crash = RuntimeError("its thread ends")
    assert next(second).status == ILL
    second.cancel()


def test_a_service_that_there_is_not_is_not_found(server):
    with pytest.raises(grpc.RpcError) as raised:
        status(server, "openbook.other")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("call", ["statvfs", "open", "write"])
def test_a_disk_that_fails_takes_no_writes(tmp_path, monkeypatch, call):
    assert takes_writes(tmp_path)

    def fail(*_, **__):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        assert not takes_writes(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not takes_writes(tmp_path / "absent")


def test_a_check_that_fails_too_late_is_no_one_s_unseen_error(monkeypatch):
    monkeypatch.setattr(health, "CHECK_S", 0.02)
    unseen = []

    async def fail_late():
        await asyncio.sleep(0.1)
        raise OSError("too late")

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, found: unseen.append(found))
        part = health._Part(fail_late)
        assert not await part.is_sound()
        await asyncio.sleep(0.2)
        assert not await part.is_sound()  # begins another look, and lets go of the first
        gc.collect()
        await asyncio.sleep(0.2)

    asyncio.run(run())
    gc.collect()
    assert unseen == []
