"""Fixtures of the client tests: the two clusters, and unique names for each test."""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.compat import maven

from .clean_loop import loop_for, run_clean
from .clusters import KINDS, THREADS, Cluster
from .environment import Environment

Starting = dict[str, "Future[Cluster]"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests; they must leak nothing."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    run_clean(test(**arguments), loop_for(pyfuncitem.name))
    return True


@pytest.fixture(scope="session")
def starting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starting]:
    """All clusters that this run needs, started once and concurrently."""
    wanted = set()
    for item in request.session.items:
        chosen = getattr(item, "callspec", None)
        if chosen is not None and chosen.params.get("cluster") in KINDS:
            wanted.add(chosen.params["cluster"])
    if maven.missing_tools():
        wanted.discard("apache")
    clusters = {kind: Cluster(kind, tmp_path_factory.mktemp(kind)) for kind in sorted(wanted)}

    def start(cluster: Cluster) -> Cluster:
        cluster.start()
        return cluster

    with concurrent.futures.ThreadPoolExecutor(thread_name_prefix=THREADS) as pool:
        yield {kind: pool.submit(start, cluster) for kind, cluster in clusters.items()}
    for cluster in clusters.values():
        cluster.kill()


@pytest.fixture(scope="session", params=KINDS)
def cluster(request: pytest.FixtureRequest, starting: Starting) -> Cluster:
    """Each cluster in turn; without Java only Penstock's, except on CI."""
    kind: str = request.param
    if kind not in starting:
        message = f"needs {' and '.join(maven.missing_tools())} on the PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return starting[kind].result()


@pytest.fixture
def env(request: pytest.FixtureRequest, cluster: Cluster) -> Environment:
    """The cluster with names that are unique to the test."""
    name: str = getattr(request.node, "originalname", request.node.name)
    return Environment(cluster, f"{name.removeprefix('test_')[:30]}-{uuid.uuid4().hex[:6]}")
