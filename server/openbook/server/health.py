"""grpc.health.v1: whether this server answers, and which of its parts would not.

Owns the health service and the task that looks at the parts. It knows nothing of contexts.

    "", openbook.v1.ContextService    SERVING while questions are answered
    openbook.store                    … while documents can be taken in: the disk takes writes
    openbook.redis                    … while Redis answers; without it everything but the view of
                                      other servers goes on
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from openbook.server.directory import takes_writes
from openbook.v1 import contexts_pb2 as pb

LOOK_S = 1.0
SERVICES = ("", pb.DESCRIPTOR.services_by_name["ContextService"].full_name)


Check = Callable[[], Awaitable[bool]]


class Health:
    """Says SERVING while the server answers, and NOT_SERVING from the moment it drains."""

    def __init__(self, is_well: Callable[[], bool], parts: Mapping[str, Check]) -> None:
        """Ask `is_well` of the whole, and of each part its own check, by its health name."""
        self._is_well = is_well
        self._parts = parts
        self._is_draining = False
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

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
        await self.tell()

    async def tell(self) -> None:
        """Set the status of every service to what is true now."""
        is_serving = self._is_well() and not self._is_draining
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for service in SERVICES:
            await self._servicer.set(service, status)
        for part, check in self._parts.items():
            is_sound = not self._is_draining and await check()
            await self._servicer.set(part, statuses.SERVING if is_sound else statuses.NOT_SERVING)


def part_checks(data: Path, redis_answers: Check) -> dict[str, Check]:
    """Return the checks of a server's parts by their health names."""

    async def store_takes_writes() -> bool:
        return await asyncio.to_thread(takes_writes, data)

    return {"openbook.store": store_takes_writes, "openbook.redis": redis_answers}
