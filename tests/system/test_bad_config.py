"""Bad settings and bad moments: real processes that must refuse in one line, or go on.

    settings    unknown, of a wrong type, a port in use, an address for others without TLS
    data        no directory, one of others, one open to others, one that another server holds
    model       missing, empty, cut short, of changed bytes, of something else
    machine     few descriptors, python -O and -OO
    signals     SIGTERM while it starts, reads, answers; SIGTERM twice

Refused means exit code 2 and one line on stderr, within 2 s and before any model library is loaded
where a setting or the data are at fault.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from openbook.v1 import contexts_pb2 as pb

from .serving import COMMAND, DOCUMENT, START_S, Served

REFUSED = 2


@pytest.fixture(autouse=True)
def no_settings_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OPENBOOK_")]:
        monkeypatch.delenv(name)


def start(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `openbook serve` until it ends."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        capture_output=True, text=True, timeout=START_S, env={**os.environ, **environment},
    )  # fmt: skip


def refusal_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of a refused start."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(lines), done.stdout) == (REFUSED, 1, ""), done.stderr
    assert lines[0].startswith("openbook: ") and "Traceback" not in done.stderr
    return lines[0]


class Place:
    """The paths of one test, and a port that is taken."""

    def __init__(self, folder: Path, taken: socket.socket) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.taken = f"127.0.0.1:{taken.getsockname()[1]}"

    def least(self, **changes: object) -> list[object]:
        """Return the arguments of a start that would be right, but for `changes`."""
        chosen = {"listen": "127.0.0.1:0", "data": self.data, "model": "m", **changes}
        return [part for name, value in chosen.items() for part in (f"--{name}", value)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield Place(tmp_path, taken)


def made(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def of_another(path: Path) -> Path:
    """Return a directory of another user's; only root can make one."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(made(path, 0o700), 65534, 65534)
    return path


def a_file(path: Path) -> Path:
    path.write_text("no directory")
    return path


SETTINGS: dict[str, tuple[Callable[[Place], list[object]], dict[str, str], str]] = {
    "a wrong type": (lambda p: p.least(threads="0"), {}, "--threads"),
    "a wrong type by variable": (lambda p: p.least(), {"OPENBOOK_THREADS": "many"}, "THREADS"),
    "no number": (lambda p: p.least(), {"OPENBOOK_DRAIN_S": "nan"}, "OPENBOOK_DRAIN_S"),
    "no dtype": (lambda p: p.least(dtype="int3"), {}, "--dtype"),
    "no role yet": (lambda p: p.least(role="gateway"), {}, "not served yet"),
    "a port in use": (lambda p: p.least(listen=p.taken), {}, "in use"),
    "a port that is none": (lambda p: p.least(listen="127.0.0.1:65536"), {}, "--listen"),
    "a host by name": (lambda p: p.least(listen="example.org:1"), {}, "--listen"),
    "every address": (lambda p: p.least(listen="0.0.0.0:0"), {}, "--tls-certificate"),
    "every address, version 6": (lambda p: p.least(listen="[::]:0"), {}, "--tls-certificate"),
    "no data": (lambda p: ["--model", "m"], {}, "--data"),
    "empty data": (lambda p: p.least(data=""), {}, "--data"),
    "data: a file": (lambda p: p.least(data=a_file(p.folder / "f")), {}, "not a directory"),
    "data: below a file": (lambda p: p.least(data=a_file(p.folder / "f") / "x"), {}, "directory"),
    "data: readable by all": (lambda p: p.least(data=made(p.folder / "o", 0o755)), {}, "chmod 700"),
    "data: open to all": (lambda p: p.least(data=made(p.folder / "o", 0o777)), {}, "chmod 700"),
    "data: another's": (lambda p: p.least(data=of_another(p.folder / "o")), {}, "another user"),
    "no token": (lambda p: p.least(**{"token-file": p.folder / "t"}), {}, "token"),
    "no URL of a Redis": (lambda p: p.least(**{"redis-url": "http://:hush@h"}), {}, "--redis-url"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_setting_is_refused_at_once_in_one_line(place: Place, setting: str) -> None:
    arguments, environment, words = SETTINGS[setting]
    given = arguments(place)
    started = time.monotonic()
    line = refusal_of(start(*given, **environment))
    assert time.monotonic() - started < 2.0
    assert words in line and "hush" not in line
    assert not place.data.exists() or not list(place.data.rglob("*"))


def test_an_option_that_is_none_is_refused_and_a_variable_that_is_none_is_told(
    place: Place,
) -> None:
    done = start(*place.least(), "--treads", "3")
    assert done.returncode == REFUSED and "--treads" in done.stderr
    assert "Traceback" not in done.stderr
    done = start(*place.least(listen=place.taken), OPENBOOK_TREADS="3")
    told, refused = done.stderr.splitlines()
    assert told == "openbook: OPENBOOK_TREADS is not a setting; ignored"
    assert done.returncode == REFUSED and "in use" in refused


def noise(folder: Path, _: Path) -> Path:
    path = folder / "noise.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 64)
    return path


def empty(folder: Path, _: Path) -> Path:
    return made(folder / "empty", 0o700)


def copied(folder: Path, model: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))


def cut_short(folder: Path, model: Path) -> Path:
    weights = copied(folder, model) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4096)
    return weights.parent


def without_a_tokenizer(folder: Path, model: Path) -> Path:
    path = copied(folder, model)
    (path / "tokenizer.json").unlink()
    return path


def of_no_kind(folder: Path, model: Path) -> Path:
    path = copied(folder, model)
    (path / "config.json").write_text('{"model_type": "abacus"}')
    return path


