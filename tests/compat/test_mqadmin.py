"""mqadmin against our servers: every command says the facts and ends as against Apache's.

With PENSTOCK_COMPAT_PEER=apache, or at the depth of a proof, Apache's servers are taken through the
same steps, and all that is printed is compared by lines.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.depth import DEPTH, rounds

from . import maven
from .clusters import Cluster
from .mqadmin_clusters import apache_cluster, our_cluster
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


def test_mqadmin_as_a_process_ends_well(cluster: Cluster) -> None:
    words = ("topicRoute", "-n", cluster.namesrv, "-t", "Missing")
    # It ends with status 0 (another would raise) and says the rest on its error stream.
    assert maven.run_java(maven.V5_4, MAIN_CLASS, *words) == ""
