"""Health tells the truth about each part within seconds, and questions go on without the others."""

import os

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.server import directory
from openbook.server.directory import takes_writes

from .running import active, ask, text_of, until

WELL = health_pb2.HealthCheckResponse.SERVING
ILL = health_pb2.HealthCheckResponse.NOT_SERVING


def status(server, service):
    stub = health_pb2_grpc.HealthStub(server.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


def test_every_part_is_well_at_first(server):
    for service in ("", "openbook.v1.ContextService", "openbook.store", "openbook.redis"):
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
