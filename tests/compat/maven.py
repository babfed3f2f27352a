"""Builds and runs the Java programs of tests/compat/java, once per RocketMQ version.

Compiled classes and the resolved class path are kept in the user's cache directory
(``penstock-compat/<version>/<hash of pom and sources>``), so only the first run after a change
needs Maven, and only the first run of all needs the network.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

JAVA_DIR = Path(__file__).parent / "java"
V4_9 = "4.9.8"
V5_4 = "5.4.0"
V5_5 = "5.5.1"
VERSIONS = (V5_4, V5_5, V4_9)
SERVER_VERSIONS = (V5_4, V5_5)
"""The releases whose broker and NameServer are on Maven Central."""

# 5.5.1 has no client, tools and NameServer: those of 5.5.0 belong to it.
_CLIENT_RELEASES = {V5_5: "5.5.0"}

_OLD_BUILD_S = 24 * 3600

# Quick to start and small: these programs live for a second or two on a busy machine.
JVM_FLAGS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xmx512m",
    f"-Drmq.logback.configurationFile={JAVA_DIR / 'logback.xml'}",
)


def missing_tools() -> list[str]:
    """The programs these tests need and this machine lacks."""
    return [tool for tool in ("java", "mvn") if shutil.which(tool) is None]


def maven_available() -> bool:
    """Whether Java and Maven can be run here."""
    return not missing_tools()


@functools.cache
def classpath(version: str = V5_4) -> str:
    """The class path of our programs and RocketMQ `version`; builds them where needed."""
    root = _cache_root() / version
    root.mkdir(parents=True, exist_ok=True)
    build = root / _source_hash()
    # Two test runs may want the same build; the second waits and finds it done.
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jars = _cached_jars(build)
        if jars is None:
            jars = _build(version, build)
    return os.pathsep.join([str(build / "classes"), *jars])


def java_command(main_class: str, *args: str, jvm: Sequence[str] = JVM_FLAGS) -> list[str]:
    """The command line for a main class, to be run in java_environment."""
    return ["java", *jvm, main_class, *args]


def java_environment(version: str = V5_4) -> dict[str, str]:
    """The environment with RocketMQ `version` and our programs on the class path."""
    # Settings of a RocketMQ user on this machine must not reach the tests.
    kept = {k: v for k, v in os.environ.items() if k not in ("NAMESRV_ADDR", "JAVA_TOOL_OPTIONS")}
    return {**kept, "CLASSPATH": classpath(version)}


def run_java(
    version: str,
    main_class: str,
    *args: str,
    input: str | None = None,
    timeout: float = 60.0,
) -> str:
    """Run a program to its end and return what it printed.

    Raises RuntimeError with the program's error output if it fails, subprocess.TimeoutExpired if
    it takes longer than `timeout` seconds.
    """
    # RocketMQ's clients write logs and offsets below their home; not below the real one.
    home = _cache_root() / "home"
    home.mkdir(parents=True, exist_ok=True)
    flags = (f"-Duser.home={home}", f"-Drocketmq.home.dir={home}", "-Duser.timezone=UTC")
    command = java_command(main_class, *args, jvm=(*JVM_FLAGS, *flags))
    done = subprocess.run(
        command,
        input=input or "",
        env=java_environment(version),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{main_class} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock-compat"


def _source_hash() -> str:
    digest = hashlib.sha256()
    sources = (JAVA_DIR / "src").rglob("*")
    for file in [JAVA_DIR / "pom.xml", *sorted(f for f in sources if f.is_file())]:
        digest.update(file.relative_to(JAVA_DIR).as_posix().encode() + b"\0")
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cached_jars(build: Path) -> list[str] | None:
    """The jars of a finished build, or None if there is none or Maven's repository was emptied."""
    try:
        jars = (build / "classpath.txt").read_text().strip().split(os.pathsep)
    except FileNotFoundError:
        return None
    return jars if all(Path(jar).exists() for jar in jars) else None


def _build(version: str, build: Path) -> list[str]:
    for old in build.parent.iterdir():
        # A JVM of another test run may still load classes from a young one.
        if old.is_dir() and time.time() - old.stat().st_mtime > _OLD_BUILD_S:
            shutil.rmtree(old)
    shutil.rmtree(build, ignore_errors=True)
    goals = ["compile", "dependency:build-classpath"]
    properties = [
        f"-Drocketmq.version={_CLIENT_RELEASES.get(version, version)}",
        f"-Drocketmq.broker.version={version}",
        f"-DbuildDirectory={build}",
    ]
    # Written last by Maven, so that its presence means the build is whole.
    properties.append(f"-Dmdep.outputFile={build / 'classpath.txt'}")
    if version not in SERVER_VERSIONS:
        properties.append("-DclientOnly")
    for mode in (["-o"], []):
        command = ["mvn", "-q", "-B", *mode, *properties, *goals]
        done = subprocess.run(command, cwd=JAVA_DIR, capture_output=True, text=True, check=False)
        jars = _cached_jars(build)
        if done.returncode == 0 and jars is not None:
            return jars
    raise RuntimeError(f"Maven could not build for RocketMQ {version}:\n{done.stdout[-4000:]}")
