"""Killed while it reads a document, a server reads it again, and nobody ever sees half of it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openbook.v1 import contexts_pb2 as pb

from .serving import DOCUMENT, Served

ROUNDS = 20


class Killed:
    """A server that is killed while it reads, and one like it that nobody disturbs."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self.calm = Served(model, folder / "calm", folder / "log")
        self.served = Served(model, folder / "data", folder / "log")

    def kill_at(self, document: bytes, is_time: Callable[[pb.Context], bool]) -> str:
        """Kill the server once the reading of a document is where `is_time` says."""
        name = self.served.upload(document)
        for context in self.served.watch(name):
            if is_time(context):
                break
        assert self.served.end(signal.SIGKILL) == -signal.SIGKILL
        return name

    def assert_whole_after_restart(self, name: str, document: bytes) -> None:
        """Start again: the document is read without being sent, and answers as it ever would."""
        self.served = Served(self._model, self._folder / "data", self._folder / "log")
        *_, context = self.served.watch(name)
        assert context.state == pb.CONTEXT_STATE_ACTIVE, context.error
        contexts = self._folder / "data" / "contexts"
        assert not list((contexts / ".tmp").iterdir())
        uploads, end = self._folder / "data" / "uploads", time.monotonic() + 10
        while list(uploads.iterdir()):  # removed just after the context is there
            assert time.monotonic() < end, "the upload outlives its context"
            time.sleep(0.05)
        files = {path.name for path in (contexts / "local" / name.rpartition("/")[2]).iterdir()}
        assert {"manifest.json", "tokens.mdb", "layer-000.mdb"} < files
        undisturbed = self.calm.ingest(document)
        assert context.token_count == undisturbed.token_count
        answer, final = self.served.ask(name)
        expected, usage = self.calm.ask(undisturbed.name)
        assert (answer, final.usage) == (expected, usage.usage)

    def end(self) -> None:
        """Kill both, if they still run."""
        for served in (self.served, self.calm):
            if served.process.poll() is None:
                served.end(signal.SIGKILL)


@pytest.fixture
def killed(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Killed]:
    pair = Killed(tiny_model_directory, tmp_path)
    yield pair
    pair.end()


def test_case_b28_killed_at_each_stage_a_document_is_read_again(killed: Killed) -> None:
    stages: list[Callable[[pb.Context], bool]] = [
        lambda context: True,  # in line
        lambda context: context.progress.layers_done >= 1,
        lambda context: context.progress.layers_done >= context.progress.layers - 1 > 0,
        lambda context: context.progress.stage == pb.INGEST_STAGE_SEALING,
    ]
    for number, is_time in enumerate(stages):
        document = DOCUMENT + f" Volume {number}.".encode()
        name = killed.kill_at(document, is_time)
        killed.assert_whole_after_restart(name, document)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_case_b28_killed_at_random_instants_a_document_is_read_again(killed: Killed) -> None:
    started = time.monotonic()
    killed.calm.ingest()
    spent_s = time.monotonic() - started
    chance = random.Random(28)
    for number in range(ROUNDS):
        document = DOCUMENT + f" Volume {number}.".encode()
        name = killed.served.upload(document)
        time.sleep(chance.uniform(0.0, 1.2 * spent_s))
        assert killed.served.end(signal.SIGKILL) == -signal.SIGKILL
        killed.assert_whole_after_restart(name, document)
