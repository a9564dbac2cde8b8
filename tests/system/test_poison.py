"""A document that takes the server down is given up after three times; all others are served."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from openbook.v1 import contexts_pb2 as pb

from .serving import DOCUMENT, Served

SCRIPT = Path(__file__).with_name("poisoned_serve.py")
CRASHES = 3
AGAIN = (  # what a client tries again; the rest is no success
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
RETRY_S = 0.1
CLIENT_S = 600.0
Result = TypeVar("Result")


class Supervised:
    """A server that is started again whenever it dies, and clients that try again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self.data = folder / "data"
        self.log = folder / "log"
        self.starts = 0
        self._is_over = threading.Event()
        self.served = self._start(SCRIPT)
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _start(self, script: Path | None) -> Served:
        self.starts += 1
        return Served(self._model, self.data, self.log, script=script)

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            if self.served.process.poll() is not None:
                self.served.end()
                self.served = self._start(SCRIPT)

    def end(self) -> None:
        """Kill the server and start it no more."""
        self._is_over.set()
        self._watcher.join(60)
        self.served.end(signal.SIGKILL)

    def restart(self, script: Path | None = SCRIPT) -> None:
        """Stop the server as a person does, and start it again."""
        self._is_over.set()
        self._watcher.join(60)
        assert self.served.end(signal.SIGTERM) == 0
        self.served = self._start(script)

    def tried(self, call: Callable[[Served], Result]) -> Result:
        """Return what a call gives, tried again for as long as the server is away."""
        end = time.monotonic() + CLIENT_S
        while True:
            try:
                return call(self.served)
            except grpc.RpcError as error:
                if error.code() not in AGAIN or time.monotonic() > end:
                    raise
            except ValueError:  # its channel was closed: the server has died
                assert time.monotonic() < end
            time.sleep(RETRY_S)

    def settled(self, document: bytes) -> pb.Context:
        """Upload a document and return its context once it is read or given up."""
        name = self.tried(lambda served: served.upload(document))
        return self.tried(lambda served: list(served.watch(name))[-1])

    def is_served(self, document: bytes) -> tuple[bool, bool]:
        """Upload, wait and ask; tell whether the document was read, and the question answered."""
        context = self.settled(document)
        if context.state != pb.CONTEXT_STATE_ACTIVE:
            return False, False
        _, final = self.tried(lambda served: served.ask(context.name, max_tokens=4))
        return True, final.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def events(self, name: str, context: str) -> int:
        """Count the log's events of a name and a context."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        found = [json.loads(line) for line in lines]
        context_id = context.rpartition("/")[2]
        return sum(e["event"] == name and e.get("context") == context_id for e in found)


@pytest.fixture
def supervised(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Supervised]:
    server = Supervised(tiny_model_directory, tmp_path)
    yield server
    server.end()


def others(count: int) -> list[bytes]:
    """Return documents that nothing is wrong with."""
    return [DOCUMENT[:700] + f" Volume {number}.".encode() for number in range(count)]


def poison(kind: str) -> bytes:
    """Return a document with a marker in its midst."""
    return DOCUMENT[:900] + f" poison {kind} ".encode() + DOCUMENT[900:1800]


def assert_others_are_served(supervised: Supervised, kinds: list[str], count: int) -> list[str]:
    """Send poison among other documents; return the names of the poisoned contexts.

    At least 99 of 100 of the others are read and answered, whatever happens meanwhile.
    """
    with ThreadPoolExecutor(4) as clients, ThreadPoolExecutor(len(kinds)) as poisoners:
        done = [clients.submit(supervised.is_served, document) for document in others(count)]
        names = []
        for number, kind in enumerate(kinds):
            until = (number + 1) * count // (len(kinds) + 1)
            while sum(each.done() for each in done) < until:
                time.sleep(0.02)
            names.append(poisoners.submit(supervised.settled, poison(kind)))
        ends = [end for future in done for end in future.result()]
        given_up = [future.result() for future in names]
    print(f"{sum(ends)} of {len(ends)} served over {supervised.starts} starts")
    assert sum(ends) >= 0.99 * len(ends)
    for kind, context in zip(kinds, given_up, strict=True):
        assert context.state == pb.CONTEXT_STATE_FAILED, kind
        reason = "INTERNAL" if kind == "raises" else "INGEST_CRASHED"
        assert context.error.reason == reason, kind
        tries = 1 if kind == "raises" else CRASHES
        assert supervised.events("ingest_started", context.name) == tries, kind
    return [context.name for context in given_up]


@pytest.mark.slow  # over the fakes it is in tests/server
def test_a_document_whose_reading_raises_fails_at_once_and_alone(supervised: Supervised) -> None:
    assert_others_are_served(supervised, ["raises"], 12)
    assert supervised.starts == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_poison_is_quarantined_after_three_crashes_and_the_others_are_served(
    supervised: Supervised,
) -> None:
    kinds = ["at tokenizing", "at reading", "at sealing"]
    names = assert_others_are_served(supervised, [*kinds, "raises"], 120)[: len(kinds)]
    assert supervised.starts == 1 + CRASHES * len(kinds)
    for _ in range(2):  # it stays so
        supervised.restart()
        for name in names:
            context = supervised.served.stub.GetContext(pb.GetContextRequest(name=name), timeout=10)
            assert context.context.error.reason == "INGEST_CRASHED"
            assert supervised.served.refusal(name)[1] == "INGEST_CRASHED"
    assert [supervised.events("ingest_started", name) for name in names] == [CRASHES] * len(names)
    supervised.restart(script=None)  # what was wrong with it has been mended
    for name, kind in zip(names, kinds, strict=True):
        request = pb.DeleteContextRequest(name=name)
        supervised.served.stub.DeleteContext(request, timeout=10)
        again = supervised.served.ingest(poison(kind))
        assert (again.name, again.state) == (name, pb.CONTEXT_STATE_ACTIVE)
    assert not list((supervised.data / "contexts" / ".tmp").iterdir())
