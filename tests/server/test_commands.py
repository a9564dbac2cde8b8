"""`openbook serve` refuses in one line with exit code 2, and shows its flags."""

import os
import socket
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from openbook.server.commands import serve
from openbook.server.directory import open_data_directory
from openbook.server.start import StartRefused


def invoke(*arguments, monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPENBOOK_")]:
        monkeypatch.delenv(name)
    program = typer.Typer()
    program.command()(serve)
    return CliRunner().invoke(program, [str(argument) for argument in arguments])


ANY_PORT = ["--listen", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m"], "--data"),
        (["--data", "DATA"], "--model"),
        (["--data", "DATA", "--model", "m", "--listen", "0.0.0.0:1"], "loopback"),
        (["--data", "DATA", "--model", "m", "--role", "gateway"], "'gateway' is not served yet"),
        (["--data", "DATA", "--model", "m", "--threads", "0"], "--threads"),
        (["--data", "", "--model", "m"], "--data"),
        (["--data", "OPEN", "--model", "m", *ANY_PORT], "open to other users"),
        (["--data", "CLONE", "--model", "m", *ANY_PORT], "choose another"),
        (["--data", "BUSY", "--model", "m", *ANY_PORT], "another server"),
        (["--data", "DATA", "--model", "m", "--listen", "TAKEN"], "in use"),
    ],
)
def test_a_start_that_cannot_be_is_refused_in_one_line(
    data, tmp_path, monkeypatch, arguments, words
):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "clone").mkdir(mode=0o755)
    (tmp_path / "clone" / "README.md").write_text("")
    places = {name: tmp_path / name.lower() for name in ("DATA", "OPEN", "CLONE", "BUSY")}
    with (
        open_data_directory(tmp_path / "busy"),
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        places["TAKEN"] = f"127.0.0.1:{taken.getsockname()[1]}"
        done = invoke(*[places.get(a, a) for a in arguments], monkeypatch=monkeypatch)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("openbook: ") and words in line


def test_a_refused_start_has_loaded_no_model_library(tmp_path):
    (tmp_path / "README.md").write_text("")
    program = (
        "import sys, typer\n"
        "from openbook.server.commands import serve\n"
        "app = typer.Typer(); app.command()(serve)\n"
        "try: app(['--model', 'm', '--listen', '127.0.0.1:0', '--data', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('torch', 'grpc', 'numpy', 'redis') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert "choose another" in done.stderr and "HEAVY []" in done.stdout


def test_a_refusal_of_many_lines_is_told_in_one(monkeypatch, capsys, tmp_path):
    def refuse(*_):
        raise StartRefused("first\n\n  second\t" + "x" * 1000)

    class Left(BaseException):
        pass

    def leave(code):
        raise Left(code)

    monkeypatch.setattr("openbook.server.app.run", refuse)
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(Left) as left:
        serve(data=str(tmp_path / "data"), model="m", listen="127.0.0.1:0")
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.args == (2,)
    assert line.startswith("openbook: first second x") and len(line) <= 310


def test_help_names_every_flag_and_loads_no_model_library():
    program = (
        "import sys, typer\n"
        "from openbook.server.commands import serve\n"
        "app = typer.Typer(); app.command()(serve)\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', 'torch' in sys.modules or 'grpc' in sys.modules)"
    )
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    flags = "role listen data model device dtype rope-scale threads redis-url kv-dtype plan"
    for flag in flags.split():
        assert f"--{flag}" in done.stdout, done.stdout + done.stderr
    assert "HEAVY False" in done.stdout
