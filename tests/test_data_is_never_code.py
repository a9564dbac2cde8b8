"""Nothing that a file, a request or a model holds is ever run as code.

The names of calls and modules that would run it are looked for in the tree of every product file,
whatever they were imported as. The house rule in test_tidy.py covers the scripts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import tidy

MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code",
     "codeop", "runpy", "imp", "commands", "pdb"}
)  # fmt: skip
CALLS = frozenset(
    {"eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "os.system",
     "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load",
     "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.Loader", "yaml.UnsafeLoader",
     "torch.hub.load", "torch.jit.load", "jinja2.Template", "jinja2.Environment",
     "numpy.fromregex", "asyncio.create_subprocess_shell", "pandas.read_pickle"}
)  # fmt: skip
NEVER_TRUE = frozenset({"shell", "trust_remote_code", "allow_pickle"})


def imported(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dangers(text: str) -> Iterator[str]:
    """Yield what in a file could run data."""
    tree = ast.parse(text)
    names = imported(tree)
    for full in names.values():
        if full.partition(".")[0] in MODULES:
            yield f"imports {full}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = tidy.dotted(node).partition(".")
            full = ".".join(filter(None, (names.get(first, first), rest)))
            if full in CALLS:
                yield f"names {full}"
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = tidy.dotted(node.func).partition(".")
        full = ".".join(filter(None, (names.get(first, first), rest)))
        given = {k.arg: k.value for k in node.keywords}
        if full == "torch.load":
            only = given.get("weights_only")
            if not (isinstance(only, ast.Constant) and only.value is True):
                yield "torch.load without weights_only=True"
        for name in NEVER_TRUE & given.keys():
            value = given[name]
            if not (isinstance(value, ast.Constant) and value.value is False):
                yield f"passes {name}"


PRODUCT = [source for source in tidy.sources() if source.is_product]


def test_no_product_file_can_run_data() -> None:
    assert len(PRODUCT) > 80
    found = [f"{s.path}: {danger}" for s in PRODUCT for danger in dangers(s.text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as data",
        "from pickle import loads",
        "from cloudpickle import load as read",
        "eval('1')",
        "run = exec\nrun('1')",
        "compile('1', 'x', 'eval')",
        "import builtins\nbuiltins.eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x', weights_only=flag)",
        "import yaml\nyaml.load('x')",
        "from yaml import unsafe_load as read\nread('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import subprocess\nsubprocess.run('x', shell=flag)",
        "import os\nos.system('x')",
        "from os import popen\npopen('x')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template\nTemplate('x')",
    ],
)
def test_every_danger_is_found(text: str) -> None:
    assert list(dangers(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "import subprocess\nsubprocess.run(['x'])",
        "AutoModel.from_pretrained('x', trust_remote_code=False)",
        "import yaml\nyaml.safe_load('x')",
        "model.eval()",
        "import re\nre.compile('x')",
    ],
)
def test_what_is_harmless_is_let_be(text: str) -> None:
    assert not list(dangers(text))
