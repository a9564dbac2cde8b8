"""grpc.health.v1: whether this server answers.

Owns the health service and the task that looks at the engine. It knows nothing of contexts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from openbook.v1 import contexts_pb2 as pb

LOOK_S = 1.0
SERVICES = ("", pb.DESCRIPTOR.services_by_name["ContextService"].full_name)


class Health:
    """Says SERVING while the server answers, and NOT_SERVING from the moment it drains."""

    def __init__(self, is_well: Callable[[], bool]) -> None:
        self._is_well = is_well
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
