"""The load programs in Java and Go: how they are built and started.

A program takes an address, a topic, a kind of load and name=value pairs. It warms up, prints
"begin" and "end" at the bounds of what it measures, and then one line of JSON. A program that does
the same can be used for any peer: see `Peer.command`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.compat import go_program, maven

from benchmarks.kafka_server import SERVER_JARS, jars

HERE = Path(__file__).parent
JAVA_DIR = HERE / "java"
NATS_DIR = HERE / "nats"
CLIENT_JVM = ("-Xms1g", "-Xmx1g", "-XX:+UseParallelGC")
CLIENT_VERSION = maven.V5_4
"""RocketMQ's Java client, for all brokers that speak its protocol."""


def missing_tools() -> list[str]:
    """The programs that a peer needs and this machine lacks."""
    found = maven.missing_tools()
    return [*found, *(tool for tool in ("javac", "go") if shutil.which(tool) is None)]


@functools.cache
def kafka_jars() -> tuple[str, ...]:
    return tuple(jars(*SERVER_JARS))


def rocket_program() -> tuple[list[str], dict[str, str]]:
    """The loads for RocketMQ's protocol: command line and environment."""
    libraries = maven.classpath(CLIENT_VERSION)
    home = go_program.cache_root() / "home"
    home.mkdir(parents=True, exist_ok=True)
    flags = (
        f"-Duser.home={home}",
        f"-Drmq.logback.configurationFile={maven.JAVA_DIR / 'logback.xml'}",
    )
    return _java("RocketLoad", libraries, flags)


def kafka_program() -> tuple[list[str], dict[str, str]]:
    """The loads for Kafka."""
    level = ("-Dorg.apache.logging.log4j.level=ERROR",)
    return _java("KafkaLoad", os.pathsep.join(kafka_jars()), level)


def nats_version() -> str:
    """The version of the NATS server that go.mod names."""
    words = (NATS_DIR / "go.mod").read_text().split()
    return words[words.index("github.com/nats-io/nats-server/v2") + 1].removeprefix("v")


def nats_binary() -> str:
    """The NATS server and the loads for it."""
    return str(go_program.program(NATS_DIR, "nats"))


def _java(
    main_class: str, libraries: str, flags: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    classes = _compile(main_class, libraries)
    kept = {k: v for k, v in os.environ.items() if k not in ("NAMESRV_ADDR", "JAVA_TOOL_OPTIONS")}
    environment = {**kept, "CLASSPATH": os.pathsep.join([str(classes), libraries])}
    return ["java", *CLIENT_JVM, *flags, main_class], environment


@functools.cache
def _compile(main_class: str, libraries: str) -> Path:
    """The directory with the classes of a program; kept in the user's cache directory."""
    shared = [file for file in sorted(JAVA_DIR.glob("*.java")) if not file.stem.endswith("Load")]
    sources = [*shared, JAVA_DIR / f"{main_class}.java"]
    digest = hashlib.sha256(libraries.encode())
    for file in sources:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    classes = go_program.cache_root() / main_class / digest.hexdigest()[:16]
    if not classes.exists():
        unfinished = classes.with_suffix(".new")
        command = ["javac", "--release", "17", "-d", str(unfinished), "-cp", libraries]
        done = subprocess.run(
            [*command, *map(str, sources)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"javac could not compile {main_class}:\n{done.stderr[-4000:]}")
        unfinished.rename(classes)
    return classes
