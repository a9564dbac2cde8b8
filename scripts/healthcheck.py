"""Ask a server on this machine whether it serves; exit 0 if it does, 1 otherwise.

With `--alive`, any answer will do: a server that drains is not to be killed.

Owns the container's health check. It speaks grpc.health.v1 to the loopback address that the server
listens on, because nothing outside the container's network can reach it.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LISTEN_DEFAULT = "127.0.0.1:50051"
TIMEOUT_S = 3.0
OPTIONS = (("grpc.enable_http_proxy", 0),)  # no proxy can reach this machine's loopback


def main() -> int:
    """Print one line and return the exit code."""
    address = os.environ.get("OPENBOOK_LISTEN", LISTEN_DEFAULT)
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}")
            return 1
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return 0 if is_serving or "--alive" in sys.argv[1:] else 1


if __name__ == "__main__":
    sys.exit(main())
