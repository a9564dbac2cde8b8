"""grpc.health.v1: whether this server answers, and which of its parts would not.

Owns the health service and the task that looks at the parts. It knows nothing of contexts.

    "", openbook.v1.ContextService    SERVING while questions are answered: the engine runs, and
                                      there are contexts to read
    openbook.contexts                 … while the directory of contexts can be read
    openbook.store                    … while documents can be taken in: the disk takes writes
    openbook.redis                    … while Redis answers; without it everything but the view of
                                      other servers goes on

A check that raises, or hangs as a lost network disk does, says no.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.server.directory import TENANT_ROOT, takes_writes
from openbook.v1 import contexts_pb2 as pb

LOOK_S = 1.0
CHECK_S = 3.0  # with LOOK_S less than the 5 s in which health must tell the truth
CONTEXTS = "openbook.contexts"
SERVICES = ("", pb.DESCRIPTOR.services_by_name["ContextService"].full_name)
WELL = health_pb2.HealthCheckResponse.SERVING
ILL = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Check = Callable[[], Awaitable[bool]]
Rpc = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health:
    """Says SERVING while the server answers, and NOT_SERVING from the moment it drains."""

    def __init__(self, is_well: Callable[[], bool], parts: Mapping[str, Check]) -> None:
        """Ask `is_well` of the engine, and of each part its own check, by its health name.

        Where there is a part `openbook.contexts`, the whole is well only if that is.
        """
        self._is_well = is_well
        self._parts = {name: _Part(check) for name, check in parts.items()}
        self._is_draining = False
        self._servicer = _Servicer()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def keep(self) -> None:
        """Tell the truth once a second, until cancelled."""
        while True:
            await self.tell()
            await asyncio.sleep(LOOK_S)

    async def drain(self) -> None:
        """Say NOT_SERVING from now on."""
        self._is_draining = True
        self._servicer.set(dict.fromkeys((*SERVICES, *self._parts), ILL))

    async def tell(self) -> None:
        """Set the status of every service to what is true now."""
        verdicts = await asyncio.gather(*(part.is_sound() for part in self._parts.values()))
        if self._is_draining:
            return
        sound = dict(zip(self._parts, verdicts, strict=True))
        is_serving = self._is_well() and sound.get(CONTEXTS, True)
        sound |= dict.fromkeys(SERVICES, is_serving)
        self._servicer.set({name: WELL if is_sound else ILL for name, is_sound in sound.items()})


class _Part:
    """One part and its check, of which no more than one is under way."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._looking: asyncio.Future[bool] | None = None

    async def is_sound(self) -> bool:
        """Return what the check says, and False when it fails or takes too long.

        One that takes too long goes on, in a thread that nothing can stop, and the next call waits
        for the same.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._check())
            self._looking.add_done_callback(_seen)
        looking = self._looking
        done, _ = await asyncio.wait({looking}, timeout=CHECK_S)
        return bool(done) and looking.exception() is None and looking.result()


def _seen(looking: asyncio.Future[bool]) -> None:
    """Take note of a failure that came too late for the look that began it."""
    if not looking.cancelled():
        looking.exception()


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The statuses and who watches them; a watcher that does not read holds up nobody.

    grpc's own servicer waits for its slowest watcher before it changes a status, and forgets every
    watcher of a service when the first one leaves.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()

    def set(self, statuses: Mapping[str, int]) -> None:
        """Replace the statuses and wake whoever watches."""
        if statuses != self._statuses:
            self._statuses = dict(statuses)
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, rpc: Rpc
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of one service; NOT_FOUND for one that there is not."""
        status = self._statuses.get(request.service)
        if status is None:
            await rpc.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, rpc: Rpc) -> None:
        """Send the status of one service now and at each change; one between two may be missed."""
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, UNKNOWN)
            if status != sent:
                await rpc.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()


def part_checks(data: Path, redis_answers: Check, threads: ThreadPoolExecutor) -> dict[str, Check]:
    """Return the checks of a server's parts by their health names.

    The threads are of no other use: that those of the calls are all busy is no illness.
    """

    async def contexts_can_be_read() -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, _can_be_read, data)

    async def store_takes_writes() -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, _takes_documents, data)

    return {
        CONTEXTS: contexts_can_be_read,
        "openbook.store": store_takes_writes,
        "openbook.redis": redis_answers,
    }


def _can_be_read(data: Path) -> bool:
    """Tell whether the contexts can be listed, or there are none yet. Raises OSError."""
    root = data / TENANT_ROOT
    with os.scandir(root if root.exists() else data) as names:
        next(names, None)
    return True


def _takes_documents(data: Path) -> bool:
    """Tell whether each folder that a document passes through takes writes."""
    contexts = data / "contexts"
    folders = [data / "uploads", contexts if contexts.exists() else data]
    return all(takes_writes(folder) for folder in folders)
