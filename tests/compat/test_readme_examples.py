"""What the README shows of Java and mqadmin, as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from . import clients, maven
from .clusters import Cluster
from .java_session import JavaSession

README = Path(__file__).parent.parent.parent / "README.md"
LIMIT_S = 120.0


def block(language: str, part: str) -> str:
    """The first block of this language that contains `part`."""
    pattern = rf"^```{language}\n(.*?)^```$"
    found: list[str] = re.findall(pattern, README.read_text(), re.DOTALL | re.MULTILINE)
    return next(text for text in found if part in text)


@pytest.mark.parametrize("version", maven.VERSIONS)
def test_the_java_example_runs(cluster: Cluster, tmp_path: Path, version: str) -> None:
    source = tmp_path / "Registrations.java"
    text = block("java", "class Registrations")
    source.write_text(text.replace("127.0.0.1:9876", cluster.namesrv))
    flags = (*maven.JVM_FLAGS, f"-Duser.home={tmp_path}")
    done = subprocess.run(
        ["java", *flags, str(source)], env=maven.java_environment(version), capture_output=True,
        text=True, timeout=LIMIT_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "sendStatus=SEND_OK" in done.stdout
    assert 'user-42 {"id": 42}' in done.stdout


def test_the_mqadmin_examples_run(cluster: Cluster, java54: JavaSession) -> None:
    printed = {}
    for line in block("sh", "mqadmin").splitlines():
        tool, command, flag, _, *rest = shlex.split(line)
        assert (tool, flag) == ("mqadmin", "-n")
        printed[command] = clients.mqadmin(java54, cluster.namesrv, command, *rest)
    assert cluster.broker in printed["clusterList"]
    assert "success" in printed["updateTopic"]
    assert "SEND_OK" in printed["sendMessage"]
    assert cluster.broker in printed["topicStatus"]
    assert '{"id": 42}' in printed["consumeMessage"]
