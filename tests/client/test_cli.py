"""The command line against the fake: what it prints where, and how it ends."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import typer
from typer.testing import CliRunner, Result

from openbook.client import Client, cli_verbs
from openbook.v1 import contexts_pb2 as pb

from .conftest import FakeServer, Refusal

DOCUMENT = "A canary keeps the light.\n"
ID = "0" * 32  # well formed, and of no context


@pytest.fixture
def openbook(fake: FakeServer) -> Callable[..., Result]:
    """Run a verb against the fake."""

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        environment = {"OPENBOOK_SERVER": fake.address, "COLUMNS": "200"}
        return CliRunner().invoke(cli_verbs.app, arguments, input=stdin, env=environment)

    return run


@pytest.fixture
def document(tmp_path: Path) -> str:
    """Return the path of a document."""
    path = tmp_path / "light.txt"
    path.write_text(DOCUMENT, encoding="utf-8")
    return str(path)


def test_ingest_prints_the_id_alone(
    openbook: Callable[..., Result], document: str, client: Client
) -> None:
    done = openbook("ingest", document, "--layout", "completion", "--name", "light")
    assert done.exit_code == 0
    context_id = done.stdout.strip()
    info = client.context(context_id)
    assert (info.state, info.layout, info.display_name) == ("active", "completion", "light")
    assert done.stderr.splitlines()[:2] == [f"being read as {context_id}", "reading 0/3 layers"]
    assert done.stderr.splitlines()[-1] == "done 3/3 layers"


def test_ingest_leaves_the_layout_to_the_service(
    openbook: Callable[..., Result], fake: FakeServer, document: str
) -> None:
    assert openbook("ingest", document).exit_code == 0
    assert fake.service.metadata[0].prompt_layout == pb.PROMPT_LAYOUT_UNSPECIFIED


def test_ingest_reads_standard_input(openbook: Callable[..., Result], fake: FakeServer) -> None:
    done = openbook("ingest", "-", stdin=DOCUMENT.encode())
    assert done.exit_code == 0
    assert fake.service.documents == [DOCUMENT.encode()]


def test_ask_streams_the_answer(openbook: Callable[..., Result], context_id: str) -> None:
    done = openbook("ask", context_id, "Who?")
    assert (done.exit_code, done.stdout) == (0, "The keeper's daughter.\n")
    assert done.stderr == ""


def test_ask_prints_the_receipt_beside_the_answer(
    openbook: Callable[..., Result], context_id: str
) -> None:
    done = openbook("ask", context_id, "Who?", "--receipt")
    assert done.stdout == "The keeper's daughter.\n"
    assert re.search(r"^tokens_prefilled +9$", done.stderr, re.MULTILINE)
    assert re.search(r"^keys_scored +0\.25$", done.stderr, re.MULTILINE)
    assert re.search(r"^finish_reason +stop$", done.stderr, re.MULTILINE)


def test_ask_prints_json(openbook: Callable[..., Result], context_id: str) -> None:
    done = openbook("ask", context_id, "Who?", "--json")
    got = json.loads(done.stdout)
    assert got["text"] == "The keeper's daughter."
    assert got["usage"]["context_tokens"] == 7000
    assert got["receipt"]["budget"] == "keys=100"


def test_ask_passes_every_option(
    openbook: Callable[..., Result], fake: FakeServer, context_id: str
) -> None:
    options = "--max-tokens 7 --temperature 0.5 --top-p 0.9 --seed 3 --stop a --stop b "
    options += "--budget 32 --no-estimate --plan scan --answer-prefix It"
    assert openbook("ask", context_id, "Who?", *options.split()).exit_code == 0
    assert openbook("ask", context_id, "Who?", "--budget", "exact").exit_code == 0
    keys, exact = fake.service.asked
    assert keys == pb.AskRequest(
        context=f"contexts/{context_id}",
        question="Who?",
        answer_prefix="It",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["a", "b"],
        budget=pb.Budget(keys=pb.Budget.Keys(count=32)),
        estimate=False,
        plan=pb.PLAN_SCAN,
    )
    assert exact.budget.HasField("exact")
    assert not exact.HasField("max_tokens")


def test_contexts_are_listed_shown_and_deleted(
    openbook: Callable[..., Result], document: str
) -> None:
    context_id = openbook("ingest", document).stdout.strip()
    header, row = openbook("contexts", "list").stdout.splitlines()
    assert header.split("\t")[:3] == ["id", "layout", "state"]
    assert row.split("\t")[:5] == [context_id, "chat", "active", "7000", "200000000"]
    shown = openbook("contexts", "show", context_id).stdout
    assert re.search(r"^tokens +7000$", shown, re.MULTILINE)
    assert re.search(r"^expires +never$", shown, re.MULTILINE)
    assert json.loads(openbook("contexts", "show", context_id, "--json").stdout)["id"] == context_id
    assert json.loads(openbook("contexts", "list", "--json").stdout)["token_count"] == 7000
    assert openbook("contexts", "delete", context_id).exit_code == 0
    assert openbook("contexts", "list").stdout.splitlines() == [header]


def test_service_error_is_one_line_and_exit_1(
    openbook: Callable[..., Result], fake: FakeServer
) -> None:
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, "CONTEXT_UNKNOWN", "there is no\nsuch context")
    for verb in (["ask", ID, "Who?"], ["contexts", "show", ID], ["contexts", "delete", ID]):
        method = {"ask": "Ask", "show": "GetContext", "delete": "DeleteContext"}
        fake.service.refuse(method[verb[0] if verb[0] == "ask" else verb[1]], refusal)
        done = openbook(*verb)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == "openbook: there is no such context\n"


def test_nobody_there_is_one_line_that_helps() -> None:
    done = CliRunner().invoke(cli_verbs.app, ["contexts", "list", "--server", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr.startswith("openbook: no server answers at 127.0.0.1:1; start one")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ingest", "/missing.txt"], "No such file or directory: /missing.txt"),
        (["ask", ID, "Who?", "--budget", "some"], "--budget is 'exact' or a number of keys"),
        (["ask", ID, "Who?", "--timeout", "0"], "timeout is 0.0"),
        (["ask", ID, "Who?", "--timeout", "inf"], "timeout is inf; it must be"),
        (["ask", ID, "Who?", "--max-tokens", "2147483648"], "max_tokens is 2147483648"),
        (["ask", ID], "Missing argument 'QUESTION'"),
        (["ask", ID, "Who?", "--plan", "flat"], "--plan"),
        (["ask", "nosuchid", "Who?"], "openbook: 'nosuchid' is not a context id (32 hexa"),
        (["contexts", "delete", "nosuchid"], "openbook: 'nosuchid' is not a context id"),
        (["contexts", "list", "--server", ""], "openbook: the server's address is empty"),
        (["read"], "No such command"),
    ],
)
def test_wrong_usage_is_exit_2(
    arguments: list[str], said: str, openbook: Callable[..., Result], fake: FakeServer
) -> None:
    done = openbook(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert fake.service.calls == []


def test_no_text_of_the_user_is_in_an_error(
    openbook: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"a canary caf\xe9")
    done = openbook("ingest", str(path))
    assert done.exit_code == 2
    assert done.stderr == "openbook: the document is not UTF-8 at byte offset 12\n"
    done = openbook("ask", ID, "a canary " + "x" * 2_000_000)
    assert done.exit_code == 2
    assert "canary" not in done.stderr and done.stderr.count("\n") == 1


def test_error_mid_answer_is_exit_1(
    openbook: Callable[..., Result], fake: FakeServer, context_id: str
) -> None:
    fake.service.refusals_mid_answer = [
        Refusal(grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT", "layer 3 is damaged")
    ]
    done = openbook("ask", context_id, "Who?")
    assert done.exit_code == 1
    assert done.stderr == "openbook: layer 3 is damaged\n"


def test_token_comes_from_the_environment(fake: FakeServer) -> None:
    environment = {"OPENBOOK_SERVER": fake.address, "OPENBOOK_TOKEN": "t0ken"}
    assert CliRunner().invoke(cli_verbs.app, ["contexts", "list"], env=environment).exit_code == 0
    assert fake.service.headers[0]["authorization"] == "Bearer t0ken"


def test_module_runs_as_a_program(fake: FakeServer, context_id: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openbook.client.cli", "ask", context_id, "Who?"],
        env=os.environ | {"OPENBOOK_SERVER": fake.address},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "The keeper's daughter.\n")


def test_piece_is_printed_as_it_arrives_and_interrupt_cancels(
    fake: FakeServer, context_id: str
) -> None:
    fake.service.hold_answer_after = 1
    with subprocess.Popen(
        [sys.executable, "-m", "openbook.client.cli", "ask", context_id, "Who?"],
        env=os.environ | {"OPENBOOK_SERVER": fake.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"The "
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"openbook: interrupted\n"
    assert fake.service.answer_ended.wait(timeout=10)


def test_interrupted_ingest_says_what_goes_on_and_what_stops_it(
    fake: FakeServer, document: str
) -> None:
    fake.service.is_watch_held = True
    with subprocess.Popen(
        [sys.executable, "-m", "openbook.client.cli", "ingest", document],
        env=os.environ | {"OPENBOOK_SERVER": fake.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        said = process.stderr.readline()
        assert re.fullmatch(r"being read as [0-9a-f]{32}\n", said)
        assert process.stderr.readline() == "queued 0/3 layers\n"  # it is watching
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        context_id = said.split()[-1]
        assert process.stderr.read().splitlines()[-1] == (
            f"openbook: still being read as {context_id}; "
            f"`openbook contexts delete {context_id}` stops it"
        )
        assert process.stdout.read() == ""
    assert [f"contexts/{context_id}"] == list(fake.service.contexts)


def test_empty_document_is_refused_before_any_call(
    openbook: Callable[..., Result], fake: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    done = openbook("ingest", str(tmp_path / "empty.txt"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "openbook: the document is empty, or whitespace alone\n"
    assert fake.service.calls == []


def test_version_is_printed() -> None:
    done = CliRunner().invoke(cli_verbs.app, ["--version"])
    assert done.exit_code == 0
    assert re.match(r"openbook[ ,]", done.stdout)


def test_client_imports_nothing_of_the_server() -> None:
    code = (
        "import sys; import openbook.client.cli; "
        "assert not {'grpc', 'typer', 'rich'} & set(sys.modules); "  # Ctrl-C comes meanwhile
        "from openbook.client import *; import openbook.client.cli_verbs; "
        "heavy = {'torch', 'transformers', 'lmdb', 'redis', 'numpy', 'pydantic'}; "
        "assert openbook.client.errors.NotFound and 'Client' in dir(openbook.client); "
        "ours = {name for name in sys.modules if name.startswith('openbook.')}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "assert {name.split('.')[1] for name in ours} == {'client', 'v1'}, ours"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def with_verb(monkeypatch: pytest.MonkeyPatch, value: str) -> typer.Typer:
    """Return an app whose group of server verbs has one entry, `serve`."""
    entry = importlib.metadata.EntryPoint("serve", value, cli_verbs.COMMANDS_GROUP)
    monkeypatch.setattr(cli_verbs, "entry_points", lambda group: [entry])
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    cli_verbs.add_server_verbs(app)
    return app


def test_server_verb_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(
        "def serve(role: str = 'all', port: int = 1, names: list[str] = []) -> None:\n"
        "    print(role, port + 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = with_verb(monkeypatch, "served:serve")
    assert "Start the server." in CliRunner().invoke(app, ["--help"]).stdout
    assert "served" not in sys.modules
    done = CliRunner().invoke(app, ["serve", "--role", "gateway", "--port=7"])
    assert (done.exit_code, done.stdout) == (0, "gateway 8\n")
    assert "--role" in CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert CliRunner().invoke(app, ["serve", "--port", "x"]).exit_code == 2
    del sys.modules["served"]


def test_server_verb_without_the_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = with_verb(monkeypatch, "not_installed_at_all.commands:serve")
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    done = CliRunner().invoke(app, ["serve", "--data", "x"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pip install '.[server]' in a clone" in done.stderr
    assert done.stderr.count("\n") == 1


def test_server_verb_without_its_libraries_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_served.py").write_text(
        "def serve() -> None:\n    import not_installed_either\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(with_verb(monkeypatch, "half_served:serve"), ["serve"])
    assert done.exit_code == 2
    assert "(not_installed_either is not installed)" in done.stderr
    del sys.modules["half_served"]
