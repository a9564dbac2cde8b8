"""One server process: started, served, drained.

Owns the order of start and stop. What the parts are is in parts.py; it knows nothing of what a part
does between the two.

Start: address, Valkey, model, catalog, then ready; the data directory is held already (start.py).
A stop by SIGTERM or Ctrl-C says NOT_SERVING, takes nothing new, lets running answers end, and gives
the rest back. A second signal does not wait for them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc

from openbook import worker
from openbook.server.logs import (
    Lines,
    Log,
    capture_libraries,
    fault_fields,
    open_log,
    write_all,
)
from openbook.server.parts import Parts
from openbook.server.requests import Parsing
from openbook.server.settings import Settings
from openbook.server.start import Prepared, StartRefused, address_refused, check_address
from openbook.server.valkey import EmbeddedValkey, ValkeyFailed
from openbook.v1 import contexts_pb2_grpc as rpcs
from openbook.worker import (
    Engine,
    Model,
    ModelMissing,
    UnsupportedModel,
    load_model,
)

MESSAGE_BYTES_MAX = 4 << 20
STOP_GRACE_S = 0.5
LAST_ASK_S = 0.02
TELL_S = 10.0
OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server binds the same port silently
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Clients may ping every 10 s while a long reading sends nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def run(settings: Settings, held: Prepared) -> int:
    """Serve a held data directory until told to stop; return the exit code. Raises StartRefused."""
    _raise_descriptor_limit()
    lines = Lines(partial(write_all, sys.stderr.fileno()))
    log = open_log(lines)
    capture_libraries(log)
    code = asyncio.run(_serve(settings, held, log))
    log.info("stopped")
    lines.drain()
    return code


def announce(address: str) -> None:
    """Print the ready line, which programs that start a server wait for."""
    print(f"openbook ready on {address}", flush=True)


def spare_collections() -> None:
    """Take all that is there once the model is out of the garbage collector's sight, for good.

    A full collection of what the model's libraries hold stops every answer for 0.4 s.
    """
    gc.collect()
    gc.freeze()


async def _serve(settings: Settings, held: Prepared, log: Log) -> int:
    signals = _Signals(asyncio.get_running_loop())
    server = new_server()
    address = bind(server, settings.listen, held.certificate)
    async with AsyncExitStack() as stack:
        valkey = None
        if settings.redis_url is None:
            valkey = await start_valkey(settings.data, log)
            stack.callback(valkey.stop)
        log.info("model_loading", device=settings.device, dtype=settings.dtype)
        model = await _load(settings, signals)
        if model is None:
            return _leave_at_once(valkey)
        spare_collections()
        log.info("model_loaded", model=model.fingerprint[:16])
        engine = Engine(
            model,
            threads=settings.threads,
            sequences_max=settings.sequences_max,
            question_tokens_max=settings.question_tokens_max,
        )
        try:
            app = App(settings, held, model, engine, valkey=valkey, read=worker.ingest, log=log)
            await app.start(server)
        except OSError as error:
            raise StartRefused(
                f"the data directory {settings.data} cannot be used: {error.strerror}"
            ) from error
        announce(address)
        log.info("ready", address=address, model=model.fingerprint[:16], pid=os.getpid())
        await signals.first.wait()
        return await app.stop(server, signals.second)


class App(Parts):
    """A server over one loaded model, from its start to its stop."""

    async def start(self, server: grpc.aio.Server) -> None:
        """Read the disk, start the threads and serve."""
        self.decode.start()
        await self.ingests.recover()
        for keep in (
            self.keeper.keep,
            self.broker.keep,
            self.broker.watch_policy,
            self.ingest_worker.run,
            self.collector.keep,
            self.health.keep,
        ):
            self._tasks.append(asyncio.create_task(self._kept(keep)))
        rpcs.add_ContextServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self.service, server
        )
        self.health.register(server)
        await self.health.tell()
        await server.start()

    async def stop(self, server: grpc.aio.Server, hurry: asyncio.Event) -> int:
        """Drain and stop; return the exit code. `hurry` ends the wait for running answers."""
        await self.health.drain()
        self.service.is_draining = True
        stopping = asyncio.create_task(self.ingest_worker.stop())
        await self._drain(hurry)
        await server.stop(STOP_GRACE_S)
        await stopping
        self.service.close()
        self.health_threads.shutdown(wait=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.decode.stop()
        await self.keeper.close()
        await self.broker.close()
        return 0

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Wait for the calls under way, and say so: a stop that waits looks like one that hangs."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        end, tell_at = now + self._settings.drain_s, now
        while True:
            if now >= tell_at:
                asks, calls = self.decode.asks_running, self.service.running
                left_s = round(max(0.0, end - now), 1)
                self._log.info("draining", asks=asks, calls=calls, drain_s=left_s)
                tell_at = now + TELL_S
            if not self.service.running or now >= end or hurry.is_set():
                return
            await asyncio.sleep(LAST_ASK_S)
            now = loop.time()

    async def _kept(self, keep: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task that never ends by itself, again whenever it fails."""
        while True:
            try:
                await keep()
            except Exception as error:
                self._log.error("task_failed", task=keep.__qualname__, **fault_fields(error))
                await asyncio.sleep(1.0)


