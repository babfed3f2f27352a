"""The style guide, as a test."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80
LONG_FILES = {"codes.py", "golden_inputs.py"}  # tables
BANNED_NAMES = {"utils.py", "helpers.py", "manager.py", "impl.py", "base.py", "common.py"}
SOURCES = sorted(
    path
    for folder in ("src", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "egg-info" not in str(path)
)


def compiled_modules() -> list[str]:
    """COMPILED of setup.py, which can't be imported without building."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no COMPILED")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_fit_one_thought() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
        and path.name not in LONG_FILES
    }
    assert long == {}


def test_functions_fit_a_screen() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": lines
        for path in SOURCES
        if path.name not in LONG_FILES
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_no_file_is_called_after_nothing() -> None:
    assert [str(p.relative_to(ROOT)) for p in SOURCES if p.name in BANNED_NAMES] == []


@pytest.mark.parametrize("name", compiled_modules())
def test_a_compiled_module_has_its_source_and_its_types(name: str) -> None:
    source = ROOT / "src" / "penstock" / f"{name}.py"
    assert source.exists()
    assert source.with_suffix(".pxd").exists()


def test_types_without_a_compiled_module_are_inline_bodies_only() -> None:
    """A .pxd that is not in COMPILED is either empty (a package's) or holds inline C."""
    root = ROOT / "src" / "penstock"
    for path in root.rglob("*.pxd"):
        name = str(path.relative_to(root).with_suffix(""))
        if name in compiled_modules() or path.name == "__init__.pxd":
            continue
        assert "cdef inline" in path.read_text(), f"{name} is missing in setup.py's COMPILED"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_the_kernel_never_imports_cython() -> None:
    """Uncompiled installs have no Cython."""
    for path in (ROOT / "src").rglob("*.py"):
        assert "import cython" not in path.read_text(), path
