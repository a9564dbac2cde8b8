"""The extension modules alone; everything else is in pyproject.toml."""

from glob import glob

import numpy
from setuptools import Extension, setup

KERNELS = "indexstore/openbook/indexstore"
COMPILE_ARGS = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math"]
COMPILE_ARGS += ["-Wno-psabi", "-Wno-unused-function"]  # no module uses all of kernels.h
ROUNDED = ["-ffp-contract=off"]  # which ids a search finds is not the instruction set's to say
DIRECTIVES = {
    "autotestdict": False,  # no __test__, which the stubs would have to declare
    "boundscheck": False,
    "cdivision": True,
    "initializedcheck": False,
    "wraparound": False,
}


def kernel(name: str) -> Extension:
    """Describe one Cython module."""
    extension = Extension(
        f"openbook.indexstore.{name}",
        [f"{KERNELS}/{name}.pyx"],
        # Any header may be included by any module.
        depends=[*glob(f"{KERNELS}/*.h"), *glob(f"{KERNELS}/*.pxd")],
        include_dirs=["indexstore", KERNELS, numpy.get_include()],  # Cython looks there as well
        extra_compile_args=COMPILE_ARGS
        + (ROUNDED if name in ("_search", "_probe", "_layer", "_build") else []),
    )
    extension.cython_directives = DIRECTIVES  # read by Cython's build_ext
    return extension


NAMES = ("_attend", "_build", "_guard", "_head", "_layer", "_probe", "_search")
setup(ext_modules=[kernel(name) for name in NAMES])
