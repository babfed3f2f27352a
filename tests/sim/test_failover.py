"""Failover under simulation: what is promised holds for each seed, and in the end all works again.

Repeat a seed that fails with `python -m tests.sim.failover_run SEED`, which prints what happened.
What is checked is in `failover_ledger`; the failures are in `failover_run`.
"""

from collections import Counter

import pytest

from tests.depth import rounds
from tests.sim.failover_run import MODES, run_seed

SEEDS = rounds(ci=250, proof=12_000)
GROUP = 50
"""Seeds of one test."""
TRACE_LINES = 25


def failure(seed: int) -> str:
    """How a seed fails, and what happened before; empty if it passes."""
    lines: list[str] = []
    try:
        run_seed(seed, trace=lines.append)
    except Exception as error:
        head = f"seed {seed} ({MODES[seed % len(MODES)].name}): {error!r}"
        again = f"repeat it with `python -m tests.sim.failover_run {seed}`; the last events:"
        return "\n".join([head, again, *lines[-TRACE_LINES:]])
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_promises_are_kept(first: int) -> None:
    failures = [failure(seed) for seed in range(first, min(first + GROUP, SEEDS))]
    found = [text for text in failures if text]
    assert not found, "\n\n".join(found)


@pytest.mark.slow
def test_everything_happens() -> None:
    """A simulation without elections or truncations would prove nothing."""
    events: Counter[str] = Counter()
    for seed in range(100):
        events += run_seed(seed)
    assert min(events.values()) >= 1
    assert set(events) == {
        "acknowledged",
        "all members lost power",
        "crash",
        "disturbed without an election",
        "election",
        "etcd unavailable",
        "etcd without a leader",
        "failed disk",
        "isolated",
        "lease expired",
        "lease of a controller expired",
        "lost disk",
        "master presumed",
        "operator",
        "partition",
        "pause",
        "power cut",
        "replaced master refused",
        "report written late",
        "report written meanwhile",
        "reports forgotten",
        "silent watch noticed",
        "taken for dead",
        "truncation",
        "watch compacted",
        "watch interrupted",
    }


def test_a_seed_repeats() -> None:
    first: list[str] = []
    second: list[str] = []
    assert run_seed(3, trace=first.append) == run_seed(3, trace=second.append)
    assert first == second
