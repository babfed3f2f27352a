"""Fixtures of the tests with Spark."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from penstock.spark.session import spark_session
from tests.compat.penstock import Up
from tests.depth import DEPTH
from tests.spark.kit import SESSION_CONF

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of every JVM that these tests start.

They live for seconds, in which the optimising compiler and the parallel collector only cost time.
"""
os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {JVM_OPTIONS}".strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the depth `proof`: a test with Spark takes as long as fifty others."""
    if DEPTH == "proof":
        return
    left_out = [item for item in items if item.get_closest_marker("proof") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of this run, two tasks at a time; tests must not stop it."""
    session = spark_session("penstock-tests", master="local[2]", conf=SESSION_CONF)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One NameServer and broker (`cluster.address`) for all tests that do not stop them."""
    with Up(tmp_path_factory.mktemp("cluster")) as up:
        yield up


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """A unique name for the topics and groups of a test."""
    name: str = getattr(request.node, "originalname", request.node.name)
    return f"{name.removeprefix('test_')[:40]}-{uuid.uuid4().hex[:8]}"
