"""On a processor without AVX the kernels give the same answers.

The modules are compiled without the clones for newer processors and put in the place of the usual
ones in a process of their own, where their tests are run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("_attend", "_build", "_layer", "_probe", "_search")
PLUGIN = """
import importlib.machinery, importlib.util, sys
import openbook.indexstore

for name in {names!r}:
    path = {folder!r} + "/" + name + {suffix!r}
    whole = "openbook.indexstore." + name
    spec = importlib.util.spec_from_file_location(whole, path)
    sys.modules[whole] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(openbook.indexstore, name, module)


def pytest_report_header():
    return "portable: " + " ".join(
        sys.modules["openbook.indexstore." + name].__file__ for name in {names!r}
    )
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_avx_the_kernels_pass_their_tests(tmp_path: Path) -> None:
    # Outside Linux kernels.h has no clones: what is left is what any x86-64 runs.
    environment = {**os.environ, "CFLAGS": "-U__linux__ -Ulinux", "PYTHONPATH": str(tmp_path)}
    build = ["setup.py", "--quiet", "build_ext", "--force", "--build-lib", str(tmp_path / "lib"),
             "--build-temp", str(tmp_path / "temp")]  # fmt: skip
    subprocess.run([sys.executable, *build], cwd=ROOT, env=environment, check=True, timeout=600)
    folder = tmp_path / "lib" / "openbook" / "indexstore"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in NAMES:
        code = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(folder / (name + suffix))],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        assert "%xmm" in code and "%ymm" not in code and "%zmm" not in code, name
    plugin = PLUGIN.format(names=NAMES, folder=str(folder), suffix=suffix)
    (tmp_path / "portable_kernels.py").write_text(plugin)
    tests = [f"tests/indexstore/test_{name}.py" for name in ("attend", "build", "codes", "dtypes")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "portable_kernels", "-m", "not slow", *tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert run.stdout.count(str(folder)) >= len(NAMES)
