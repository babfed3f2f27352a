"""The wheel: what is in it, and that it works where it was installed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.depth import DEPTH

ROOT = Path(__file__).parents[2]
MODES = ["pure", "compiled"] if DEPTH == "proof" else ["pure"]


@pytest.mark.parametrize("mode", MODES)
def test_the_wheel_works_after_installation(tmp_path: Path, mode: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    env = {**os.environ, "PENSTOCK_PURE": "1" if mode == "pure" else "0"}
    run("-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path), str(source), env=env)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "penstock/py.typed" in names
    assert "penstock/wire/octets.pxd" in names
    assert not [name for name in names if name.endswith(".c")]
    assert any(name.endswith(".so") for name in names) == (mode == "compiled")

    target = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    code = "import penstock; print(penstock.__file__, penstock.compiled())"
    env = {**os.environ, "PYTHONPATH": str(target)}
    env.pop("PENSTOCK_PURE", None)
    assert run("-c", code, env=env).split() == [
        str(target / "penstock" / "__init__.py"), str(mode == "compiled"),
    ]  # fmt: skip
    assert "stat" in run("-m", "penstock.cli.main", "store", "--help", env=env)


def run(*arguments: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout
