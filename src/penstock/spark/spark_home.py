"""Homes of our own for Java and Spark: directories of links in the user's cache, made once.

Spark's Python workers import pyspark from a zip of sources that its home has, and each of the four
or five that a session starts compiles it anew, most of a second each. On a single machine they can
as well import what is installed, so a session there gets a home without that zip.
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

_PYTHON: Final = "python"
"""The directory of Spark's home that has the zip."""


def spark_home() -> Path | None:
    """A home of Spark's in which Python workers find pyspark where it is installed.

    None where that is not among this Python's packages, or somebody has chosen a home.
    """
    import pyspark

    package = Path(pyspark.__file__).resolve().parent
    if "SPARK_HOME" in os.environ or package.parent not in _packages():
        return None

    def fill(home: Path) -> None:
        link_all(package, home, but=_PYTHON)

    def is_whole(home: Path) -> bool:
        return (home / "jars").resolve() == package / "jars"

    return made_home("spark", f"{package} {pyspark.__version__}", fill, is_whole)


def _packages() -> list[Path]:
    """Where every process of this Python looks for packages."""
    places = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    return [Path(place).resolve() for place in places]


def link_all(source: Path, home: Path, *, but: str) -> None:
    """Links to all that is in a directory, except one entry."""
    for entry in source.iterdir():
        if entry.name != but:
            (home / entry.name).symlink_to(entry)


def made_home(
    kind: str, identity: str, fill: Callable[[Path], None], is_whole: Callable[[Path], bool]
) -> Path:
    """The directory that `fill` has filled, now or before; a temporary one if there is no cache."""
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    try:
        return _make(cache(kind) / name, fill, is_whole)
    except (OSError, RuntimeError):  # a home directory that is unknown, full or read-only
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{kind}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _make(folder / name, fill, is_whole)


def cache(kind: str) -> Path:
    """Where homes of a kind lie."""
    place = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(place) if os.path.isabs(place) else Path.home() / ".cache"
    return root / "penstock" / kind


def _make(home: Path, fill: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    if is_whole(home):
        return home
    home.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=home.parent))
    try:
        fill(draft)
        _put_in_place(draft, home, is_whole)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return home


def _put_in_place(draft: Path, home: Path, is_whole: Callable[[Path], bool]) -> None:
    """Another process may make the same home at the same time: whoever is first wins."""
    try:
        draft.rename(home)
    except OSError:
        if is_whole(home):
            return
        # What lies there is a damaged home: it makes room, and only then the draft goes in.
        aside = Path(tempfile.mkdtemp(prefix="old-", dir=home.parent))
        home.rename(aside / home.name)
        shutil.rmtree(aside, ignore_errors=True)
        draft.rename(home)
