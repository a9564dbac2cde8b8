"""Compile the benchmark's own Cython modules, which no user of openbook needs.

Owns bench/out, where they go. They are compiled for this very processor: a rival's loops shall not
be slower than a compiler can make them.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from sysconfig import get_config_var
from types import ModuleType

import numpy as np

BENCH = Path(__file__).resolve().parent
OUT = BENCH / "out"
KERNELS = BENCH.parent / "indexstore" / "openbook" / "indexstore"
COMPILE_ARGS = ["-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-g0"]
COMPILE_ARGS += ["-Wno-psabi", "-Wno-unused-function"]  # no module uses all of kernels.h
DIRECTIVES = {
    "boundscheck": False,
    "cdivision": True,
    "initializedcheck": False,
    "language_level": 3,
    "wraparound": False,
}


def sources_of(name: str) -> list[Path]:
    """Return the benchmark's own files that bench/<name>.pyx is compiled from."""
    return [BENCH / f"{name}.pyx", *sorted(BENCH.glob("*.pxi"))]


def load(name: str) -> ModuleType:
    """Import bench/<name>.pyx, compiled first where the compiled module is missing or older."""
    target = OUT / f"{name}{get_config_var('EXT_SUFFIX')}"
    sources = [*sources_of(name), *KERNELS.glob("*.h"), *KERNELS.glob("*.pxd")]
    newest = max(source.stat().st_mtime for source in sources)
    if not target.exists() or target.stat().st_mtime < newest:
        compile_module(name)
    spec = importlib.util.spec_from_file_location(
        name, target, loader=ExtensionFileLoader(name, str(target))
    )
    assert spec is not None and spec.loader is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_module(name: str) -> None:
    """Compile one module into OUT; raises setuptools' CompileError with the compiler's words."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    OUT.mkdir(exist_ok=True)
    extension = Extension(
        name,
        [str(BENCH / f"{name}.pyx")],
        include_dirs=[str(KERNELS), np.get_include()],
        extra_compile_args=COMPILE_ARGS,
    )
    modules = cythonize(
        [extension],
        build_dir=str(OUT),
        include_path=[str(KERNELS.parent.parent)],
        compiler_directives=DIRECTIVES,
        force=True,
        quiet=True,
    )
    command = build_ext(Distribution({"name": name, "ext_modules": modules}))
    command.build_lib, command.build_temp, command.force = str(OUT), str(OUT), True
    command.ensure_finalized()
    command.run()
