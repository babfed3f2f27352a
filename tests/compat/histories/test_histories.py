"""Histories of failovers, judged by the checker. See docs/replication.md for what is promised.

A history has a seed, which decides the servers and the faults. Three replicas of a broker, a
NameServer, one to three controllers and three etcd nodes are real processes, each in a network
namespace of its own. Producers send, readers read from each replica, and a consumer consumes while
two or three faults happen. Then everything must recover, and the checker compares what the clients
saw with what is stored.

Needs root for network namespaces. Without Go there is no etcd: then all histories use a controller
on files. Both fail where CI=true. In every fourth history a Java producer sends too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat import clusters, maven
from tests.compat.conftest import Sessions
from tests.compat.go_program import go_missing
from tests.compat.histories import faketime
from tests.compat.histories.cluster import MACHINES
from tests.compat.histories.machines_network import MachinesNetwork
from tests.compat.histories.one_history import run_history
from tests.compat.replication_network import NotAllowedError
from tests.depth import rounds

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="all servers are ours"),
]

HISTORIES = rounds(ci=10, proof=500)
FAULTS = rounds(ci=2, proof=3)
"""Faults of one history."""
JAVA_EVERY = 4
ON_CI = os.environ.get("CI") == "true"


@pytest.fixture(scope="module")
def network() -> Iterator[MachinesNetwork]:
    try:
        made = MachinesNetwork(MACHINES)
    except NotAllowedError as error:
        message = f"network namespaces are not allowed: {error}"
        if ON_CI:
            pytest.fail(message)
        pytest.skip(message)
    yield made
    made.close()


@pytest.fixture(scope="module")
def etcd() -> bool:
    if not go_missing():
        return True
    if ON_CI:
        pytest.fail("needs Go on the PATH, to build etcd")
    print("without Go there is no etcd: all controllers keep their state in files")
    return False


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_the_checker_finds_no_violation(
    tmp_path: Path, network: MachinesNetwork, etcd: bool, request: pytest.FixtureRequest, seed: int
) -> None:
    java = None
    if seed % JAVA_EVERY == JAVA_EVERY - 1 and not maven.missing_tools():
        sessions: Sessions = request.getfixturevalue("sessions")
        java = sessions(maven.VERSIONS[seed // JAVA_EVERY % len(maven.VERSIONS)])
    if faketime.library() is None:
        print("libfaketime is missing: no clock is set in this history")
    folder = tmp_path / f"seed-{seed}"
    result = run_history(seed, network, folder, etcd=etcd, java=java, faults_max=FAULTS)
    print(result)
    assert not result.violations, (
        f"{result}\nhistory and logs: {result.folder}\n"
        f"repeat it: python -m tests.compat.histories {seed} --faults {FAULTS}"
    )
