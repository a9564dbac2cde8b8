"""The extension modules alone; everything else is in pyproject.toml."""

import numpy
from setuptools import Extension, setup

COMPILE_ARGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]

setup(
    ext_modules=[
        Extension(
            f"openbook.indexstore.{name}",
            [f"indexstore/openbook/indexstore/{name}.pyx"],
            depends=["indexstore/openbook/indexstore/kernels.h"],
            include_dirs=["indexstore/openbook/indexstore", numpy.get_include()],
            extra_compile_args=COMPILE_ARGS,
        )
        for name in ("_attend", "_build")
    ],
)
