"""Builds the compiled core; everything else about the package is in pyproject.toml.

COMPILED lists the compiled modules. Each `x.py` also runs uncompiled; `x.pxd` beside it gives the C
types. Environment variables:

* `PENSTOCK_PURE=1` skips compiling.
* `PENSTOCK_REQUIRE_COMPILED=1` makes a missing compiler fatal (release wheels).

Without either, a missing compiler is a warning: Penstock then runs uncompiled, and says so.
"""

import os
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools._distutils.ccompiler import new_compiler
from setuptools._distutils.sysconfig import customize_compiler

COMPILED = (
    "wire/fields",
    "wire/json_header",
    "wire/frame",
    "wire/output",
    "wire/record",
    "store/segment",
    "store/commitlog",
    "store/consumequeue/consumequeue",
    "store/consumequeue/queue_table",
    "store/index",
    "store/flusher",
    "store/put",
    "store/received/received_log",
    "store/get",
    "store/recovery/log_replay",
    "store/tools/log_scan",
    "store/tools/index_scan",
    "broker/send",
    "broker/flow_counters",
    "broker/consumers/consumer_targets",
    "broker/consumers/offset_commits",
    "broker/pull/pull_targets",
    "broker/pull/pull_handler",
    "transport/pending_calls",
    "client/producer/send_codec",
    "client/producer/fast_path",
    "server/request_loop",
    "client/received_message",
    "cli/bench/histogram",
    "cli/bench/pipelined/load_recorder",
    "cli/bench/pipelined/request_window",
    "cli/bench/pipelined/send_window",
    "cli/bench/pipelined/pull_window",
    "client/consumer/unfinished_messages",
    "client/consumer/dispatch/message_runs",
    "arrow/columns/record_view",
    "arrow/columns/record_chunk",
    "arrow/columns/arrays",
    "arrow/columns/record_batch",
    "arrow/columns/column_builder",
)

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,  # the code checks lengths once, before it reads or writes
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "annotation_typing": False,  # annotations are for readers and mypy; the .pxd has the C types
    "embedsignature": True,
}


FLAGS = ("-O3", "-g0", "-fno-semantic-interposition", "-Wno-unused-function")
SHARED = "penstock._cyutility"
"""Cython's own helpers, compiled once instead of into every module."""


def can_compile() -> bool:
    """Whether there is a C compiler with Python's headers."""
    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        try:
            include = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
            compiler.compile([str(source)], output_dir=folder, include_dirs=include)
        except Exception as error:
            print(
                f"penstock: no C compiler ({error}); the core will run uncompiled, which is slower"
            )
            return False
    return True


def extensions() -> list[Extension]:
    required = os.environ.get("PENSTOCK_REQUIRE_COMPILED") == "1"
    if os.environ.get("PENSTOCK_PURE") == "1" or not (required or can_compile()):
        return []
    from Cython.Build import cythonize

    modules = [Extension(SHARED, sources=[])]
    modules += [
        Extension(
            "penstock." + name.replace("/", "."),
            [f"src/penstock/{name}.py"],
            extra_compile_args=[*FLAGS],
        )
        for name in COMPILED
    ]
    built = cythonize(
        modules,
        include_path=["src"],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=SHARED,
        quiet=True,
    )
    return list(built)


setup(ext_modules=extensions())
