"""Builds the compiled kernel; everything else about the package is in pyproject.toml.

COMPILED is the one list of compiled modules. Each `x.py` runs alone; `x.pxd` beside it gives the
compiler the types. Switches:

* `PENSTOCK_PURE=1` skips compiling.
* `PENSTOCK_REQUIRE_COMPILED=1` makes a failed compile fatal (release wheels).

Without either, a missing compiler is a warning: Penstock then runs uncompiled, and says so.
"""

import os

from setuptools import Extension, setup

COMPILED = (
    "wire/fields",
    "wire/jsonheader",
    "wire/frame",
    "wire/output",
    "wire/record",
    "store/segment",
    "store/commitlog",
    "store/consumequeue",
    "store/index",
    "store/flusher",
    "store/put",
    "store/get",
    "store/replay",
    "broker/send",
    "net/turn",
)

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,  # the kernel checks bounds itself, once, before it takes memory
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "annotation_typing": False,  # annotations are for people and mypy; the .pxd types the kernel
    "embedsignature": True,
}


def extensions():
    if os.environ.get("PENSTOCK_PURE") == "1":
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        if os.environ.get("PENSTOCK_REQUIRE_COMPILED") == "1":
            raise
        return []
    optional = os.environ.get("PENSTOCK_REQUIRE_COMPILED") != "1"
    modules = [
        Extension(
            "penstock." + name.replace("/", "."),
            [f"src/penstock/{name}.py"],
            optional=optional,
            extra_compile_args=["-O3", "-fno-semantic-interposition", "-Wno-unused-function"],
        )
        for name in COMPILED
        if os.path.exists(f"src/penstock/{name}.py")
    ]
    return cythonize(
        modules,
        include_path=["src"],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
        quiet=True,
    )


setup(ext_modules=extensions())
