"""The style guide, as a test."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
"""Without comments and blank lines: a comment per field does not make a constructor too long."""
LONG_FILES = {"codes.py", "errors.py", "golden_inputs.py"}  # tables
PACKAGE_MODULES_MAX = 15
BANNED_NAMES = {"utils.py", "helpers.py", "manager.py", "impl.py", "base.py", "common.py"}
SOURCES = sorted(
    path
    for folder in ("src", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "egg-info" not in str(path)
)
MODULES = [path for path in SOURCES if path.is_relative_to(ROOT / "src" / "penstock")]


def compiled_modules() -> list[str]:
    """COMPILED of setup.py, which can't be imported without building."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no COMPILED")


def count_lines(lines: Iterable[str]) -> int:
    """The number of lines that are neither blank nor a comment."""
    stripped = (line.strip() for line in lines)
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; unlike `ast.walk` it skips the expressions, which are most."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file that may be too long, with its number of lines."""
    text = path.read_text()
    lines = text.splitlines()
    if count_lines(lines) <= FUNCTION_LINES_MAX:
        return
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, count_lines(lines[node.lineno - 1 : node.end_lineno])


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
        and path.name not in LONG_FILES
    }
    assert long == {}


@pytest.mark.slow
def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in SOURCES
        if path.name not in LONG_FILES
        for name, lines in functions(path)
        if lines > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_no_file_has_a_meaningless_name() -> None:
    assert [str(p.relative_to(ROOT)) for p in SOURCES if p.name in BANNED_NAMES] == []


def test_a_module_name_occurs_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        if path.name not in ("__init__.py", "__main__.py"):
            found[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.slow
def test_a_class_name_occurs_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_package_has_few_modules() -> None:
    counts = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    large = {
        str(package.relative_to(ROOT)): count
        for package, count in counts.items()
        if count > PACKAGE_MODULES_MAX
    }
    assert large == {}


@pytest.mark.parametrize("name", compiled_modules())
def test_a_compiled_module_has_a_py_and_a_pxd_file(name: str) -> None:
    source = ROOT / "src" / "penstock" / f"{name}.py"
    assert source.exists()
    assert source.with_suffix(".pxd").exists()


def test_a_pxd_file_without_a_compiled_module_has_only_inline_functions() -> None:
    """A .pxd that is not in COMPILED is either empty (a package's) or holds inline C."""
    root = ROOT / "src" / "penstock"
    for path in root.rglob("*.pxd"):
        name = str(path.relative_to(root).with_suffix(""))
        if name in compiled_modules() or path.name == "__init__.pxd":
            continue
        assert "cdef inline" in path.read_text(), f"{name} is missing in setup.py's COMPILED"


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name != "__init__.py" and not path.read_text().startswith('"""')
    ]
    assert silent == []


def test_log_lines_print_no_repr() -> None:
    # Few files have such a text at all; only these are parsed. `{value=}` in an f-string is a repr.
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "src")
        and re.search(r"%r|!r|\brepr\(|=\s*}", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("log.")
        and re.search(r"%r|!r|\brepr\(", ast.unparse(node))
    ]
    assert found == []


def test_no_module_imports_cython() -> None:
    """Uncompiled installs have no Cython."""
    for path in (ROOT / "src").rglob("*.py"):
        assert "import cython" not in path.read_text(), path
