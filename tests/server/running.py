"""A whole server over the fakes, and the calls that its tests make."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from openbook.server import app as server_app
from openbook.server.errors import DOMAIN
from openbook.server.settings import Settings
from openbook.server.start import Prepared
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .fakes import FakeEngine, FakeModel, FakeReading

DOCUMENT = b"The keeper of the light walks the long stair each night."
UNKNOWN = "contexts/" + "0" * 32


def upload(document=DOCUMENT, chunk=1 << 20, **metadata):
    yield pb.IngestContextRequest(metadata=pb.IngestContextRequest.Metadata(**metadata))
    for start in range(0, len(document), chunk):
        yield pb.IngestContextRequest(chunk=document[start : start + chunk])


def ingest(server, document=DOCUMENT, **metadata):
    return server.stub.IngestContext(upload(document, **metadata), timeout=10).context


def settle(server, name):
    seen = list(server.stub.WatchContext(pb.WatchContextRequest(name=name), timeout=20))
    return seen[-1].context


def active(server, document=DOCUMENT, **metadata):
    context = settle(server, ingest(server, document, **metadata).name)
    assert context.state == pb.CONTEXT_STATE_ACTIVE, context.error
    return context


def ask(server, name, question="who keeps it", **fields):
    request = pb.AskRequest(context=name, question=question, **fields)
    return server.stub.Ask(request, timeout=20)


def text_of(responses):
    return "".join(r.delta for r in responses if r.HasField("delta"))


def refusal(call):
    """Return (status, reason, details) of the error that a call ends with."""
    with pytest.raises(grpc.RpcError) as raised:
        result = call()
        list(result) if hasattr(result, "__iter__") else result
    status = rpc_status.from_call(raised.value)
    assert status is not None, raised.value
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == DOMAIN
    return raised.value.code(), info.reason, dict(info.metadata)


def until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


class Held:
    """A function or method that waits at its start until the gate is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.arrived, self.gate, self.left = threading.Event(), threading.Event(), threading.Event()
        original = getattr(owner, name)

        def held(*args: Any, **kwargs: Any) -> Any:
            self.arrived.set()
            assert self.gate.wait(10), "the gate was never set"
            try:
                return original(*args, **kwargs)
            finally:
                self.left.set()

        monkeypatch.setattr(owner, name, held)

    def open_soon(self) -> None:
        """Set the gate in a moment, from another thread."""
        threading.Timer(0.3, self.gate.set).start()


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


class RunningServer:
    """A whole server over the fakes, on a port of its own, in a thread of this process."""

    def __init__(self, data: Path, log: KeptLog, *, model: Any = None, **settings: Any) -> None:
        self.data = data
        self.log = log
        self.model = model or FakeModel()
        self.engine = FakeEngine(self.model)
        self.reading = FakeReading()
        self.valkey: Any = None  # the embedded one, unless a Redis URL is given
        given = {"data": data, "model": "fake", "listen": "127.0.0.1:0", "drain_s": 5, **settings}
        self.settings = Settings(**given)
        self.tokens: tuple[bytes, ...] = ()
        self.app: Any = None
        self.address = ""
        self._loop: Any = None
        self._told: Any = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> RunningServer:
        """Start and wait until it serves."""
        self._thread.start()
        assert self._ready.wait(20), "the server did not start"
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpcs.ContextServiceStub(self.channel)
        return self

    def stop(self) -> None:
        """Drain, stop and wait; may be called again."""
        if self._thread.is_alive():
            self.drain()
            self._thread.join(20)
            assert not self._thread.is_alive(), "the server did not stop"
        self.channel.close()
        if self.valkey is not None:
            self.valkey.stop()

    def drain(self) -> None:
        """Ask for a stop, as SIGTERM does, and return at once."""
        self._loop.call_soon_threadsafe(self._told.set)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's loop, or await it there, and return its result."""

        async def run() -> Any:
            result = function()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Event()
        if self.settings.redis_url is None:
            self.valkey = await server_app.start_valkey(self.data, self.log)
        server = server_app.new_server()
        held = Prepared(b"s" * 32, self.tokens)
        self.address = server_app.bind(server, self.settings.listen)
        self.app = server_app.App(
            self.settings, held, self.model, self.engine,
            valkey=self.valkey, read=self.reading, log=self.log,
        )  # fmt: skip
        await self.app.start(server)
        self._ready.set()
        await self._told.wait()
        await self.app.stop(server, asyncio.Event())
