"""mqadmin against our servers: every command says the facts and ends as against Apache's.

With PENSTOCK_COMPAT_PEER=apache, or at the depth of a proof, Apache's servers are taken through the
same steps, and all that is printed is compared by lines.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.depth import DEPTH, rounds

from . import maven, penstock
from .clusters import Cluster
from .mqadmin_clusters import NAME, apache_cluster, our_cluster
from .mqadmin_runner import StepRunner, compare
from .mqadmin_shell import AdminShell, Printed
from .mqadmin_steps import ACCESS_STEPS, ALL_STEPS, Step

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.usefixtures("java")]

WITH_APACHE = DEPTH == "proof" or os.environ.get("PENSTOCK_COMPAT_PEER") == "apache"
MAIN_CLASS = "org.apache.rocketmq.tools.command.MQAdminStartup"

Result = tuple[StepRunner, list[Printed]]


def run_steps(cluster: Cluster, folder: Path, version: str, steps: tuple[Step, ...]) -> Result:
    with AdminShell(cluster.namesrv, folder, version) as shell:
        runner = StepRunner(cluster, shell)
        return runner, runner.run(steps)


def judge(steps: tuple[Step, ...], folder: Path, version: str, *, access: bool) -> None:
    """Our cluster says the facts; Apache's does too, and both print the same."""
    with our_cluster(folder / "penstock", access=access) as cluster:
        ours, printed = run_steps(cluster, folder / "our-tool", version, steps)
    problems = [
        problem
        for step, said in zip(steps, printed, strict=True)
        for problem in ours.problems(step, said)
    ]
    assert not problems, "\n".join(problems)
    if not WITH_APACHE:
        return
    with apache_cluster(folder / "apache", version, access=access) as cluster:
        theirs, also_printed = run_steps(cluster, folder / "their-tool", version, steps)
    for step, mine, other in zip(steps, printed, also_printed, strict=True):
        problems += [f"APACHE {text}" for text in theirs.problems(step, other, apache=True)]
        problems += compare(step, (ours, mine), (theirs, other))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("version", maven.SERVER_VERSIONS)
def test_every_command_says_the_same_facts(tmp_path: Path, version: str) -> None:
    judge(ALL_STEPS, tmp_path, version, access=False)


@pytest.mark.parametrize("version", maven.SERVER_VERSIONS[: rounds(ci=1, proof=2)])
def test_access_control_holds_for_commands(tmp_path: Path, version: str) -> None:
    judge(ACCESS_STEPS, tmp_path, version, access=True)


@pytest.mark.parametrize("version", maven.SERVER_VERSIONS)
def test_ha_status_and_epochs_of_a_master_and_its_slave(tmp_path: Path, version: str) -> None:
    with (
        penstock.Up(tmp_path / "up", replicas=2) as up,
        AdminShell(up.address, tmp_path / "tool", version) as shell,
    ):
        steps = StepRunner(Cluster(up.address, NAME, up.broker_address), shell)
        wanted = Step("haStatus -b {broker}", ("#SlaveNum 1", "#InSyncSlaveNum 1"), again=True)
        (status,) = steps.run([wanted])
        assert not steps.problems(wanted, status)
        assert re.search(r"#MasterCommitLogMaxOffset\s+\d+", status.out), status
        host, port = up.broker_address.split(":")
        slave = f"{host}:{int(port) + 10}"
        shown = shell.run("haStatus", "-n", up.address, "-b", slave).out
        assert re.search(rf"#MasterAddr\s+{host}:{int(port) + 1}\b", shown), shown
        shown = shell.run("getBrokerEpoch", "-n", up.address, "-b", NAME).out
        assert len(re.findall(r"#Epoch: EpochEntry\{epoch=1,", shown)) == 2, shown
        for asked in (up.broker_address, slave):  # the slave names its master
            shown = shell.run("getSyncStateSet", "-a", asked, "-b", NAME).out
            assert re.search(rf"#MasterAddr\s+{up.broker_address}\b", shown), shown
            assert re.search(r"#MasterEpoch\s+1\b.*#SyncStateSetNums\s+2\b", shown, re.S), shown
            replicas = re.findall(r"InSyncReplica:.*brokerId=(\d).*alive=true", shown)
            assert replicas == ["0", "1"], shown


def test_mqadmin_as_a_process_ends_well(cluster: Cluster) -> None:
    words = ("topicRoute", "-n", cluster.namesrv, "-t", "Missing")
    # It ends with status 0 (another would raise) and says the rest on its error stream.
    assert maven.run_java(maven.V5_4, MAIN_CLASS, *words) == ""
