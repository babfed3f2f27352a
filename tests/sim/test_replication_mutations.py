"""The simulation finds broken rules: each is broken on purpose, and a seed must fail.

A seed that fails with a rule broken passes without (test_replication.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from penstock.errors import LogsDiffer, ReplicationError
from penstock.replication.epoch_frames import MasterHandshake
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.replicas import NO_LIMIT, Replica, Replicas
from penstock.replication.slave_session import EpochSlaveSession
from tests.sim.replication_nodes import InvariantError, ModelLog, Parts
from tests.sim.replication_run import MODES, run_seed

SEEDS = 2000
"""A mutation must fail one of these seeds."""


class AcknowledgesUnflushed(ModelLog):
    """Acknowledges before the flush."""

    @property
    def acknowledged(self) -> int:
        return len(self.data)


class KeepsDifference(EpochSlaveSession):
    """Does not truncate what another master wrote."""

    def _refuse_difference(self, master: MasterHandshake) -> None:
        try:
            super()._refuse_difference(master)
        except LogsDiffer:
            return


class FollowsReplaced(EpochSlaveSession):
    """Does not compare the epoch of the master with its own."""

    def _refuse_replaced(self, theirs: EpochHistory) -> None:
        return


class ReportsUnflushed(EpochSlaveSession):
    """Does not wait for the flush before the first report."""

    def _first_report(self, now_ms: int) -> bytes:
        self._reported, self._reported_ms = self._first_offset(), now_ms
        return self._encode_report(self._reported)


class IgnoresHeaders(EpochSlaveSession):
    """Takes epochs only from the handshake."""

    def _follow(self, epoch: Epoch) -> None:
        return


class DropsLostMember(Replicas):
    """As RocketMQ: a member leaves with its connection, and those that are left are enough."""

    def disconnect(self, replica: Replica) -> None:
        replica.in_sync = False
        super().disconnect(replica)

    def acknowledged(self, log_end: int) -> int:
        rules = self.rules
        self.rules = rules._replace(in_sync_least=1)
        try:
            return super().acknowledged(log_end)
        finally:
            self.rules = rules


class KeepsEmptyMember(Replicas):
    """A member that comes back without its log stays one."""

    def acknowledge(self, replica: Replica, offset: int, log_end: int, now_ms: int) -> bool:
        replica.acknowledged_before = 0
        return super().acknowledge(replica, offset, log_end, now_ms)


class JoinsEarly(Replicas):
    """A slave joins with what readers of this master see, as if there had been no other master."""

    def acknowledge(self, replica: Replica, offset: int, log_end: int, now_ms: int) -> bool:
        confirmed = self.confirm_offset(log_end)
        joins = super().acknowledge(replica, offset, log_end, now_ms)
        replica.in_sync = not replica.learner and offset >= confirmed
        return joins


class ShowsUnsafe(Replicas):
    """Readers see all that a master without members has."""

    def confirm_limit(self) -> int:
        return min((replica.acknowledged for replica in self.in_sync), default=NO_LIMIT)


class CountsLearners(Replicas):
    """A learner becomes a member."""

    def connect(self, name: str, now_ms: int, **options: Any) -> Replica:
        return super().connect(name, now_ms, **options | {"learner": False})


@contextmanager
def apache_append() -> Iterator[None]:
    """RocketMQ ignores an epoch that begins where the last one does."""
    append = EpochHistory.append

    def ignoring(self: EpochHistory, number: int, begin: int) -> None:
        if self.last is None or self.last.begin < begin:
            append(self, number, begin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochHistory, "append", ignoring)
        yield


Patch = Callable[[], AbstractContextManager[None]]
COPIES, LONE, ALL, MEMORY, ASYNC, STATIC = range(len(MODES))
ANY = tuple(range(len(MODES)))
MUTATIONS: dict[str, tuple[tuple[int, ...], Parts, Patch]] = {
    "acknowledges before the flush": (ANY, Parts(log=AcknowledgesUnflushed), nullcontext),
    "does not truncate": (ANY, Parts(slave=KeepsDifference), nullcontext),
    "a lost connection acknowledges": (ANY, Parts(replicas=DropsLostMember), nullcontext),
    "follows a replaced master": ((ALL, MEMORY), Parts(slave=FollowsReplaced), nullcontext),
    "ignores empty epochs as RocketMQ": (ANY, Parts(), apache_append),
    "no epoch after a lost tail": (ANY, Parts(new_epoch=False), nullcontext),
    "first report before the flush": (
        (COPIES, LONE, ALL), Parts(slave=ReportsUnflushed), nullcontext,
    ),
    "epochs only from the handshake": (ANY, Parts(slave=IgnoresHeaders), nullcontext),
    "a member without its log stays": (ANY, Parts(replicas=KeepsEmptyMember), nullcontext),
    "joins before it has the old log": ((ALL,), Parts(replicas=JoinsEarly), nullcontext),
    "readers see what one replica has": (ANY, Parts(replicas=ShowsUnsafe), nullcontext),
    "learners count": (ANY, Parts(replicas=CountsLearners), nullcontext),
}  # fmt: skip


def first_failure(
    modes: tuple[int, ...], parts: Parts, patch: Patch
) -> tuple[int, Exception] | None:
    """The first seed of these modes that fails, and how."""
    with patch():
        for seed in range(SEEDS):
            if seed % len(MODES) in modes:
                try:
                    run_seed(seed, parts)
                except (InvariantError, ReplicationError) as error:
                    return seed, error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_makes_a_seed_fail(name: str) -> None:
    assert first_failure(*MUTATIONS[name]) is not None
