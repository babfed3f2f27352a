"""A machine without Java: Spark runs on the Java of the Python package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.spark.java import examine, java_home
from tests.spark import kit
from tests.spark.standalone import run_job

if TYPE_CHECKING:
    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

TOOLS = ("bash", "sh", "env", "dirname", "ps", "cat", "chmod", "rm")
"""What Spark's scripts and Hadoop call; nearly every machine has these."""


@pytest.fixture
def no_java(tmp_path: Path) -> dict[str, str]:
    """An environment without Java."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    return {"PATH": str(tools), "JAVA_HOME": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_packaged_java_is_found_and_prints_its_version(
    no_java: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in no_java.items():
        monkeypatch.setenv(name, value)
    home = java_home()
    assert home.is_relative_to(no_java["XDG_CACHE_HOME"])
    java = examine(home / "bin" / "java")
    assert java is not None
    assert java.version >= 17


def test_batch_and_stateful_queries_run_without_an_installed_java(
    cluster: Up, fresh: str, no_java: dict[str, str], tmp_path: Path
) -> None:
    topic = kit.create_topic(cluster, fresh, queues=2)
    copy = kit.create_topic(cluster, f"{fresh}-copy", queues=1)
    kit.send_numbers(cluster, topic, 20)
    found = run_job(
        "pipe", environment=no_java, master="local[1]", conf={},
        source=kit.source_options(cluster, topic),
        sink={"nameserver": cluster.address, "topic": copy}, checkpoint=tmp_path / "checkpoint",
    )  # fmt: skip
    assert (found["count"], found["sum"], found["rows"]) == (20, sum(range(20)), 20)
    assert len(kit.read_topic(cluster, copy, 20)) == 20
