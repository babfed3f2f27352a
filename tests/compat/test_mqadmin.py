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
from .houses import House
from .mqadmin_houses import apache_house, our_house
from .mqadmin_shell import AdminShell, Printed
from .mqadmin_steps import GUARDED, TOUR, Step
from .mqadmin_tour import Tour, compare

WITH_APACHE = DEPTH == "proof" or os.environ.get("PENSTOCK_COMPAT_PEER") == "apache"

Result = tuple[Tour, list[Printed]]


def visit(house: House, folder: Path, steps: tuple[Step, ...]) -> Result:
    with AdminShell(house.namesrv, folder) as shell:
        tour = Tour(house, shell)
        return tour, tour.take(steps)


def judge(steps: tuple[Step, ...], folder: Path, *, access: bool) -> None:
    """Our house says the facts; Apache's does too, and both print the same."""
    with our_house(folder / "penstock", access=access) as house:
        ours, printed = visit(house, folder / "our-tool", steps)
    problems = [
        problem
        for step, said in zip(steps, printed, strict=True)
        for problem in ours.problems(step, said)
    ]
    assert not problems, "\n".join(problems)
    if not WITH_APACHE:
        return
    with apache_house(folder / "apache", access=access) as house:
        theirs, also_printed = visit(house, folder / "their-tool", steps)
    for step, mine, other in zip(steps, printed, also_printed, strict=True):
        problems += [f"APACHE {text}" for text in theirs.problems(step, other, apache=True)]
        problems += compare(step, (ours, mine), (theirs, other))
    assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("java")
def test_every_command_says_the_same_facts(tmp_path: Path) -> None:
    judge(TOUR, tmp_path, access=False)


@pytest.mark.usefixtures("java")
def test_access_control_holds_for_commands(tmp_path: Path) -> None:
    judge(GUARDED, tmp_path, access=True)


@pytest.mark.usefixtures("java")
def test_mqadmin_as_a_process_ends_well(tmp_path: Path) -> None:
    with our_house(tmp_path / "penstock", access=False) as house:
        # It ends with status 0 (another would raise) and says the rest on its error stream.
        assert mqadmin(house.namesrv, "topicRoute", "-t", "Missing") == ""
        assert "broker-a" in mqadmin(house.namesrv, "clusterList")
