"""Our own SPARK_HOME and JAVA_HOME: directories of symbolic links in the user's cache.

Spark's Python workers import pyspark from a zip of sources in SPARK_HOME. Each of the four or five
workers of a session compiles it again, which takes most of a second. On a single machine they can
import the installed package instead, so a session there gets a home without that zip.
"""

import atexit
import hashlib
import os
import shutil
import site
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.user_directories import user_directory

_PYTHON: Final = "python"
"""The directory of SPARK_HOME that holds the zip."""


def spark_home() -> Path | None:
    """A SPARK_HOME with which Python workers import the installed pyspark.

    None if pyspark is not in this Python's site-packages, or SPARK_HOME is set.
    """
    import pyspark

    package = Path(pyspark.__file__).resolve().parent
    if "SPARK_HOME" in os.environ or package.parent not in _packages():
        return None

    def fill(home: Path) -> None:
        link_all(package, home, except_for=_PYTHON)

    def is_complete(home: Path) -> bool:
        return (home / "jars").resolve() == package / "jars"

    return made_home("spark", f"{package} {pyspark.__version__}", fill, is_complete)


def _packages() -> list[Path]:
    """The directories in which every process of this Python looks for packages."""
    places = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    return [Path(place).resolve() for place in places]


def link_all(source: Path, home: Path, *, except_for: str) -> None:
    """Make links to all entries of a directory except one."""
    for entry in source.iterdir():
        if entry.name != except_for:
            (home / entry.name).symlink_to(entry)


def made_home(
    kind: str, identity: str, fill: Callable[[Path], None], is_complete: Callable[[Path], bool]
) -> Path:
    """The directory that `fill` fills unless it exists; a temporary one if there is no cache."""
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    try:
        return _make(cache(kind) / name, fill, is_complete)
    except OSError:  # the home directory is full or read-only
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{kind}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _make(folder / name, fill, is_complete)


def cache(kind: str) -> Path:
    """The cache directory for `java` or `spark`."""
    return user_directory("XDG_CACHE_HOME", ".cache") / "penstock" / kind


def _make(home: Path, fill: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> Path:
    if is_complete(home):
        return home
    home.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=home.parent))
    try:
        fill(draft)
        _put_in_place(draft, home, is_complete)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return home


def _put_in_place(draft: Path, home: Path, is_complete: Callable[[Path], bool]) -> None:
    """Rename the draft; another process may make the same home at the same time and win."""
    try:
        draft.rename(home)
    except OSError:
        if is_complete(home):
            return
        # The existing home is damaged: move it away, then rename the draft.
        aside = Path(tempfile.mkdtemp(prefix="old-", dir=home.parent))
        home.rename(aside / home.name)
        shutil.rmtree(aside, ignore_errors=True)
        draft.rename(home)
