"""On a disk that fills at each step of an ingest, it succeeds whole or says so and leaves nothing.

The server's data directory is on a small tmpfs in a mount namespace of its own. A ballast file
leaves so many pages, or empty files so many names, and the same server goes through all levels.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from openbook.v1 import contexts_pb2 as pb

from .serving import DOCUMENT, Served

PAGE = 4096
DISK_BYTES = 8 << 20
DISK_NAMES = 200  # files and directories
PAGE_LEVELS = 34
NAME_LEVELS = 16
OTHER = DOCUMENT.replace(b"light", b"tower")
KEPT = {"lock", "secret", "valkey.sock", "valkey.log"}


@dataclass
class Disk:
    """A server on a small disk, an old context on it, and what became of each ingest."""

    served: Served
    root: Path  # the disk, seen from outside its namespace
    old: str = ""
    old_answer: str = ""
    answer: str = ""
    pages: int = 0  # that one ingest needs at its peak
    ends: list[str] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.root / "data"

    def free(self) -> tuple[int, int]:
        """Return the pages and names that are left."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize // PAGE, found.f_favail

    def files(self) -> set[str]:
        """Return what there is in the data directory besides what every server has."""
        return {
            str(path.relative_to(self.data))
            for path in self.data.rglob("*")
            if path.name not in KEPT and not path.is_dir()
        }

    @contextmanager
    def filled(self, *, pages: int | None = None, names: int | None = None) -> Iterator[None]:
        """Leave so many pages or names, for as long as the block lasts."""
        ballast = self.root / "ballast"
        ballast.mkdir()
        try:
            if pages is not None:
                with (ballast / "file").open("wb") as file:
                    if self.free()[0] > pages:
                        os.posix_fallocate(file.fileno(), 0, (self.free()[0] - pages) * PAGE)
                assert self.free()[0] == pages
            if names is not None:
                for number in range(self.free()[1] - names):
                    (ballast / str(number)).touch()
                assert self.free()[1] == names
            yield
        finally:
            shutil.rmtree(ballast)

    def ingest(self) -> str:
        """Ingest; return where it ended, after the check that it did so as it should."""
        try:
            name = self.served.upload(OTHER)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
            assert reason_of(error) == "STORE_FULL"
            return "upload"
        seen = list(self.served.watch(name))
        context = seen[-1]
        if context.state == pb.CONTEXT_STATE_ACTIVE:
            assert self.served.ask(name)[0] == self.answer
            return "whole"
        assert context.state == pb.CONTEXT_STATE_FAILED
        assert context.error.reason == "STORE_FULL", context.error
        status, reason = self.served.refusal(name)
        assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")
        if len(seen) == 1:  # failed before it was looked at
            return "INGEST_STAGE_QUEUED 0"
        progress = seen[-2].progress
        return f"{pb.IngestStage.Name(progress.stage)} {progress.layers_done}"

    def delete(self, name: str) -> None:
        """Delete a context, and wait until its room is free: whoever has it mapped holds that."""
        self.served.stub.DeleteContext(pb.DeleteContextRequest(name=name), timeout=10)
        end, free = time.monotonic() + 10, -1
        while free != (free := self.free()[0]):
            assert time.monotonic() < end
            time.sleep(0.3)

    def level(self, **left: int) -> None:
        """Ingest with so much left, look at what stays, then again with the space back."""
        before = self.files()
        with self.filled(**left):
            end = self.ingest()
            assert self.served.ask(self.old)[0] == self.old_answer
            if end != "whole":
                self.assert_left_nothing(before)
        self.ends.append(end)
        assert self.ingest() == "whole", (left, end)
        (name,) = {context.name for context in self.contexts()} - {self.old}
        self.delete(name)
        assert self.files() == before, (left, end)

    def contexts(self) -> list[pb.Context]:
        """Return every context."""
        return list(self.served.stub.ListContexts(pb.ListContextsRequest(), timeout=10).contexts)

    def assert_left_nothing(self, before: set[str]) -> None:
        """See that nothing but a failure's name and reason stays, soon after it is told."""
        end = time.monotonic() + 10
        while extra := {path for path in self.files() - before if not self.tells_of_failure(path)}:
            assert time.monotonic() < end, extra
            time.sleep(0.02)
        for folder in ("contexts/.tmp", "contexts/.trash"):
            assert not list((self.data / folder).glob("*"))

    def tells_of_failure(self, path: str) -> bool:
        """Tell whether a file is the record, the name or the life of a context that FAILED."""
        failed = {c.name.rpartition("/")[2] for c in self.contexts() if c.name != self.old}
        folder, _, name = path.partition("/")
        if folder in ("labels", "lives"):
            return name.removesuffix(".json") in failed
        if folder != "uploads" or name.removesuffix(".json") not in failed:
            return False
        return bool(json.loads((self.data / path).read_text())["error_reason"])


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason in an error's details."""
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    return info.reason


@pytest.fixture
def disk(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Disk]:
    """A server on a small disk, with one context and the answers of it and of one that is gone."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = f"mount -t tmpfs -o size={DISK_BYTES},nr_inodes={DISK_NAMES} none '{place}'"
    within = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here to mount a small disk in")
    served = Served(tiny_model_directory, place / "data", tmp_path / "log", within=within)
    made = Disk(served, Path(f"/proc/{served.process.pid}/root") / place.relative_to("/"))
    try:
        made.old = served.ingest().name
        made.old_answer = served.ask(made.old)[0]
        empty = made.free()[0]
        other = served.ingest(OTHER).name
        made.pages = empty - made.free()[0] + len(OTHER) // PAGE + 1
        made.answer = served.ask(other)[0]
        made.delete(other)
        yield made
    finally:
        served.end(signal.SIGKILL)


def test_ingests_on_a_full_disk_are_refused_and_leave_nothing(disk: Disk) -> None:
    disk.level(pages=0)
    disk.level(pages=disk.pages // 2)
    disk.level(pages=disk.pages - 8)
    disk.level(names=1)
    disk.level(names=5)
    assert "whole" not in disk.ends and len(set(disk.ends)) >= 3, disk.ends


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ingests_at_fifty_levels_of_a_full_disk_are_whole_or_leave_nothing(disk: Disk) -> None:
    for number in range(PAGE_LEVELS):
        # Singly at both ends, where files are small; the layers between are hit by any few.
        middle = range(9, disk.pages - 15, (disk.pages - 24) // 9)
        disk.level(pages=[*range(9), *middle[:9], *range(disk.pages - 14, disk.pages + 2)][number])
    for names in range(NAME_LEVELS):
        disk.level(names=names)
    print(disk.pages, disk.ends)
    ends = set(disk.ends)
    steps = {"upload", "INGEST_STAGE_QUEUED 0", "INGEST_STAGE_READING 0", "INGEST_STAGE_READING 1"}
    assert ends >= {*steps, "INGEST_STAGE_SEALING 2", "whole"}, disk.ends
