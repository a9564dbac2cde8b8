"""A server process of the demo's own: started, killed hard, stopped.

Knows: processes and the server's ready line. Does not know: what is asked of the server.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

READY = re.compile(rb"openbook ready on (\S+)")
START_S_MAX = 300.0
STOP_S_MAX = 60.0


class DemoFailed(Exception):
    """The demo cannot go on; the text is one line."""


def serve_command(model: str, data: Path) -> list[str]:
    """Return the command that serves `model` from `data` on a free loopback port."""
    command = [sys.executable, "-m", "openbook.client.cli", "serve", "--role", "all"]
    return [*command, "--listen", "127.0.0.1:0", "--data", str(data), "--model", model]


class DemoServer:
    """A server in a process group of its own; what it prints is appended to `log`."""

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the server, wait until it answers, and return its address.

        Raises DemoFailed with the server's last word when it ends, or is not ready in time.
        """
        with self._log.open("ab") as log:
            written = log.tell()
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + START_S_MAX
        while time.monotonic() < end:
            said = self._log.read_bytes()[written:]
            if match := READY.search(said):
                return match[1].decode()
            if self._process.poll() is not None:
                raise DemoFailed(f"the server did not start: {last_line(said)}")
            time.sleep(0.05)
        raise DemoFailed(f"the server was not ready after {START_S_MAX:.0f} s; see {self._log}")

    def kill(self) -> None:
        """Kill the server and what it started, at once: nothing is flushed or said goodbye to."""
        assert self._process is not None, "killed before it was started"
        self._sweep()
        self._process.wait()

    def stop(self) -> None:
        """Ask the server to end, and kill it if it does not; harmless when it has ended."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        self._sweep()
        self._process.wait()

    def _sweep(self) -> None:
        """Kill what is left of the process group."""
        assert self._process is not None, "swept before it was started"
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it has ended


def last_line(output: bytes) -> str:
    """Return the last line with something in it, which names the error of a process."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
