"""Which faults the seeds choose."""

from collections import Counter

from tests.compat.histories.faults import LENGTH_S, OUTAGE_S, RARE, rare_fault
from tests.compat.histories.one_history import plan_of

SEEDS = 500


def test_long_faults_are_rare_but_not_missing() -> None:
    found = Counter(rare_fault(seed) for seed in range(SEEDS) if plan_of(seed, etcd=True).etcd)
    del found[None]
    assert set(found) == set(RARE.values())
    assert min(found.values()) >= 15
    longer_s = sum(OUTAGE_S) / 2 - sum(LENGTH_S) / 2
    assert found.total() * longer_s / SEEDS < 1, "seconds by which an average history grows"
