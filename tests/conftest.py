"""Fixtures that several components' tests share: a real embedded Valkey, logs kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openbook.server.valkey import EmbeddedValkey


class KeptLog:
    """A log that keeps its events, for tests that look at them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, object]]] = []

    def info(self, event: str, /, **fields: object) -> None:
        """Keep one event."""
        self.events.append(("info", event, fields))

    def warning(self, event: str, /, **fields: object) -> None:
        """Keep one event."""
        self.events.append(("warning", event, fields))

    def error(self, event: str, /, **fields: object) -> None:
        """Keep one event."""
        self.events.append(("error", event, fields))

    def names(self) -> list[str]:
        """Return the names of the events, in order."""
        return [name for _, name, _ in self.events]


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
