"""The house rules hold for every file of the repository, and every rule can fail.

Owns where each rule applies and the counterexamples it must reject; scripts/tidy.py looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest
import tidy
from tidy import Source


@dataclass(frozen=True)
class Rule:
    """A claim about every file that `applies` picks, and counterexamples of it."""

    claim: str
    applies: Callable[[Source], bool]
    check: tidy.Check
    rejects: tuple[tuple[str, str], ...]


INDEXSTORE, WORKER, SERVER, CLIENT = (
    f"{name}/openbook/{name}/x.py" for name in ("indexstore", "worker", "server", "client")
)
LONG_BODY = "    pass\n" * tidy.FUNCTION_LINES_MAX
RULES = (
    Rule(
        "files are short",
        tidy.is_code,
        tidy.check_file_lines,
        ((WORKER, "\n" * (tidy.LINES_MAX + 1)),),
    ),
    Rule(
        "lines are short",
        tidy.is_code,
        tidy.check_columns,
        ((WORKER, "#" * (tidy.COLUMNS_MAX + 1)),),
    ),
    Rule(
        "functions are short",
        tidy.is_code,
        tidy.check_function_lines,
        (
            (WORKER, f"async def f():\n{LONG_BODY}"),
            ("indexstore/x.pyx", f"cdef int f(\n    int a,\n) noexcept nogil:\n{LONG_BODY}"),
            ("indexstore/x.h", "static int f(int a) {\n" + "    a++;\n" * 70 + "}\n"),
        ),
    ),
    Rule(
        "functions take at most five positional parameters",
        tidy.is_run,
        tidy.check_positional,
        ((WORKER, "class A:\n    def f(self, a, b, c, d, e, f): ..."),),
    ),
    Rule(
        "imports point one way",
        lambda source: source.component in tidy.PACKAGES and tidy.is_code(source),
        tidy.check_imports,
        (
            ("proto/openbook/v1/x.py", "from openbook import client"),
            (INDEXSTORE, "import torch"),
            (INDEXSTORE, "def f():\n    from openbook.worker import load_model"),
            ("indexstore/openbook/indexstore/x.pyx", "cimport scipy.linalg"),
            (WORKER, "import grpc.aio"),
            (WORKER, "from openbook.v1 import contexts_pb2"),
            (SERVER, "import torch"),
            (SERVER, "from importlib import import_module\nimport_module('transformers')"),
            (SERVER, "from openbook.worker.engine import Engine"),
            (SERVER, "import openbook.worker.engine"),
            (SERVER, "from openbook.client import Client"),
            (CLIENT, "from openbook.indexstore import head"),
            (CLIENT, "import numpy"),
        ),
    ),
    Rule(
        "openbook is a namespace without an init",
        tidy.is_code,
        tidy.check_namespace,
        (("client/openbook/__init__.py", ""),),
    ),
    Rule(
        "names say what they hold",
        tidy.is_code,
        tidy.check_vague_names,
        (
            ("worker/openbook/worker/tensor_utils.py", ""),
            ("worker/openbook/common/x.py", ""),
            (WORKER, "class LeaseManager: ..."),
        ),
    ),
    Rule(
        "modules open with a docstring",
        tidy.is_run,
        tidy.check_module_docstring,
        ((WORKER, "x = 1"),),
    ),
    Rule(
        "public names have a docstring",
        lambda source: source.is_product,
        tidy.check_docstrings,
        (
            (WORKER, "def f(): ..."),
            (WORKER, "class A: ..."),
            (WORKER, "class A:\n    '''A.'''\n    async def f(self): ..."),
        ),
    ),
    Rule(
        "asserts are invariants with a reason, never checks of input",
        lambda source: source.is_product,
        tidy.check_asserts,
        ((WORKER, "def f(a):\n    assert a > 0, 'positive'"), (WORKER, "assert 1 == 1")),
    ),
    Rule(
        "no exception is swallowed unnamed",
        tidy.is_run,
        tidy.check_excepts,
        (
            (WORKER, "try:\n    f()\nexcept:\n    raise"),
            (WORKER, "try:\n    f()\nexcept Exception:\n    pass"),
            (WORKER, "with contextlib.suppress(Exception):\n    f()"),
        ),
    ),
    Rule(
        "nothing a file holds is ever run",
        tidy.is_run,
        tidy.check_dangers,
        (
            (WORKER, "import pickle"),
            (WORKER, "from marshal import loads"),
            (WORKER, "torch.load(path)"),
            (WORKER, "eval('1')"),
            (WORKER, "exec('1')"),
            (WORKER, "yaml.load(text)"),
            (WORKER, "from_pretrained(path, trust_remote_code=True)"),
            (WORKER, "np.load(path, allow_pickle=flag)"),
        ),
    ),
    Rule(
        "unfinished work names its issue",
        tidy.is_code,
        tidy.check_unfinished,
        ((WORKER, "x = 1  # TO" + "DO later"), ("indexstore/x.pyx", "# FIX" + "ME\n")),
    ),
    Rule(
        "modules hold no mutable state",
        lambda source: source.is_product,
        tidy.check_global_state,
        (
            (WORKER, "cache = {}"),
            (WORKER, "_seen: set[int] = set()"),
            (WORKER, "def f():\n    global x\n    x = 1"),
        ),
    ),
    Rule(
        "nothing names another machine's paths or hosts",
        lambda source: True,
        tidy.check_foreign,
        tuple((WORKER, f"# see {word}") for word in tidy.FOREIGN),
    ),
)
SOURCES = tidy.sources()


def test_every_component_is_searched() -> None:
    assert {source.component for source in SOURCES if source.is_product} == set(tidy.PACKAGES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.claim)
def test_source_obeys(rule: Rule) -> None:
    findings = [
        f"{source.path}:{line}: {finding}"
        for source in SOURCES
        if rule.applies(source)
        for line, finding in rule.check(source)
    ]
    assert not findings, "\n".join([f"{rule.claim}:", *findings])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.claim)
def test_rule_rejects_every_counterexample(rule: Rule) -> None:
    for path, text in rule.rejects:
        source = Source(PurePosixPath(path), text)
        assert rule.applies(source), f"{rule.claim}: does not look at {path}"
        assert list(rule.check(source)), f"{rule.claim}: accepts {text!r}"
