"""A server that is asked for long, by callers who often leave: it stays as it was, and is right.

In each round eight callers ask at once, briefly, over several contexts. A third of the asks are
given up at an instant of chance, before the first words or after them, by a cancellation or with
the whole connection; each other ask must have the answer of an idle server. Meanwhile documents are
read, asked and deleted. Between two rounds nobody asks, and what the server holds is counted.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import redis

from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .serving import DOCUMENT, Served

MIB = 1 << 20
CALLERS = 8
CONTEXTS = 3
QUESTIONS = ("How many ships?", "On which day?", "Who counted?", "Why?")
TOKENS_MAX = 4
LEAVE_WITHIN_S = 0.05  # about as long as an ask takes among eight
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True)
class Sample:
    """What a server holds while nobody asks."""

    asks: int
    rss: int
    files: int
    threads: int
    leases: int


class Soak:
    """A server, its contexts, and what it answers while nothing else is asked."""

    def __init__(self, served: Served, *, seed: int) -> None:
        self.served = served
        self.ends: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._process = psutil.Process(served.process.pid)
        self._names = [served.ingest(DOCUMENT[: 2000 * (1 + n)]).name for n in range(CONTEXTS)]
        self._answers = {
            (name, question, tokens): served.ask(name, question=question, max_tokens=tokens)[0]
            for name in self._names
            for question in QUESTIONS
            for tokens in range(1, TOKENS_MAX + 1)
        }

    def round(self, asks: int, ingests: int) -> Sample:
        """Ask and read, all at once; count when all is over."""
        seeds = [self._chance.getrandbits(40) for _ in range(asks + ingests)]
        with ThreadPoolExecutor(CALLERS) as callers, ThreadPoolExecutor(1) as reader:
            readings = reader.map(self._read_and_delete, seeds[asks:])
            self.ends.update(callers.map(self._ask, seeds[:asks]))
            list(readings)
        return self._sample()

    def _ask(self, seed: int) -> str:
        """Ask, and perhaps leave; return how it ended: "answered", "early" or "late"."""
        chance = random.Random(seed)
        key = (chance.choice(self._names), chance.choice(QUESTIONS), chance.randint(1, TOKENS_MAX))
        name, question, tokens = key
        request = pb.AskRequest(context=name, question=question, max_tokens=tokens)
        if chance.random() > 1 / 3:
            *deltas, last = self.served.stub.Ask(request, timeout=60)
            assert last.HasField("final")
            assert "".join(response.delta for response in deltas) == self._answers[key], key
            return "answered"
        with self._stub(is_own=chance.random() < 0.3) as stub:
            answer = stub.Ask(request, timeout=60)
            end = chance.choice(["early", "late"])
            if end == "late":
                next(answer)
            time.sleep(chance.uniform(0, LEAVE_WITHIN_S))
            if stub is self.served.stub:
                answer.cancel()
        return end

    @contextmanager
    def _stub(self, *, is_own: bool) -> Iterator[rpcs.ContextServiceStub]:
        """Give the stub that all share, or one whose connection is torn down at the end."""
        if not is_own:
            yield self.served.stub
            return
        with grpc.insecure_channel(self.served.address, OWN_CONNECTION) as channel:
            yield rpcs.ContextServiceStub(channel)

    def _read_and_delete(self, seed: int) -> None:
        """Read a document that was never read before, ask over it and delete it."""
        name = self.served.ingest(DOCUMENT[:3000] + f" Volume {seed}.".encode()).name
        self.served.ask(name, max_tokens=1)
        self.served.stub.DeleteContext(pb.DeleteContextRequest(name=name), timeout=10)

    def _sample(self) -> Sample:
        """Count once the model is at rest."""
        deadline, before = time.monotonic() + 10, -1
        while (forwarded := self.served.tokens_forwarded()) != before:
            assert time.monotonic() < deadline, "the model still runs"
            before = forwarded
            time.sleep(0.3)
        with redis.Redis(unix_socket_path=str(self.served.data / "valkey.sock")) as client:
            leases = len(list(client.scan_iter("openbook:lease:*")))
        process = self._process
        memory, files = process.memory_info().rss, process.num_fds()
        return Sample(self.ends.total(), memory, files, process.num_threads(), leases)


@pytest.fixture
def soak(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Soak]:
    served = Served(tiny_model_directory, tmp_path / "data", tmp_path / "log")
    try:
        yield Soak(served, seed=30)
    finally:
        if served.process.poll() is None:
            served.end()
    (drained,) = re.findall(r'"asks": (\d+), "calls": (\d+).*draining', served.log.read_text())
    assert drained == ("0", "0")


def assert_flat(soak: Soak, samples: list[Sample]) -> None:
    """Compare with the first sample: leases of what is open alone, and nothing is left behind."""
    first = samples[0]
    for sample in samples:
        assert sample.leases == CONTEXTS
        assert sample.files <= first.files + 1 and sample.threads <= first.threads + 2, sample
    share = soak.ends["answered"] / soak.ends.total()
    assert 0.6 < share < 0.73 and min(soak.ends["early"], soak.ends["late"]) > 0


def test_some_hundred_asks_leave_nothing_and_are_answered_right(soak: Soak) -> None:
    samples = [soak.round(100, 1) for _ in range(4)]
    assert_flat(soak, samples[1:])
    assert samples[-1].rss - samples[1].rss <= 8 * MIB


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_asks_and_500_documents_leave_nothing(soak: Soak) -> None:
    samples = [soak.round(500, 25) for _ in range(20)][1:]  # the first allocates what stays
    assert_flat(soak, samples)
    thousands = [sample.asks / 1000 for sample in samples]
    slope, _ = np.polyfit(thousands, [sample.rss / MIB for sample in samples], 1)
    print(*samples, soak.ends, f"{slope:.2f} MiB per 1,000 asks", sep="\n")
    assert slope * MIB < 1e6