@pytest.mark.parametrize(
    "make",
    [noise, *(pytest.param(make, marks=pytest.mark.slow)
              for make in (empty, cut_short, without_a_tokenizer, of_no_kind))],
)  # fmt: skip
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(
    place: Place, tiny_model_directory: Path, make: Callable[[Path, Path], Path]
) -> None:
    model = make(place.folder, tiny_model_directory)
    assert "model" in refusal_of(start(*place.least(model=model)))
    assert not (place.data / "valkey.sock").exists()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Serve]:
    """Return `(model=) -> Served` over one data directory; what still runs is killed."""
    started: list[Served] = []

    def begin(model: Path = tiny_model_directory) -> Served:
        started.append(Served(model, tmp_path / "data", tmp_path / "log"))
        return started[-1]

    yield begin
    for served in started:
        served.end(signal.SIGKILL)  # of one that has ended: closes what it wrote to


@pytest.mark.slow
def test_contexts_of_weights_that_were_changed_are_refused(
    serve: Serve, tiny_model_directory: Path, tmp_path: Path
) -> None:
    model = copied(tmp_path, tiny_model_directory)
    first = serve(model)
    name = first.ingest().name
    first.end()
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    again = serve(model)
    status, reason = again.refusal(name)
    assert (status, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")
    assert again.ask(again.ingest().name)[1].usage.answer_tokens > 0


@pytest.mark.slow
def test_with_64_descriptors_every_context_is_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
    monkeypatch.setattr(f"{Served.__module__}.COMMAND", few + COMMAND)
    served = serve()
    names = [served.ingest(DOCUMENT[:400] + b"%d" % n).name for n in range(16)]
    for name in names:
        assert served.ask(name, max_tokens=1)[1].usage.answer_tokens == 1


def test_python_oo_is_refused_and_every_other_refusal_stays(place: Place) -> None:
    """Transformers reads its own docstrings while it loads a model."""
    line = refusal_of(start(*place.least(), PYTHONOPTIMIZE="2"))
    assert "-OO" in line
    for arguments, words in (
        (place.least(data=made(place.folder / "o", 0o755)), "chmod 700"),
        (place.least(listen="0.0.0.0:0"), "--tls-certificate"),
        (place.least(listen=place.taken), "in use"),
    ):
        assert words in refusal_of(start(*arguments, PYTHONOPTIMIZE="2"))


@pytest.mark.slow
def test_checks_are_checks_without_asserts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    served = serve()
    context = served.ingest()
    answer, _ = served.ask(context.name)
    for fields in (
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"stop": [""]},
        {"seed": 1 << 63},
    ):
        with pytest.raises(grpc.RpcError) as raised:
            served.ask(context.name, **fields)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    raw = served.channel.unary_stream("/openbook.v1.ContextService/Ask")
    for request in (b"", b"\xff\xfe", b"\x0a\x11contexts/../secret"):
        with pytest.raises(grpc.RpcError) as raised:
            list(raw(request, timeout=10))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for document, reason in ((b" ", "DOCUMENT_EMPTY"), (b"caf\xe9", "DOCUMENT_NOT_TEXT")):
        assert served.ingest(document).error.reason == reason
    assert served.ask(context.name)[0] == answer
    shard = served.data / "contexts" / "local" / context.name.removeprefix("contexts/")
    (shard / "layer-001.mdb").chmod(0o600)
    with (shard / "layer-001.mdb").open("r+b") as file:
        file.seek(9000)
        byte = file.read(1)
        file.seek(9000)
        file.write(bytes([byte[0] ^ 1]))
    assert served.refusal(context.name) == (grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT")
    assert served.end() == 0


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not alive


@pytest.mark.parametrize(
    "after_s", [1.5, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.2, 0.7, 2.5, 3.5, 5.0))]
)
def test_sigterm_while_it_starts_ends_it_and_leaves_nothing_running(
    place: Place, serve: Serve, tiny_model_directory: Path, after_s: float
) -> None:
    command = [sys.executable, "-c", COMMAND, *place.least(model=tiny_model_directory)]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(after_s)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    # Before it can listen to signals the system's own answer to one ends it.
    assert process.returncode in (0, -signal.SIGTERM) and b"Traceback" not in errors
    assert gone(children)


@pytest.mark.slow
def test_sigterm_while_it_reads_ends_it_and_the_next_start_reads_on(serve: Serve) -> None:
    first = serve()
    name = first.upload(DOCUMENT)
    next(c for c in first.watch(name) if c.progress.stage == pb.INGEST_STAGE_READING)
    told = time.monotonic()
    assert first.end() == 0
    assert time.monotonic() - told < 15
    assert not (first.data / "valkey.sock").exists()
    drafts = first.data / "contexts" / ".tmp"
    assert not drafts.exists() or not list(drafts.iterdir())
    again = serve()
    *_, context = again.watch(name)
    assert context.state == pb.CONTEXT_STATE_ACTIVE
    assert again.ask(name)[1].usage.answer_tokens > 0
    _assert_a_second_sigterm_does_not_wait(again, name)


def _assert_a_second_sigterm_does_not_wait(served: Served, name: str) -> None:
    answers = [
        iter(served.stub.Ask(pb.AskRequest(context=name, question="?", max_tokens=2000, seed=n)))
        for n in range(4)
    ]
    for answer in answers:
        next(answer)
    served.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while '"asks": 4' not in served.log.read_text():  # two at once would be heard as one
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0 and time.monotonic() - told < 5
    for answer in answers:
        with pytest.raises(grpc.RpcError) as raised:
            list(answer)
        assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert "Traceback" not in served.log.read_text()
