"""A real server on a disk that turns read-only says so, answers on, and recovers by itself."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .serving import DOCUMENT, Served

TOLD_S = 5.0
WELL = health_pb2.HealthCheckResponse.SERVING
ILL = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def served(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Served]:
    """A server in a mount namespace of its own."""
    within = ["unshare", "-rm", "sh", "-c", 'exec "$@"', "sh"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here to mount in")
    server = Served(tiny_model_directory, tmp_path / "data", tmp_path / "log", within=within)
    yield server
    server.end(signal.SIGKILL)


def within_namespace(served: Served, *commands: list[str]) -> None:
    """Run commands in the namespaces of a server."""
    for command in commands:
        enter = ["nsenter", "--user", "--mount", "-t", str(served.process.pid), *command]
        subprocess.run(enter, check=True, capture_output=True, timeout=10)


def await_status(served: Served, service: str, status: int) -> float:
    """Wait until a service has a status, and return after how long that was."""
    stub, started = health_pb2_grpc.HealthStub(served.channel), time.monotonic()
    request = health_pb2.HealthCheckRequest(service=service)
    while stub.Check(request, timeout=5).status != status:
        assert time.monotonic() < started + TOLD_S, f"{service} is not told"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.mark.slow  # the cut is over a fake model, in tests/server
def test_a_disk_that_turns_read_only_is_told_and_questions_go_on(served: Served) -> None:
    name = served.ingest().name
    answer = served.ask(name)[0]
    await_status(served, "openbook.store", WELL)
    data = str(served.data)
    within_namespace(
        served, ["mount", "--bind", data, data], ["mount", "-o", "remount,bind,ro", data]
    )
    told_s = await_status(served, "openbook.store", ILL)
    await_status(served, "openbook.v1.ContextService", WELL)
    assert served.ask(name)[0] == answer
    with pytest.raises(grpc.RpcError) as raised:
        served.upload(DOCUMENT + b" More.")
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE, raised.value
    within_namespace(served, ["umount", data])
    back_s = await_status(served, "openbook.store", WELL)
    print(f"told after {told_s:.2f} s, well after {back_s:.2f} s")
    assert served.ask(served.ingest(DOCUMENT + b" More.").name)[0]
