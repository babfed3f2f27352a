"""Compiles a small module that cimports C bodies of `penstock.wire`, to test them.

Modules whose `.pxd` has C bodies or constants are never compiled themselves.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

import penstock

BUILD = """
import sys
from Cython.Build import cythonize
from setuptools import Extension, setup
directives = {"language_level": 3, "boundscheck": False, "wraparound": False,
              "initializedcheck": False, "cdivision": True, "annotation_typing": False}
name, sources = sys.argv.pop(), sys.argv.pop()
probe = Extension(name, [name + ".py"], extra_compile_args=["-O2"])
setup(name=name, ext_modules=cythonize(
    [probe], include_path=[sources], compiler_directives=directives, quiet=True))
"""


def compile_probe(folder: Path, name: str, source: str, types: str) -> ModuleType:
    """The compiled module of this source and these C types; skips the test without a compiler."""
    if importlib.util.find_spec("Cython") is None:
        _unavailable("Cython is not installed")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(os.environ.get("CC", compiler).split()[0]) is None:
        _unavailable(f"there is no C compiler ({compiler})")
    (folder / f"{name}.py").write_text(source)
    (folder / f"{name}.pxd").write_text(types)
    (folder / "setup.py").write_text(BUILD)
    sources = str(Path(penstock.__file__).parents[1])
    built = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", sources, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (library,) = folder.glob(f"{name}.*.so")
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _unavailable(why: str) -> None:
    message = f"C bodies are not tested: {why}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
