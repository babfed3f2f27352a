"""Replication under simulation: what is promised holds for each seed.

Repeat a seed that fails with `python -m tests.sim.replication_run SEED`. What is checked after each
step is in `replication_model`, the failures and the operator are in `replication_run`.
"""

from collections import Counter

import pytest

from tests.depth import rounds
from tests.sim.replication_run import MODES, run_seed

SEEDS = rounds(ci=2000, proof=20_000)
GROUP = 100
"""Seeds of one test."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_promises_are_kept(first: int) -> None:
    failed = {}
    for seed in range(first, min(first + GROUP, SEEDS)):
        try:
            run_seed(seed)
        except Exception as error:
            failed[seed] = f"{MODES[seed % len(MODES)].name}: {error!r}"
    assert failed == {}


@pytest.mark.slow
def test_everything_happens() -> None:
    """A simulation without truncations or promotions would prove nothing."""
    events: Counter[str] = Counter()
    for seed in range(120):
        events += run_seed(seed)
    assert min(events.values()) >= 10
    assert set(events) == {
        "acknowledged",
        "lost disk",
        "lost disk of the master",
        "member left",
        "promotion",
        "replaced master refused",
        "truncation",
    }


def test_a_seed_repeats() -> None:
    assert run_seed(1) == run_seed(1)