class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second not to wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard)

    def _heard(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def new_server() -> grpc.aio.Server:
    """Return a server with the options of every server of ours, and nothing to serve yet."""
    return grpc.aio.server(options=OPTIONS, interceptors=(Parsing(),))


def bind(
    server: grpc.aio.Server, listen: str, certificate: tuple[bytes, bytes] | None = None
) -> str:
    """Bind a server and return HOST:PORT with the port that was taken. Raises StartRefused.

    The address is tried by itself first: grpc says its own words on stderr when it cannot bind.
    """
    check_address(listen)
    try:
        if certificate is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, grpc.ssl_server_credentials([certificate]))
    except RuntimeError as error:
        raise address_refused(listen) from error
    return f"{listen.rpartition(':')[0]}:{port}"


async def start_valkey(data: Path, log: Log) -> EmbeddedValkey:
    """Return the embedded Valkey, started if it can be: it advises, and the broker tries again.

    Raises StartRefused when others could answer on its socket.
    """
    try:
        valkey = EmbeddedValkey(data)
    except ValkeyFailed as error:
        raise StartRefused(str(error)) from error
    try:
        await asyncio.to_thread(valkey.start)
        log.info("valkey_started")
    except ValkeyFailed:
        log.warning("valkey_failed")  # its own words are in valkey.log
    return valkey


async def _load(settings: Settings, signals: _Signals) -> Model | None:
    """Load the model in a thread that does not hold up a stop; None when told to stop meanwhile.

    Raises StartRefused.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Model] = loop.create_future()

    def load() -> None:
        try:
            model = load_model(
                settings.model,
                device=settings.device,
                dtype=settings.dtype,
                rope_scale=settings.rope_scale,
            )
        except BaseException as error:
            loop.call_soon_threadsafe(loaded.set_exception, error)
        else:
            loop.call_soon_threadsafe(loaded.set_result, model)

    threading.Thread(target=load, name="load", daemon=True).start()
    told = asyncio.create_task(signals.first.wait())
    either: set[asyncio.Future[Any]] = {loaded, told}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not loaded.done():
        return None
    try:
        return loaded.result()
    except (UnsupportedModel, ModelMissing) as error:
        raise StartRefused(str(error)) from error
    except Exception as error:
        raise StartRefused(
            f"the model cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _leave_at_once(valkey: EmbeddedValkey | None) -> NoReturn:
    """End the process while a thread is still loading a model, which nothing can interrupt."""
    if valkey is not None:
        valkey.stop()
    os._exit(0)


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as the machine does: an open context holds one per layer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
