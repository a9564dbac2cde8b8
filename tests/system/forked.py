"""`openbook serve` without the seconds of its imports: each is a fork of a process that has them.

For tests that start a server a hundred times. What is forked has loaded modules and nothing else:
no model, no thread, no file.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from .serving import Served

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["openbook.server.app"])


class Forked(Served):
    """A server as Served starts one, sooner."""

    def __init__(
        self,
        model: Path,
        data: Path,
        log: Path,
        *,
        checkpoint_every_s: float = 10.0,
        kv_dtype: str = "float16",
    ) -> None:
        """Start. No setting changes `checkpoint_every_s`, which is the worker's.

        The environment is that of the first fork: settings are to be given here.
        """
        self.data = data
        self.log = log
        reader, writer = FORKS.Pipe(duplex=False)
        with writer:
            options = {"data": str(data), "model": str(model), "kv_dtype": kv_dtype}
            given = (writer, log, checkpoint_every_s, options)
            self.process = _Process(reader, given)
        self._connect()


class _Process:
    """What Served needs of subprocess.Popen, of a fork."""

    def __init__(self, reader: Connection, given: tuple[object, ...]) -> None:
        """Call `_serve(*given)` in a fork; `reader` is the end of its pipe that stays here."""
        self._fork = FORKS.Process(target=_serve, args=given)
        self._fork.start()
        with reader:
            self.stdout = os.fdopen(os.dup(reader.fileno()))
        self.pid = self._fork.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Return the exit code, or minus the signal that ended the process."""
        self._fork.join(timeout)
        code = self.poll()
        assert code is not None, "the server still runs"
        return code

    def poll(self) -> int | None:
        return self._fork.exitcode


def _serve(
    writer: Connection, log: Path, checkpoint_every_s: float, options: dict[str, str]
) -> None:
    """Serve until the end of the process, with its outputs in a pipe and in a log."""
    from openbook.server import parts
    from openbook.server.commands import serve

    os.dup2(writer.fileno(), 1)
    with log.open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    parts.IngestSettings = partial(parts.IngestSettings, checkpoint_every_s=checkpoint_every_s)
    serve(listen="127.0.0.1:0", threads=1, **options)
