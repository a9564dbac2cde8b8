"""The demo's script against the fake, its judgement, and the processes it starts and kills."""

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from openbook.client import cli_verbs, demo
from openbook.client.demo_server import DemoFailed, DemoServer, last_line, serve_command

from .conftest import FINAL, FakeServer

FACTS = {"The code of the vault is": "739154", "The number of the mill is": "402"}
REPOSITORY = Path(__file__).parents[2]


class StandIn:
    """Stands where DemoServer does; the fake is what it starts."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        self.steps: list[str] = []

    def start(self) -> str:
        self.steps.append("start")
        return self.fake.address

    def kill(self) -> None:
        self.steps.append("kill")

    def stop(self) -> None:
        self.steps.append("stop")


@pytest.fixture
def script_files(tmp_path: Path) -> tuple[Path, Path]:
    """Return a document with facts, and the facts."""
    document, facts = tmp_path / "light.txt", tmp_path / "facts.json"
    document.write_text("".join(f"{question} {code}.\n\n" for question, code in FACTS.items()))
    entries = [{"question": question, "code": code} for question, code in FACTS.items()]
    facts.write_text(json.dumps(entries))
    return document, facts


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, fake: FakeServer) -> StandIn:
    """Let the demo start the fake, and spare it the second prefill."""
    stand_in = StandIn(fake)
    monkeypatch.setattr(demo, "DemoServer", lambda command, log: stand_in)
    monkeypatch.setattr(demo, "_prefill_again", lambda script: 40.0)
    for question, code in FACTS.items():
        fake.service.answers[question] = [" ", code[:3], code[3:]]
    return stand_in


@pytest.fixture
def play(script_files: tuple[Path, Path], tmp_path: Path) -> Callable[..., Result]:
    """Run `openbook demo`."""

    def run(*arguments: str) -> Result:
        document, facts = script_files
        files = ["--document", str(document), "--facts", str(facts), "--model", "fake"]
        where = ["--data", str(tmp_path / "demo"), "--json", str(tmp_path / "figures.json")]
        return CliRunner().invoke(cli_verbs.app, ["demo", *files, *where, *arguments])

    return run


def test_demo_asks_kills_asks_again_and_reports(
    play: Callable[..., Result], stand_in: StandIn, tmp_path: Path
) -> None:
    done = play()
    assert done.exit_code == 0, done.stderr
    assert stand_in.steps == ["start", "kill", "start", "stop"]
    asked = [request.question for request in stand_in.fake.service.asked]
    vault, mill = FACTS
    assert asked == [vault, mill, vault, vault, vault, vault, mill]
    assert done.stdout.count("739154  right") == 2
    assert "tokens forwarded after the restart" in done.stdout
    assert done.stdout.count("Starting the server ...\n") == 2
    assert "Reading the document again without the store, to compare ...\n" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["right_fresh"], figures["right_restored"], figures["facts"]) == (2, 2, 2)
    assert figures["tokens_prefilled_restored"] == figures["question_tokens"] == 9
    assert figures["tokens_forwarded_restored"] == 9
    assert figures["first_token_prefill_s"] == 40.0
    assert not (tmp_path / "demo").exists()


def test_document_is_a_completion_and_one_ask_is_exact(
    play: Callable[..., Result], stand_in: StandIn
) -> None:
    play()
    service = stand_in.fake.service
    assert [context.prompt_layout for context in service.contexts.values()] == [2]
    assert [request.budget.WhichOneof("kind") for request in service.asked].count("exact") == 1


def test_wrong_answer_fails(play: Callable[..., Result], stand_in: StandIn) -> None:
    stand_in.fake.service.answers["The number of the mill is"] = [" 4025"]
    done = play()
    assert done.exit_code == 1
    assert "1 of 2 answers are wrong before the restart" in done.stderr
    assert "1 of 2 answers are wrong after the restart" in done.stderr
    assert "wrong: it is 402" in done.stdout


def test_model_that_forwards_the_document_again_fails(
    play: Callable[..., Result], stand_in: StandIn
) -> None:
    stand_in.fake.service.tokens_of_an_ask = 7009
    done = play()
    assert done.exit_code == 1
    assert "a question of 9 tokens forwarded 9 by the receipt, 7009 by the model" in done.stderr


def test_receipt_that_prefilled_the_document_fails(
    play: Callable[..., Result], stand_in: StandIn
) -> None:
    final = type(FINAL)()
    final.CopyFrom(FINAL)
    final.receipt.tokens_prefilled = 7009
    stand_in.fake.service.final = final
    done = play()
    assert done.exit_code == 1
    assert "prefilled more or less than its question" in done.stderr


def test_keep_leaves_the_directory_and_a_full_one_is_refused(
    play: Callable[..., Result], stand_in: StandIn, tmp_path: Path
) -> None:
    assert play("--keep").exit_code == 0
    assert (tmp_path / "demo").is_dir()
    (tmp_path / "demo" / "mine.txt").touch()
    done = play()
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "is not empty" in done.stderr
    assert (tmp_path / "demo" / "mine.txt").exists()


def test_server_is_stopped_when_the_demo_breaks_off(
    play: Callable[..., Result], stand_in: StandIn
) -> None:
    stand_in.fake.service.final = None
    done = play()
    assert done.exit_code == 1
    assert stand_in.steps == ["start", "stop"]
    assert done.stderr.splitlines()[-1].startswith("openbook: the answer ended without")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ("[]", "holds no facts"),
        ('[{"question": "The code of the vault is", "code": "1"}]', "is not in"),
        ('[{"question": "The code of the vault is", "code": 739154}]', "every fact is"),
        ('[["The code", "1"]]', "every fact is"),
        ("[", "Expecting value"),
    ],
)
def test_facts_that_cannot_be_asked_are_refused(
    facts: str, said: str, play: Callable[..., Result], script_files: tuple[Path, Path]
) -> None:
    script_files[1].write_text(facts)
    done = play()
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


@pytest.mark.parametrize("option", ["--document", "--facts"])
def test_document_and_facts_go_together(option: str, script_files: tuple[Path, Path]) -> None:
    done = CliRunner().invoke(cli_verbs.app, ["demo", option, str(script_files[0])])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "openbook: --document and --facts go together: the facts are of the document\n"
    )


def test_every_option_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(cli_verbs.app, ["demo", "--help"]).stdout
    for default in ("examples/esther.txt", "examples/facts.json", "the demo's own"):
        assert f"[default: ({default})]" in shown
    assert "goes with --facts" in shown and "goes with --document" in shown


def test_example_holds_eight_distinct_facts_at_several_depths() -> None:
    examples = REPOSITORY / "examples"
    script = demo.read_script(examples / "esther.txt", examples / "facts.json", model="any")
    text = script.document.read_text(encoding="utf-8")
    assert len(script.facts) == 8
    assert len({fact.code for fact in script.facts}) == 8
    assert all(len(fact.code) >= 6 and fact.code.isdigit() for fact in script.facts)
    first = [text.index(fact.question) / len(text) for fact in script.facts]
    last = [text.rindex(fact.question) / len(text) for fact in script.facts]
    assert min(first) < 0.1 and max(last) > 0.85
    assert all(0.03 < after - before < 0.1 for before, after in pairwise(first))
    assert all(after - before > 0.05 for before, after in zip(first, last, strict=True))


def stub(program: str) -> list[str]:
    """Return the command of a process that behaves as `program` says."""
    return [sys.executable, "-u", "-c", program]


SERVING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])
print('child', child.pid)
print('openbook ready on 127.0.0.1:4711')
time.sleep(300)
"""


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Wait for a process that was killed to be gone."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
@pytest.mark.parametrize("end", [DemoServer.kill, DemoServer.stop])
def test_server_ends_with_everything_that_it_started(
    end: Callable[[DemoServer], None], tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    server = DemoServer(stub(SERVING), log=log)
    for _ in range(2):  # the second start must not take the first's ready line for its own
        assert server.start() == "127.0.0.1:4711"
        child = int(log.read_text().split()[-5])
        assert is_alive(child)
        end(server)
        assert ends(child)
    server.stop()  # once more is harmless


def test_server_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    program = "import sys; print('openbook: no such model', file=sys.stderr); sys.exit(2)"
    server = DemoServer(stub(program), log=tmp_path / "server.log")
    with pytest.raises(DemoFailed, match="did not start: openbook: no such model"):
        server.start()
    server.stop()


def test_last_line_skips_empty_ones() -> None:
    assert last_line(b"one\n two \n\n") == "two"
    assert last_line(b"\n") == "it said nothing"


def test_serve_command_is_on_loopback() -> None:
    command = serve_command("model.gguf", Path("data"))
    assert command[command.index("--listen") + 1] == "127.0.0.1:0"


def test_second_prefill_is_run_and_its_figure_read(
    monkeypatch: pytest.MonkeyPatch, script_files: tuple[Path, Path], tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho loading\necho \'{"first_token_ms": 41500.0, "prompt_tokens": 7000}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    script = demo.read_script(*script_files, model="fake")
    assert demo._prefill_again(script) == 41.5
    program.write_text("#!/bin/sh\necho 'no memory' >&2\nexit 1\n")
    with pytest.raises(DemoFailed, match="no memory"):
        demo._prefill_again(script)
    program.write_text("#!/bin/sh\necho '[]'\n")
    with pytest.raises(DemoFailed, match="no time to its first token"):
        demo._prefill_again(script)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(demo, "PREFILL_S_MAX", 0.2)
    with pytest.raises(DemoFailed, match="took over"):
        demo._prefill_again(script)
