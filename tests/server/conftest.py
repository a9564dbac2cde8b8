"""What the server's tests share: real servers for Redis' part, and a whole server over fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openbook.server.valkey import EmbeddedValkey

from .real_redis import KINDS, RealRedis
from .running import KeptLog, RunningServer


@pytest.fixture
def log() -> KeptLog:
    return KeptLog()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory as the server makes it."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def valkey(data: Path) -> Iterator[EmbeddedValkey]:
    """A real Valkey on a unix socket, ended with the test."""
    server = EmbeddedValkey(data)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=KINDS)
def redis_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealRedis]:
    """Each of the two real servers in turn, in a directory of its own, ended with the test."""
    directory = tmp_path / "redis"
    directory.mkdir(mode=0o700)
    server = RealRedis(request.param, directory)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def make_server(data: Path, log: KeptLog) -> Iterator[Callable[..., RunningServer]]:
    """Return `(**settings) -> RunningServer`, started; each is stopped with the test."""
    started: list[RunningServer] = []

    def make(**settings: Any) -> RunningServer:
        server = RunningServer(data, log, **settings)
        started.append(server)
        return server.start()

    yield make
    for server in started:
        server.engine.gate.set()
        server.engine.open_gate.set()
        server.reading.gate.set()
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., RunningServer]) -> RunningServer:
    """A running server over the fakes."""
    return make_server()
