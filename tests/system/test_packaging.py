"""The distribution holds every component, its entry points resolve, and `make` is its interface.

Builds from a copy of the tracked files, so that nothing lands in the working tree.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIRS = PYPROJECT["tool"]["setuptools"]["package-dir"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BUILD_OUTPUT = shutil.ignore_patterns("__pycache__", "*.so", "*.c")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that a build reads, in a directory of their own."""
    target = tmp_path / "copy"
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for component in ("proto", "indexstore", "worker", "server", "client"):
        shutil.copytree(ROOT / component, target / component, ignore=BUILD_OUTPUT)
    return target


def setup(copy: Path, *arguments: str) -> None:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, *arguments, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_every_component_root_is_a_package_of_the_distribution() -> None:
    found = {
        f"openbook.{path.name}": path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("*/openbook/*")
        if path.is_dir() and path.parts[-3] != "charts" and path.name != "__pycache__"
    }
    assert found == PACKAGE_DIRS
    assert sorted(found) == sorted(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_package_is_typed_and_the_namespace_is_open() -> None:
    for directory in PACKAGE_DIRS.values():
        assert (ROOT / directory / "__init__.py").is_file(), directory
        assert (ROOT / directory / "py.typed").is_file(), directory
        assert not (ROOT / directory).parent.joinpath("__init__.py").exists(), directory


def test_architecture_names_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])(indexstore|worker|server|client)/(\w+\.\w+)", text))
    missing = [
        f"{component}/{name}"
        for component, name in sorted(named)
        if not (ROOT / component / "openbook" / component / name).is_file()
    ]
    assert len(named) > 20
    assert not missing, missing
    kernels = {path.name for path in (ROOT / "indexstore").rglob("_*.p[yx][xd]")}
    assert kernels <= {name for _, name in named}, "every Cython file has its place"


def test_source_distribution_holds_all_that_a_build_reads(copy: Path) -> None:
    setup(copy, "sdist", "--dist-dir", "out")
    (archive,) = (copy / "out").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    written = {
        path.relative_to(copy).as_posix()
        for directory in PACKAGE_DIRS.values()
        for path in (copy / directory).rglob("*")
        if path.suffix in {".py", ".pyi", ".pyx", ".pxd", ".h", ".proto", ".typed"}
    }
    assert {name for name in written if name.endswith((".pyx", ".h"))}
    assert written <= packed, sorted(written - packed)
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md"} <= packed


def test_built_packages_hold_types_and_wire_format(copy: Path) -> None:
    setup(copy, "build_py", "--build-lib", "out")
    for package in PACKAGE_DIRS:
        assert (copy / "out" / package.replace(".", "/") / "py.typed").is_file(), package
    assert (copy / "out/openbook/v1/contexts.proto").is_file()
    assert (copy / "out/openbook/v1/contexts_pb2.pyi").is_file()
    assert (copy / "out/openbook/indexstore/_attend.pyi").is_file()
    assert not (copy / "out/openbook/__init__.py").exists()


def test_every_entry_point_names_something_callable() -> None:
    project = PYPROJECT["project"]
    declared = project["scripts"] | project["entry-points"]["openbook.commands"]
    for name, value in declared.items():
        entry = importlib.metadata.EntryPoint(name, value, "openbook.commands")
        assert callable(entry.load()), name


def test_client_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "openbook.client.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "ingest" in done.stdout and "ask" in done.stdout


def test_a_clone_in_the_current_directory_is_not_taken_for_the_package(tmp_path: Path) -> None:
    """A clone is called `openbook` too, and holds a `client` without an __init__.py."""
    (tmp_path / "openbook" / "client").mkdir(parents=True)
    command = [sys.executable, "-c", "from openbook.client import Client; print(Client.__name__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "Client\n", done.stderr


def test_client_imports_without_the_servers_libraries() -> None:
    code = "import sys; from openbook.client import *; "  # all of it: it imports what is asked for
    code += "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = set(python(code).split())
    heavy = {"torch", "transformers", "numpy", "lmdb", "redis", "pydantic", "structlog"}
    assert "grpc" in loaded
    assert not loaded & heavy


def test_every_imported_distribution_is_declared() -> None:
    server = PYPROJECT["project"]["optional-dependencies"]["server"]
    declared = {
        re.split(r"[<>=\[]", requirement)[0].lower().replace("-", "_")
        for requirement in PYPROJECT["project"]["dependencies"] + server
    }
    sources = "".join(
        path.read_text(encoding="utf-8")
        for directory in PACKAGE_DIRS.values()
        for path in (ROOT / directory).rglob("*.py")
    )
    imported = set(re.findall(r"^ *(?:import|from) +(\w+)", sources, flags=re.M))
    distributions = importlib.metadata.packages_distributions()
    ours = {"openbook"} | set(sys.stdlib_module_names)
    for module in sorted((imported - ours) & set(distributions)):
        owners = {name.lower().replace("-", "_") for name in distributions[module]}
        assert owners & declared, f"{module} is not declared"


def test_every_declared_distribution_is_imported_or_needed_by_transformers() -> None:
    needed_by_transformers = {"accelerate", "gguf", "jinja2"}  # GGUF files, chat templates
    server = PYPROJECT["project"]["optional-dependencies"]["server"]
    sources = "".join(
        path.read_text(encoding="utf-8")
        for directory in PACKAGE_DIRS.values()
        for path in (ROOT / directory).rglob("*.py")
    )
    sources += (ROOT / "scripts" / "healthcheck.py").read_text(encoding="utf-8")
    imported = set(re.findall(r"^ *(?:import|from) +(\w+)", sources, flags=re.M))
    owners = importlib.metadata.packages_distributions()
    used = {
        name.lower().replace("_", "-") for module in imported for name in owners.get(module, ())
    }
    used |= needed_by_transformers | {"googleapis-common-protos"}  # google.rpc, a namespace
    for requirement in PYPROJECT["project"]["dependencies"] + server:
        name = re.split(r"[<>=\[]", requirement)[0].lower()
        assert name in used, f"{name} is declared and not used"


def test_constraints_pin_only_what_is_required() -> None:
    required = " ".join(sum(PYPROJECT["project"]["optional-dependencies"].values(), []))
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement:
            name, _, version = requirement.partition("==")
            assert version, f"{requirement} is not a pin"
            assert f"{name}>=" in required, f"{name} is not required"


@pytest.mark.parametrize("target", ["build", "proto", "lint", "test", "bench", "demo"])
def test_make_has_the_target_and_it_does_something(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout, "a fresh machine is set up first"
    assert "-c constraints.txt" in done.stdout


def test_continuous_integration_runs_exactly_the_make_targets() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert re.findall(r"^make .*", script, flags=re.M) == ["make lint", "make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_lint_runs_every_checker() -> None:
    recipe = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    for command in ("ruff check", "ruff format --check", "mypy", "buf lint", "git diff"):
        assert command in recipe, command
    assert "stubtest --ignore-disjoint-bases --mypy-config-file pyproject.toml" in recipe


def test_interpreter_finder_refuses_what_cannot_build(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find_python")],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "3.11" in done.stderr and not done.stdout
