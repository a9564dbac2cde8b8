"""`openbook serve` as a process, with a tiny real model: ingest, ask, kill, ask again, damage.

Owns the promises that need the real worker behind the real server. The server's own tests cover
its refusals one by one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from openbook.v1 import contexts_pb2 as pb

from .serving import COMMAND, DOCUMENT, START_S, Served


@pytest.fixture
def serve(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Callable[[], Served]]:
    """Return `() -> Served` over one data directory; what still runs is killed with the test."""
    started: list[Served] = []

    def start() -> Served:
        served = Served(tiny_model_directory, tmp_path / "data", tmp_path / "log")
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def served(
    tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server for the tests that do not end it."""
    folder = tmp_path_factory.mktemp("served")
    process = Served(tiny_model_directory, folder / "data", folder / "log")
    yield process
    assert process.end() == 0


def test_a_context_answers_the_same_after_kill_9_without_a_second_prefill(
    serve: Callable[[], Served],
) -> None:
    first = serve()
    context = first.ingest()
    assert context.state == pb.CONTEXT_STATE_ACTIVE, context.error
    assert context.token_count > 1000  # there is a middle, so there are graphs
    answer, final = first.ask(context.name)
    again, _ = first.ask(context.name)
    exact, _ = first.ask(context.name, budget=pb.Budget(exact=pb.Budget.Exact()))
    assert answer == again and final.receipt.tokens_reused == context.token_count
    before = first.tokens_forwarded()
    assert first.ingest().name == context.name
    assert first.tokens_forwarded() == before
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    second = serve()
    assert second.tokens_forwarded() == 0
    answer_after, final_after = second.ask(context.name)
    assert answer_after == answer
    prefilled = final_after.receipt.tokens_prefilled
    assert prefilled == final_after.usage.question_tokens
    assert second.tokens_forwarded() <= prefilled + 12
    assert second.ask(context.name, budget=pb.Budget(exact=pb.Budget.Exact()))[0] == exact
    _assert_sigterm_lets_a_running_answer_end(second, context.name)
    assert "keeper" not in second.log.read_text() and "How many" not in second.log.read_text()


def _assert_sigterm_lets_a_running_answer_end(served: Served, name: str) -> None:
    request = pb.AskRequest(context=name, question="How many?", max_tokens=200)
    answer = iter(served.stub.Ask(request, timeout=60))
    next(answer)
    served.process.send_signal(signal.SIGTERM)
    *_, last = answer
    assert last.final.usage.answer_tokens > 1
    assert served.process.wait(60) == 0
    assert not (served.data / "valkey.sock").exists()
    served.end()


def test_damage_is_refused_before_the_first_token_and_the_server_lives(served: Served) -> None:
    sound = served.ingest(DOCUMENT + b" The end.")
    sound_answer = served.ask(sound.name)
    files = ["manifest.json", "tokens.mdb", "layer-000.mdb", "layer-001.mdb"]
    for file in files:
        for damage in (_flip, _truncate):
            context = served.ingest()
            served.ask(context.name)
            folder = served.data / "contexts" / "local" / context.name.removeprefix("contexts/")
            damage(folder / file)
            assert served.refusal(context.name)[0] == grpc.StatusCode.DATA_LOSS, (file, damage)
    assert served.ask(sound.name)[0] == sound_answer[0]
    healed = served.ingest()
    assert served.ask(healed.name)[1].usage.answer_tokens > 0


def test_asks_at_once_answer_as_they_do_alone(served: Served) -> None:
    context = served.ingest()
    questions = [f"How many ships on day {day}?" for day in range(4)]
    alone = [served.ask(context.name, question=question)[0] for question in questions]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda q: served.ask(context.name, question=q)[0], questions))
    assert together == alone


def test_a_cancelled_answer_stops_the_model(served: Served) -> None:
    context = served.ingest()
    request = pb.AskRequest(context=context.name, question="How many?", max_tokens=2000)
    answer = served.stub.Ask(request)
    next(iter(answer))
    answer.cancel()
    time.sleep(1.0)
    stopped_at = served.tokens_forwarded()
    time.sleep(1.0)
    assert served.tokens_forwarded() == stopped_at


@pytest.mark.parametrize(
    ("document", "reason"),
    [(b"", "DOCUMENT_EMPTY"), (b" \n\t", "DOCUMENT_EMPTY"), (b"caf\xe9", "DOCUMENT_NOT_TEXT"),
     (b"word " * 9000, "DOCUMENT_TOO_LONG")],
)  # fmt: skip
def test_a_document_that_cannot_be_read_fails_by_name(
    served: Served, document: bytes, reason: str
) -> None:
    context = served.ingest(document)
    assert (context.state, context.error.reason) == (pb.CONTEXT_STATE_FAILED, reason)
    assert served.refusal(context.name) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


def test_a_missing_model_is_refused_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--data", str(tmp_path / "data"), "--listen",
         "127.0.0.1:0", "--model", str(tmp_path / "nothing.gguf")],
        capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith("openbook: ") and "model" in lines[0]


def _flip(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _truncate(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 4096)
