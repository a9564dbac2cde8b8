"""The two real servers that openbook is tried against, and the faults they are given.

Both are started by the test on a unix socket in its directory, keep nothing on disk, and are ended
with it, by pid.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis

from openbook.server.valkey import EmbeddedValkey

KINDS = ("valkey", "redis")


class RealRedis(EmbeddedValkey):
    """The embedded Valkey, or the machine's redis-server with the same options."""

    def __init__(self, kind: str, directory: Path, *, options: str = "") -> None:
        """Take `options` for the command line, such as "--key-load-delay 1000"."""
        super().__init__(directory)
        self.kind = kind
        self.directory = directory
        self.options = options
        self.pid = 0

    def start(self) -> None:
        """Start it, or start it again after its end."""
        super().start()
        with self.client() as client:
            self.pid = int(client.info("server")["process_id"])

    def freeze(self) -> None:
        """Stop it in its tracks."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does; its socket stays behind."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(5)

    def client(self, **options):
        """Return a client of its own, to look and to do harm with."""
        path = str(self.socket_path)
        return redis.Redis(unix_socket_path=path, protocol=2, socket_timeout=10, **options)

    def _spawn(self, binary: Path):
        program = found_redis() if self.kind == "redis" else binary
        if self.options:
            script = self.directory / "server.sh"
            script.write_text(f'#!/bin/sh\nexec "{program}" "$@" {self.options}\n')
            script.chmod(0o700)
            program = script
        return super()._spawn(program)


def found_redis() -> Path:
    """Return redis-server's path; without it the test is skipped, and fails where CI is set."""
    path = shutil.which("redis-server")
    if path is None:
        text = "redis-server is not installed"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    return Path(path)


@asynccontextmanager
async def delayed(server: RealRedis, delay_s: float):
    """Serve a socket in front of `server` that holds each reply back; yield its URL.

    `delay_s` may be changed on the way: it is the one item of the list that is yielded beside.
    """
    delay, ends, tasks = [delay_s], [], []

    async def pump(reader, writer, is_reply):
        with suppress(OSError):
            while data := await reader.read(65536):
                if is_reply and delay[0]:
                    await asyncio.sleep(delay[0])
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        ends.append(writer)
        back_reader, back_writer = await asyncio.open_unix_connection(str(server.socket_path))
        ends.append(back_writer)
        await asyncio.gather(pump(reader, back_writer, False), pump(back_reader, writer, True))

    path = server.directory / "slow.sock"
    proxy = await asyncio.start_unix_server(serve, path)
    try:
        yield f"unix://{path}", delay
    finally:
        proxy.close()
        for writer in ends:
            writer.close()
        await asyncio.gather(*tasks, return_exceptions=True)
