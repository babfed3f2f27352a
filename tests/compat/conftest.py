"""Fixtures of the compatibility tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import clusters, maven
from .java_session import JavaSession

# Release and whether headers are binary. Between them the first two have everything once.
VARIANTS = {
    "5.4.0-json": (maven.V5_4, False),
    "4.9.8-binary": (maven.V4_9, True),
    "5.4.0-binary": (maven.V5_4, True),
    "4.9.8-json": (maven.V4_9, False),
}


@pytest.fixture(scope="session")
def java() -> None:
    """Skip the test where Java or Maven is missing; on CI that is a failure, never a skip."""
    missing = maven.missing_tools()
    if not missing:
        return
    message = f"needs {' and '.join(missing)} on the PATH"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def cluster(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """One NameServer and broker for all tests that do not stop or configure them."""
    with clusters.cluster(tmp_path_factory.mktemp("cluster")) as common:
        yield common


@pytest.fixture(scope="session", params=VARIANTS)
def client(
    request: pytest.FixtureRequest, java: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JavaSession]:
    """A JVM of each client release and serialization in turn."""
    version, binary = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp("client")
    # An old orderly consumer gives up a queue and asks for one only every 20 s otherwise.
    impatient = dict.fromkeys(
        ("rocketmq.client.rebalance.waitInterval", "rocketmq.client.unlockDelayTimeMills"), "1000"
    )
    properties = impatient if version == maven.V4_9 else {}
    with JavaSession(directory, version, binary=binary, properties=properties) as jvm:
        yield jvm


@pytest.fixture(scope="session")
def latest(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaSession]:
    """A JVM of the latest release, the only one with the admin client."""
    with JavaSession(tmp_path_factory.mktemp("latest")) as jvm:
        yield jvm


@pytest.fixture
def start_java(java: None, tmp_path: Path) -> Iterator[Callable[..., JavaSession]]:
    """Starts further JVMs for one test, which may kill them."""
    started: list[JavaSession] = []

    def start(version: str = maven.V5_4, **options: object) -> JavaSession:
        started.append(JavaSession(tmp_path / f"java-{len(started)}", version, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for jvm in started:
        jvm.kill()


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """A name for this test's topics and groups that no other run used."""
    name: str = getattr(request.node, "originalname", request.node.name)
    return f"{name.removeprefix('test_')[:40]}-{uuid.uuid4().hex[:8]}"
