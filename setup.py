"""The extension modules alone; everything else is in pyproject.toml."""

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


def kernel(name: str, header: str = "kernels.h") -> Extension:
    """Describe one Cython module; its header is part of what it is rebuilt for."""
    extension = Extension(
        f"openbook.indexstore.{name}",
        [f"{KERNELS}/{name}.pyx"],
        depends=[
            f"{KERNELS}/{name}"
            for name in (
                header,
                "int8.h",
                "codes.h",
                "_head.pxd",
                "_candidates.pxd",
                "_estimate.pxd",
            )
        ],
        include_dirs=["indexstore", KERNELS, numpy.get_include()],  # Cython looks there as well
        extra_compile_args=COMPILE_ARGS
        + (ROUNDED if name in ("_search", "_probe", "_build") else []),
    )
    extension.cython_directives = DIRECTIVES  # read by Cython's build_ext
    return extension


GUARD = kernel("_guard", "guard.h")
setup(ext_modules=[kernel(name) for name in ("_attend", "_build", "_probe", "_search")] + [GUARD])
