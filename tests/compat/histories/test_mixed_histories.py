"""Histories with Apache's brokers or controllers, judged by the same checker.

| Brokers | Controllers | |
|---|---|---|
| Penstock | Apache | no violation |
| two of Penstock, one of Apache | Penstock, on a file or etcd | what the checker finds is printed |
| one of Penstock, two of Apache | Penstock, on a file or etcd | what the checker finds is printed |
| Apache | Penstock, on a file or etcd | what the checker finds is printed |
| Apache | Apache, with its own defaults or Penstock's | what the checker finds is printed |

Penstock's brokers under Penstock's controllers are in `test_histories`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compat import clusters, maven
from tests.compat.histories.apache_servers import SAFE
from tests.compat.histories.clients import QUEUES, TOPIC
from tests.compat.histories.cluster import BROKERS, Plan
from tests.compat.histories.machines_network import MachinesNetwork
from tests.compat.histories.one_history import Result, run_history
from tests.compat.histories.test_histories import etcd, network  # noqa: F401
from tests.depth import DEPTH, rounds

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="all servers are given"),
]

FAULTS = 2
CONTROLLERS_WITH_ETCD = 2


class Combination(NamedTuple):
    """The servers of a history."""

    apache: int
    """How many of the three brokers are Apache's."""
    controllers: str
    settings: str = "safe"

    def plan(self, version: str) -> Plan:
        return Plan(
            controllers=CONTROLLERS_WITH_ETCD if self.controllers == "etcd" else 1,
            etcd=self.controllers == "etcd",
            topics=(TOPIC,),
            queues=QUEUES,
            apache_brokers=BROKERS[: self.apache],
            apache_settings=SAFE if self.settings == "safe" else {},
            apache_controller=self.controllers == "apache",
            apache_version=version,
        )

    def __str__(self) -> str:
        brokers = f"{self.apache} of {len(BROKERS)} brokers of Apache"
        return f"{brokers}, {self.controllers} controllers, {self.settings} settings"


OURS = Combination(0, "apache")
WITH_THEIRS = (
    Combination(1, "file"),
    Combination(1, "etcd"),
    Combination(2, "file"),
    Combination(2, "etcd"),
    Combination(3, "file"),
    Combination(3, "etcd"),
    Combination(3, "apache"),
    Combination(3, "apache", "default"),
)


def run(combination: Combination, seed: int, machines: MachinesNetwork, folder: Path) -> Result:
    version = maven.SERVER_VERSIONS[seed % len(maven.SERVER_VERSIONS)]
    result = run_history(
        seed, machines, folder / f"seed-{seed}", plan=combination.plan(version), faults_max=FAULTS
    )
    print(f"{combination}, {version}: {result}")
    return result


@pytest.mark.parametrize("seed", range(rounds(ci=1, proof=20)))
def test_our_brokers_keep_their_promise_under_controllers_of_apache(
    tmp_path: Path,
    network: MachinesNetwork,  # noqa: F811
    seed: int,
) -> None:
    result = run(OURS, seed, network, tmp_path)
    assert not result.violations, f"{result}\nhistory and logs: {result.folder}"


@pytest.mark.skipif(DEPTH != "proof", reason="shows what Apache does; needs minutes")
@pytest.mark.parametrize("seed", range(rounds(ci=1, proof=10)))
@pytest.mark.parametrize("combination", WITH_THEIRS, ids=str)
def test_brokers_of_apache(
    tmp_path: Path,
    network: MachinesNetwork,  # noqa: F811
    etcd: bool,  # noqa: F811
    combination: Combination,
    seed: int,
) -> None:
    result = run(combination, seed, network, tmp_path)
    assert result.counts.acknowledged > 0
