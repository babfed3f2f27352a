"""Builds programs in Go for the tests.

A binary is kept in the user's cache directory (``penstock-compat/<name>/<hash of the sources>``),
so only the first run after a change needs the compiler, and only the first run of all needs the
network.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path


def go_missing() -> bool:
    """Whether this machine has no Go."""
    return shutil.which("go") is None


@functools.cache
def program(source: Path, name: str) -> Path:
    """The program of a directory with a Go module; builds it where needed."""
    root = cache_root() / source.name
    root.mkdir(parents=True, exist_ok=True)
    binary = root / _source_hash(source) / name
    # Two test runs may want the same build; the second waits and finds it done.
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _build(source, binary)
    return binary


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock-compat"


def _source_hash(source: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(f for f in source.iterdir() if f.is_file()):
        digest.update(file.name.encode() + b"\0")
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _build(source: Path, binary: Path) -> None:
    for old in binary.parent.parent.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    # Moved into its place when done, so that its presence means the build is whole.
    unfinished = binary.with_suffix(".new")
    command = ["go", "build", "-mod=readonly", "-o", str(unfinished), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"go could not build {source.name}:\n{done.stderr[-4000:]}")
    unfinished.rename(binary)
