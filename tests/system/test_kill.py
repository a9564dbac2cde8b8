"""Killed while it reads a document, a server reads it again, and nobody ever sees half of it."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from openbook.indexstore.store import read_manifest
from openbook.v1 import contexts_pb2 as pb

from .forked import Forked
from .serving import DOCUMENT, Served

ROUNDS = 100
QUESTIONS = [DOCUMENT[97 * n : 98 * n + 20].decode() for n in range(50)]  # 20 to 69 letters
EXACT = pb.Budget(exact=pb.Budget.Exact())


class Killed:
    """A server that is killed while it reads, and one like it that nobody disturbs."""

    def __init__(self, model: Path, folder: Path, *, checkpoint_every_s: float = 10.0) -> None:
        self._model = model
        self._folder = folder
        self._checkpoint_every_s = checkpoint_every_s
        self.calm = self._start("calm")
        self.served = self._start("data")

    def _start(self, data: str) -> Served:
        return Forked(
            self._model,
            self._folder / data,
            self._folder / "log",
            checkpoint_every_s=self._checkpoint_every_s,
        )

    def kill_at(self, document: bytes, is_time: Callable[[pb.Context], bool]) -> str:
        """Kill the server once the reading of a document is where `is_time` says."""
        name = self.served.upload(document)
        for context in self.served.watch(name):
            if is_time(context):
                break
        self.kill()
        return name

    def kill_once_saved(self, document: bytes, layers: int) -> str:
        """Kill the server once so many layers of a document are in a checkpoint.

        One that is read too fast for that is deleted and read again.
        """
        end = time.monotonic() + 60
        while True:
            name = self.served.upload(document)
            while self.saved_layers() < layers and not self.is_published(name):
                assert time.monotonic() < end
                time.sleep(0.002)
            if not self.is_published(name):
                self.kill()
                if not self.is_published(name):
                    return name
                self.served = self._start("data")
            self.served.stub.DeleteContext(pb.DeleteContextRequest(name=name), timeout=60)

    def kill(self) -> None:
        """Kill the server."""
        assert self.served.end(signal.SIGKILL) == -signal.SIGKILL

    def is_published(self, name: str) -> bool:
        """Say whether a context is in its place."""
        place = self._folder / "data" / "contexts" / "local" / name.rpartition("/")[2]
        return place.exists()

    def saved_layers(self) -> int:
        """Return how many layers the only draft has saved."""
        for path in (self._folder / "data" / "contexts" / ".tmp").glob("*/checkpoint.json"):
            with suppress(FileNotFoundError):  # it has been sealed meanwhile
                layers: int = json.loads(path.read_text())["checkpoint"]["state"]["layers"]
                return layers
        return 0

    def assert_whole_after_restart(self, name: str, document: bytes) -> None:
        """Start again: the document is read without being sent, and answers as it ever would."""
        self.served = self._start("data")
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

    def resumed(self) -> dict[str, int]:
        """Return after how many layers the reading of each context was gone on with."""
        events = []
        for line in (self._folder / "log").read_text().splitlines():
            if line.startswith("{"):  # a killed server may leave half of one
                events.append(json.loads(line))
        return {
            f"contexts/{event['context']}": event["layers_done"]
            for event in events
            if event["event"] == "ingest_resumed"
        }

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


@pytest.mark.parametrize("layers", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_case_b28_killed_after_a_checkpoint_a_reading_goes_on_from_it(
    save_tiny: Callable[..., Path], tmp_path: Path, layers: int
) -> None:
    model = save_tiny("llama", 4, 2, num_hidden_layers=layers)
    killed = Killed(model, tmp_path, checkpoint_every_s=0.0)
    try:
        for saved in range(1, layers):
            document = DOCUMENT + f" Volume {saved}.".encode()
            name = killed.kill_once_saved(document, saved)
            killed.assert_whole_after_restart(name, document)
            assert saved <= killed.resumed()[name] < layers
    finally:
        killed.end()


def answers(served: Served, name: str) -> list[tuple[str, pb.Usage, tuple[float, ...]]]:
    """Ask every question, each fifth one exactly; return texts, usages and what was read."""
    seen = []
    for number, question in enumerate(QUESTIONS):
        budget = {"budget": EXACT} if number % 5 == 4 else {}
        text, final = served.ask(name, question=question, **budget)
        r = final.receipt
        seen.append((text, final.usage, (r.keys_scored, r.keys_read, r.mass_estimated)))
    return seen


def test_50_questions_are_answered_the_same_after_kill_9_and_a_restart(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    places = (tiny_model_directory, tmp_path / "data", tmp_path / "log")
    first = Forked(*places, kv_dtype="float32")
    name = first.ingest().name
    place = tmp_path / "data" / "contexts" / "local" / name.rpartition("/")[2]
    assert read_manifest(place).kv_dtype == "float32"
    before = answers(first, name)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    second = Forked(*places, kv_dtype="float32")
    assert answers(second, name) == before
    assert second.end() == 0
    assert len({text for text, _, _ in before}) >= 30  # the questions matter


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_case_b28_killed_at_random_instants_a_document_is_read_again(killed: Killed) -> None:
    killed.calm.ingest()  # the first one warms up
    started = time.monotonic()
    killed.calm.ingest(DOCUMENT + b" The second volume.")
    spent_s = time.monotonic() - started
    chance, read_before = random.Random(28), 0
    for number in range(ROUNDS):
        document = DOCUMENT + f" Volume {number}.".encode()
        name = killed.served.upload(document)
        time.sleep(chance.uniform(0.0, 1.2 * spent_s))
        killed.kill()
        read_before += killed.is_published(name)
        killed.assert_whole_after_restart(name, document)
    assert 0 < read_before < ROUNDS / 2  # the instants are of the reading, and some after it
