"""Programs and libraries of Debian's packages, without installing them."""

import fcntl
import functools
import subprocess
from pathlib import Path

from tests.compat.go_program import cache_root


@functools.cache
def file_of(package: str, pattern: str) -> Path | None:
    """A file of a package; None if this machine can't have it.

    The installed one is used where there is one. Otherwise the package is downloaded with apt-get
    and unpacked into the user's cache directory.
    """
    root = cache_root() / package
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:  # two test runs may want the same package
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _found(Path("/"), pattern) or _found(root, pattern)
        if found is None:
            try:
                _run("apt-get", "-q", "download", package, cwd=root)
                (archive,) = root.glob(f"{package}_*.deb")
                _run("dpkg-deb", "-x", archive.name, ".", cwd=root)
            except (OSError, subprocess.CalledProcessError, ValueError):
                return None
        return found or _found(root, pattern)


def _found(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)
