"""mqadmin 5.4.0 against our servers: every command says the facts and ends as against Apache's.

With PENSTOCK_COMPAT_PEER=apache, or at the depth of a proof, Apache's servers are taken through the
same steps, and all that is printed is compared by lines.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.depth import DEPTH

from .clients import mqadmin
from .clusters import Cluster
from .mqadmin_clusters import apache_cluster, our_cluster
from .mqadmin_runner import StepRunner, compare
from .mqadmin_shell import AdminShell, Printed
from .mqadmin_steps import ACCESS_STEPS, ALL_STEPS, Step

WITH_APACHE = DEPTH == "proof" or os.environ.get("PENSTOCK_COMPAT_PEER") == "apache"

Result = tuple[StepRunner, list[Printed]]


def run_steps(cluster: Cluster, folder: Path, steps: tuple[Step, ...]) -> Result:
    with AdminShell(cluster.namesrv, folder) as shell:
        runner = StepRunner(cluster, shell)
        return runner, runner.run(steps)


def judge(steps: tuple[Step, ...], folder: Path, *, access: bool) -> None:
    """Our cluster says the facts; Apache's does too, and both print the same."""
    with our_cluster(folder / "penstock", access=access) as cluster:
        ours, printed = run_steps(cluster, folder / "our-tool", steps)
    problems = [
        problem
        for step, said in zip(steps, printed, strict=True)
        for problem in ours.problems(step, said)
    ]
    assert not problems, "\n".join(problems)
    if not WITH_APACHE:
        return
    with apache_cluster(folder / "apache", access=access) as cluster:
        theirs, also_printed = run_steps(cluster, folder / "their-tool", steps)
    for step, mine, other in zip(steps, printed, also_printed, strict=True):
        problems += [f"APACHE {text}" for text in theirs.problems(step, other, apache=True)]
        problems += compare(step, (ours, mine), (theirs, other))
    assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("java")
def test_every_command_says_the_same_facts(tmp_path: Path) -> None:
    judge(ALL_STEPS, tmp_path, access=False)


@pytest.mark.usefixtures("java")
def test_access_control_holds_for_commands(tmp_path: Path) -> None:
    judge(ACCESS_STEPS, tmp_path, access=True)


@pytest.mark.usefixtures("java")
def test_mqadmin_as_a_process_ends_well(tmp_path: Path) -> None:
    with our_cluster(tmp_path / "penstock", access=False) as cluster:
        # It ends with status 0 (another would raise) and says the rest on its error stream.
        assert mqadmin(cluster.namesrv, "topicRoute", "-t", "Missing") == ""
        assert "broker-a" in mqadmin(cluster.namesrv, "clusterList")
