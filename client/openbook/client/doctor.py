"""What `openbook doctor` looks at: a service, and the machine beside a data directory.

Knows: the health call, models, and what the system tells of files, limits and the processor. Does
not know: terminals. The server's clock is not looked at: no call tells it.
"""

import platform
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import grpc

from openbook.client.channel import Tls, open_channel
from openbook.client.cli_options import where_nobody_answers
from openbook.client.client import Client
from openbook.client.errors import NotAllowed, OpenbookError, from_rpc
from openbook.client.retries import SERVICE_CONFIG
from openbook.client.views import Model

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse with status (field 1) SERVING (1)
HEALTH_TIMEOUT_S = 5.0
ROUND_TRIPS = 3  # the quickest counts: the first one also connects
FREE_BYTES_MIN = 1 << 30  # a document of some thousand tokens takes hundreds of megabytes
CONTEXTS_OPEN = 8  # as many answers run at once by default, each perhaps about its own context
FILES_BESIDE = 128  # sockets, logs and libraries of a server
LAYERS_ASSUMED = 32  # where no service tells
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do where it is not in order."""

    what: str
    is_ok: bool
    found: str
    advice: str = ""

    def __str__(self) -> str:
        """Return one line."""
        line = f"{'ok' if self.is_ok else 'fail'} {self.what}: {self.found}"
        return f"{line}; {self.advice}" if self.advice and not self.is_ok else line


def examine_service(client: Client, address: str, *, tls: Tls | None) -> Iterator[Finding]:
    """Yield what is found about the service; stops where nobody answers."""
    yield Finding("versions", True, _versions())
    try:
        models = client.models()
    except OpenbookError as error:
        advice = where_nobody_answers(address, is_tls=tls is not None)
        if isinstance(error, NotAllowed):
            advice = "set OPENBOOK_TOKEN to a token of the server's"
        yield Finding("service", False, error.message, advice)
        return
    yield Finding("service", True, f"answers at {address}")
    yield _health(address, tls)
    names = ", ".join(model.name for model in models)
    yield Finding("model", bool(models), names or "none is served", "see the server's log")
    yield _timed("round trip", client.models)


def examine_data(folder: Path, models: Sequence[Model]) -> Iterator[Finding]:
    """Yield what is found about a data directory, and about this machine for its server."""
    if not folder.is_dir():
        yield Finding("data", False, "is no directory", "`openbook serve --data` makes it")
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    yield Finding("data", mode == 0o700, f"mode {mode:04o}", "chmod 0700 the directory")
    free = shutil.disk_usage(folder).free
    gib = f"{free / 2**30:.1f} GiB are free"
    yield Finding("disk", free >= FREE_BYTES_MIN, gib, "delete contexts or make room")
    yield _files(max((model.layers for model in models), default=LAYERS_ASSUMED))
    yield from processor(CPUINFO)


def processor(cpuinfo: Path) -> Iterator[Finding]:
    """Yield which vector instructions the kernels find, where the system says so."""
    if not cpuinfo.exists():
        return
    flags = {
        flag
        for line in cpuinfo.read_text(errors="replace").splitlines()
        if line.startswith(("flags", "Features"))
        for flag in line.partition(":")[2].split()
    }
    found = sorted(flag for flag in flags if flag == "avx2" or flag.startswith("avx512"))
    slow = "neither avx2 nor avx512; the portable kernels are used, which are slower"
    yield Finding("processor", True, ", ".join(found) or slow)


def _versions() -> str:
    """Return the versions that a report of a fault should name."""
    try:
        own = version("openbook")
    except PackageNotFoundError:
        own = "from a source tree"
    return f"openbook {own}, grpcio {grpc.__version__}, Python {platform.python_version()}"


def _health(address: str, tls: Tls | None) -> Finding:
    """Return what the standard health call says."""
    advice = "it starts, stops or has lost its engine: see its log"
    with open_channel(address, tls=tls, service_config=SERVICE_CONFIG) as channel:
        check = channel.unary_unary(HEALTH_CHECK, None, None)  # bytes as they are
        try:
            is_serving = check(b"", timeout=HEALTH_TIMEOUT_S) == SERVING
        except grpc.RpcError as error:
            return Finding("health", False, from_rpc(error).message, advice)
    return Finding("health", is_serving, "serving" if is_serving else "not serving", advice)


def _timed(what: str, call: Callable[[], object]) -> Finding:
    """Return the milliseconds of the quickest of some calls."""
    best_s = float("inf")
    for _ in range(ROUND_TRIPS):
        begun = time.perf_counter()
        try:
            call()
        except OpenbookError as error:
            return Finding(what, False, error.message, "the service went away: see its log")
        best_s = min(best_s, time.perf_counter() - begun)
    return Finding(what, True, f"{best_s * 1000:.1f} ms")


def _files(layers: int) -> Finding:
    """Return whether a server started from this shell may open the files of its contexts."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_BESIDE + CONTEXTS_OPEN * (layers + 1)  # a file a layer, and the tokens
    is_enough = limit == resource.RLIM_INFINITY or limit >= needed
    shown = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} may be open"
    found = f"{shown}, {CONTEXTS_OPEN} contexts of {layers} layers need {needed}"
    return Finding("files", is_enough, found, f"`ulimit -n {needed}` before `openbook serve`")
