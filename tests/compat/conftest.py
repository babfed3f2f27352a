"""Fixtures of the compatibility tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.depth import rounds

from . import apache, clusters, maven
from .go_program import go_missing
from .java_session import JavaSession
from .variants import DEFAULT, VARIANTS

Sessions = Callable[[str], JavaSession]

# Otherwise a consumer looks only every 20 s for what nobody tells it: a retry topic that was made
# after it started, or, in 4.9, a queue that another orderly consumer gave up.
QUICK_REBALANCE = {
    "rocketmq.client.rebalance.waitInterval": "1000",
    "rocketmq.client.unlockDelayTimeMills": "1000",
}


@pytest.fixture(scope="session")
def java() -> None:
    """Skip the test where Java or Maven is missing; on CI that is a failure, never a skip."""
    need(maven.missing_tools())


@pytest.fixture(scope="session")
def go_tool() -> None:
    """Skip the test where Go is missing; on CI that is a failure, never a skip."""
    need(["go"] if go_missing() else [])


def need(missing: Sequence[str]) -> None:
    """Skip the test where something is missing; on CI that is a failure, never a skip."""
    if not missing:
        return
    message = f"needs {' and '.join(missing)} on the PATH"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def cluster(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """One NameServer and broker for all tests that do not stop or configure them."""
    with clusters.common(tmp_path_factory.mktemp("cluster")) as common:
        yield common


@pytest.fixture(scope="session", params=maven.SERVER_VERSIONS[: rounds(ci=1, proof=2)])
def apache_cluster(
    java: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[clusters.OwnCluster]:
    """Apache's NameServer and broker, for all tests that want them beside ours."""
    directory, version = tmp_path_factory.mktemp("apache"), request.param
    conf = {"enablePropertyFilter": True, "defaultTopicQueueNums": 1}
    with (
        apache.NameServer(directory / "names", version=version) as names,
        apache.Broker(
            directory / "broker", directory / "store", names.address, version=version, **conf
        ) as broker,
    ):
        yield clusters.OwnCluster(names.address, broker.name, broker.address, broker)


@pytest.fixture(scope="session")
def started_sessions() -> Iterator[dict[str, JavaSession]]:
    """The JVMs that run, by the name of their variant."""
    started: dict[str, JavaSession] = {}
    yield started
    for one in started.values():
        one.kill()


@pytest.fixture(scope="session")
def sessions(
    java: None,
    started_sessions: dict[str, JavaSession],
    tmp_path_factory: pytest.TempPathFactory,
) -> Sessions:
    """The JVM of a variant or of a release; each is started once, when it is first wanted."""

    def session(name: str) -> JavaSession:
        name = DEFAULT.get(name, name)
        if name not in started_sessions:
            version, binary = VARIANTS[name]
            directory = tmp_path_factory.mktemp(f"java-{name}")
            started_sessions[name] = JavaSession(
                directory, version, binary=binary, properties=QUICK_REBALANCE
            )
        return started_sessions[name]

    return session


@pytest.fixture(autouse=True)
def stopped_producers(started_sessions: dict[str, JavaSession]) -> Iterator[None]:
    """Stops the producers that a test leaves running."""
    before = {name: set(session.producers) for name, session in started_sessions.items()}
    yield
    for name, session in started_sessions.items():
        session.stop_producers(but=before.get(name, ()))


@pytest.fixture
def client(request: pytest.FixtureRequest, sessions: Sessions) -> JavaSession:
    """The JVM of the variant that the test is run with; see variants.py."""
    variant: str = request.param
    return sessions(variant)


@pytest.fixture(scope="session")
def java54(sessions: Sessions) -> JavaSession:
    """A JVM of RocketMQ 5.4, for tests where the release does not matter."""
    return sessions(maven.V5_4)


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
