"""Apache Kafka's broker, and jars from Maven Central.

Maven downloads the jars into its own repository.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.compat import apache

SERVER_VERSION = "4.3.1"
SERVER_JARS = (
    f"org.apache.kafka:kafka_2.13:{SERVER_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
)
RESOLVER = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:build-classpath"
PARTITIONS = 8
CLUSTER = "AAAAAAAAAAAAAAAAAAAAAQ"
"""A cluster id: sixteen bytes in base64."""


class CannotRunError(Exception):
    """A requirement of a benchmark is missing; the text names it."""


def jars(*artifacts: str, alone: bool = False) -> list[str]:
    """Paths of Maven artifacts, by default with their dependencies."""
    with tempfile.TemporaryDirectory(prefix="penstock-maven-") as folder:
        found = Path(folder) / "classpath.txt"
        (Path(folder) / "pom.xml").write_bytes(pom(artifacts, alone))
        for mode in (["-o"], []):  # offline first: the network is used only for missing artifacts
            command = ["mvn", "-q", "-B", *mode, f"-Dmdep.outputFile={found}", RESOLVER]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode == 0 and found.exists():
                return found.read_text().strip().split(os.pathsep)
    said = next((line for line in done.stdout.splitlines() if "ERROR" in line), "none")
    raise CannotRunError(
        f"Maven did not find the jars of {', '.join(artifacts)}; its error: {said}"
    )


def pom(artifacts: tuple[str, ...], alone: bool) -> bytes:
    project = ElementTree.Element("project", xmlns="http://maven.apache.org/POM/4.0.0")
    own = {"modelVersion": "4.0.0", "groupId": "io.penstock", "artifactId": "jars", "version": "1"}
    add_texts(project, own | {"packaging": "pom"})
    dependencies = ElementTree.SubElement(project, "dependencies")
    for artifact in artifacts:
        dependency = ElementTree.SubElement(dependencies, "dependency")
        names = ("groupId", "artifactId", "version")
        add_texts(dependency, dict(zip(names, artifact.split(":"), strict=True)))
        if alone:
            exclusions = ElementTree.SubElement(dependency, "exclusions")
            exclusion = ElementTree.SubElement(exclusions, "exclusion")
            add_texts(exclusion, {"groupId": "*", "artifactId": "*"})
    return ElementTree.tostring(project)


def add_texts(element: ElementTree.Element, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        ElementTree.SubElement(element, name).text = text


class KafkaServer(apache.Server):
    """Kafka's broker and controller in one process, with its data in a directory."""

    _main_class = "kafka.Kafka"
    _announcement = "Kafka Server started"
    # As Kafka's start script does.
    jvm = (
        *("-Xms1g", "-Xmx1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
        *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
    )

    def __init__(self, directory: Path, classpath: list[str], **conf: Any) -> None:
        """`conf` are lines of the configuration, with `_` for dots; they override the defaults."""
        port = apache.free_port(above=1)
        once = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        defaults = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{port + 1}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{port + 1}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": directory / "data",
            "num.partitions": PARTITIONS,
            **{f"{topic}.replication.factor": 1 for topic in once},
            **{f"{topic}.min.isr": 1 for topic in once[1:]},
        }
        given = {key.replace("_", "."): value for key, value in conf.items()}
        super().__init__(directory, port, {**defaults, **given}, timeout=120.0)
        self._environment = {**os.environ, "CLASSPATH": os.pathsep.join(classpath)}

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Format the storage by the configuration, then start."""
        flags = ("--ignore-formatted", "-t", CLUSTER, "-c", str(self._conf_file))
        tool = ["java", "kafka.tools.StorageTool", "format", *flags]
        subprocess.run(tool, env=self._environment, check=True, capture_output=True)
        level = "-Dorg.apache.logging.log4j.level=INFO"
        command = ["java", *self.jvm, level, self._main_class, str(self._conf_file)]
        return command, self._environment
