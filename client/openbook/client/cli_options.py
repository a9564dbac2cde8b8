"""Options that several verbs share, and the client that they describe.

Knows: how a time to live and a size are written, --server and the environment. The token is read
from OPENBOOK_TOKEN alone: an option would show it to everyone who can list processes. Beside it
OPENBOOK_TLS_CA says that the connection is encrypted, and who vouches for the server.
"""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from openbook.client.channel import Tls
from openbook.client.client import Client
from openbook.client.interrupts import close_when_interrupted

Server = Annotated[str, typer.Option(envvar="OPENBOOK_SERVER", help="host:port of the service.")]


SIZE_MAX = 2**63  # more than any machine has
UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
UNITS_BYTES = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def read_ttl(text: str) -> float | None:
    """Return the seconds of a time such as 7d, 12h, 30m or 3600; None for never."""
    if text == "never":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if match is None:
        raise ValueError("--ttl is a time such as 7d, 12h, 30m or 3600 (seconds), or never")
    return float(match[1]) * UNITS_S[match[2]]


def read_size(text: str, option: str) -> int:
    """Return the bytes of a size such as 16GiB or 500GB, rounded down; ValueError for no such."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text, re.ASCII)
    if match is None or match[2] not in UNITS_BYTES:
        raise ValueError(f"{option} is a size such as 16GiB, 500GB or a number of bytes")
    count = float(match[1]) * UNITS_BYTES[match[2]]
    if count > SIZE_MAX:
        raise ValueError(f"{option} is at most {SIZE_MAX} bytes")
    return int(count)


def document_of(file: Path) -> Path | BinaryIO:
    """Return what to read: the file, or standard input for `-`; ValueError where it is closed."""
    if str(file) != "-":
        return file
    if sys.stdin is None:
        raise ValueError("standard input is closed; there is nothing to read")
    return sys.stdin.buffer


def tls_of_environment() -> Tls | None:
    """Return what OPENBOOK_TLS_CA says: a PEM file, or `system` for the machine's authorities."""
    ca = os.environ.get("OPENBOOK_TLS_CA", "")
    if not ca:
        return None
    return Tls() if ca == "system" else Tls(ca=Path(ca))


def where_nobody_answers(address: str, *, is_tls: bool) -> str:
    """Return what to do where nobody answers at `address`, or, over TLS, nobody who is trusted."""
    if is_tls:
        return (
            "see that it uses TLS, that OPENBOOK_TLS_CA vouches for its certificate and that this "
            f"names the host of {address}; or start one with `openbook serve`"
        )
    return (
        f"start one with `openbook serve`, name another than {address} with --server, or set "
        "OPENBOOK_TLS_CA where it uses TLS"
    )


def connect(server: str) -> Client:
    """Return a client of `server` as the environment says; Ctrl-C will close it."""
    client = Client(
        server, token=os.environ.get("OPENBOOK_TOKEN") or None, tls=tls_of_environment()
    )
    close_when_interrupted(client.close)
    return client
