"""The simulation of failover finds broken rules: each is broken on purpose, and a seed must fail.

A seed that fails with a rule broken passes without (test_failover.py). Rules whose violation needs
several rare events are tested at proof depth. That a slave refuses a replaced master is tested in
test_replication_mutations.py: here it hardly ever gets to one, because its role refuses old news.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from penstock.controller import decisions
from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, Living
from penstock.controller.decisions import ControllerDecision
from penstock.errors import EtcdOutcomeUnknown, LogsDiffer
from penstock.replication.agreed_replicas import AgreedReplicas
from penstock.replication.controlled_role import ControlledRole, Follow, Lead, SetState, TakeOver
from penstock.replication.epoch_frames import MasterHandshake
from penstock.replication.replicas import NO_LIMIT, Replica
from penstock.replication.slave_session import EpochSlaveSession
from penstock.server.controller.broker_set_states import Decide, StoredBrokerSetStates
from penstock.server.controller.etcd.reported_liveness import ReportedLiveness
from penstock.server.controller.etcd.reports import Reports
from penstock.server.controller.living_replicas import ReplicaKey
from tests.depth import rounds
from tests.sim.failover_controllers import ControllerRules
from tests.sim.failover_rules import BrokerRules
from tests.sim.failover_run import MODES, Rules, run_seed
from tests.sim.replication_nodes import InvariantError

SEEDS = rounds(ci=1000, proof=8000)
"""A mutation must fail one of these seeds."""


# --- the slaves of a master


class ForgetsAsked(AgreedReplicas):
    """Does not wait for a slave that was asked to join."""

    def _counted(self) -> int:
        asked, self._asked = self._asked, frozenset()
        try:
            return super()._counted()
        finally:
            self._asked = asked


class DropsLeaving(AgreedReplicas):
    """Does not wait for a member that was asked to leave."""

    def ask(self, log_end: int, now_ms: int) -> frozenset[str] | None:
        wanted = super().ask(log_end, now_ms)
        if wanted is not None:
            self.agreed &= wanted
        return wanted


class JoinsEarly(AgreedReplicas):
    """A slave may join that lacks what was acknowledged already, as long as readers have not seen
    it."""

    def acknowledged(self, log_end: int) -> int:
        if not self.enough():
            return 0
        slaves = [self.slaves.get(name) for name in self.agreed | self._asked]
        return min(
            [log_end, *(0 if slave is None else slave.acknowledged for slave in slaves)],
        )


class KeepsLost(AgreedReplicas):
    """A connection is enough to be taken for a member that has what it had before."""

    def connect(self, name: str, now_ms: int, **options: Any) -> Replica:
        before = self.slaves.get(name)
        replica = super().connect(name, now_ms, **options)
        if before is not None and not replica.learner:
            replica.acknowledged = before.acknowledged
        return replica


class ShowsAll(AgreedReplicas):
    """Readers see what no slave has."""

    def confirm_limit(self) -> int:
        return NO_LIMIT


class TakesAllSets(AgreedReplicas):
    """Takes over any set that it learns of, also an older one."""

    def agree(self, members: Iterable[str], number: int, now_ms: int) -> bool:
        self.number = number - 1
        return super().agree(members, number, now_ms)


# --- the role of a replica


class Resumes(ControlledRole):
    """Goes on as the master of its last epoch when it is started."""

    def _may_lead(self, state: SetState) -> bool:
        return self.complete and state.master_epoch >= self._log_epoch


class LeadsIncomplete(ControlledRole):
    """Leads although the controllers did not know that its log is incomplete."""

    def _may_lead(self, state: SetState) -> bool:
        return state.master_epoch > self._log_epoch


class LeadsAtOnce(ControlledRole):
    """Does not take over before it leads."""

    def learn(self, state: SetState, now_ms: int) -> Lead | TakeOver | Follow | None:
        return super().learn(state._replace(taken_over=True), now_ms)


class ListensToOldNews(ControlledRole):
    """Does not compare epochs."""

    def learn(self, state: SetState, now_ms: int) -> Lead | TakeOver | Follow | None:
        if state.master_epoch < self.epoch and state.master_id is not None:
            self.epoch = 0
        return super().learn(state, now_ms)


# --- sessions


class KeepsDifference(EpochSlaveSession):
    """Does not truncate what another master wrote."""

    def _refuse_difference(self, master: MasterHandshake) -> None:
        try:
            super()._refuse_difference(master)
        except LogsDiffer:
            return


class ReceivesAtOnce(EpochSlaveSession):
    """Does not wait until the master's epochs are stored."""

    def _first_report(self, now_ms: int) -> bytes:
        if self.log.acknowledged < self.log.end:
            return b""
        self._reported, self._reported_ms = self._first_offset(), now_ms
        return self._encode_report(self._reported)


# --- decisions


def elect_anybody(*arguments: Any, **options: Any) -> ControllerDecision:
    """Elects outside of the in-sync set."""
    return decisions.elect(*arguments, **options | {"unclean": True})


def elect_incomplete(
    state: BrokerSet | None, name: str, living: Living, **options: Any
) -> ControllerDecision:
    """Elects a member that may have lost the end of its log."""
    known = {one: live._replace(complete=True) for one, live in living.items()}
    decision = decisions.elect(state, name, known, **options)
    if decision.state is None or not decision.elected:
        return decision
    chosen = living.get(decision.state.master_id or 0, LiveReplica())
    marked = msgspec.structs.replace(decision.state, master_incomplete=not chosen.complete)
    return decision._replace(state=marked)


def elect_presumed(
    state: BrokerSet | None, name: str, living: Living, **options: Any
) -> ControllerDecision:
    """Elects a master of which nothing was heard, because it asks for it."""
    known = {one: live._replace(presumed=False) for one, live in living.items()}
    return decisions.elect(state, name, known, **options)


def elect_alone(*arguments: Any, **options: Any) -> ControllerDecision:
    """An elected replica is the only one that can be elected next, also if it is dead."""
    decision = decisions.elect(*arguments, **options)
    if decision.state is None:
        return decision
    return decision._replace(state=msgspec.structs.replace(decision.state, before=()))


def alter_unchecked(
    state: BrokerSet | None, name: str, living: Living, **options: Any
) -> ControllerDecision:
    """Takes requests of any master for any set."""
    if state is not None:
        present = {"master_epoch": state.master_epoch, "in_sync_epoch": state.in_sync_epoch}
        options |= present
        if state.master_id is not None:
            options["master_id"] = state.master_id
    return decisions.alter_in_sync(state, name, living, **options)


def alter_without_number(
    state: BrokerSet | None, name: str, living: Living, **options: Any
) -> ControllerDecision:
    """Does not compare the number of the set."""
    if state is not None:
        options["in_sync_epoch"] = state.in_sync_epoch
    return decisions.alter_in_sync(state, name, living, **options)


# --- what controllers share


class DecidesAgain(StoredBrokerSetStates):
    """Decides again if the answer of etcd is lost."""

    async def _decide(self, name: str, decide: Decide) -> ControllerDecision:
        while True:
            try:
                return await super()._decide(name, decide)
            except EtcdOutcomeUnknown:
                continue


class ConfirmsAlways(StoredBrokerSetStates):
    """Confirms heartbeats although etcd has not confirmed this controller."""

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        super().heartbeat(heartbeat)
        return ""


class DecidesByView(ReportedLiveness):
    """Does not read the reports again before a decision."""

    async def living(self, name: str) -> Living:
        return self.last_seen(name)


class WithoutGrace(ReportedLiveness):
    """A report that is gone after an interruption of the watch kills."""

    def tick(self) -> None:
        self._local.heard_elsewhere(self._view.reports)
        self._local.tick()


class IgnoresOthers(ReportedLiveness):
    """A replica from which only others hear stays dead."""

    def tick(self) -> None:
        dead = dict(self._local._dead)
        super().tick()
        self._local._dead |= dead


class TrustsWatch(ReportedLiveness):
    """Does not mind that reports may have expired while it was isolated."""

    def _was_isolated(self) -> bool:
        return False


class ForgetsAlways(Reports):
    """Deletes reports also if one was written meanwhile."""

    async def forget(self, key: ReplicaKey, revision: int) -> bool:
        return await super().forget(key, 2**62)


class ReportsOnce(Reports):
    """Does not report again with a new lease."""

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._reported_with = self._lease.id
        super().heartbeat(heartbeat)


def _broker(**rules: Any) -> Rules:
    return Rules(broker=BrokerRules(**rules))


def _controller(**rules: Any) -> Rules:
    return Rules(controller=ControllerRules(**rules))


SYNC, MEMORY, LONE, LONE_MEMORY, UNCLEAN = range(len(MODES))
CLEAN = SYNC, MEMORY, LONE, LONE_MEMORY
MUTATIONS: dict[str, tuple[tuple[int, ...], Rules]] = {
    "does not wait for a slave that is asked to join": (CLEAN, _broker(replicas=ForgetsAsked)),
    "drops a member before the controllers agree": (CLEAN, _broker(replicas=DropsLeaving)),
    "a slave joins without what is acknowledged": (CLEAN, _broker(replicas=JoinsEarly)),
    "a connection counts as an acknowledgement": (CLEAN, _broker(replicas=KeepsLost)),
    "readers see what no slave has": (CLEAN, _broker(replicas=ShowsAll)),
    "takes over older sets": (CLEAN, _broker(replicas=TakesAllSets)),
    "resumes its epoch after a start": ((SYNC, LONE), _broker(role=Resumes)),
    "leads with an incomplete log": ((MEMORY, LONE_MEMORY), _broker(role=LeadsIncomplete)),
    "leads before it has taken over": (CLEAN, _broker(role=LeadsAtOnce)),
    "takes over before its log is flushed": (
        (MEMORY, LONE_MEMORY), _broker(takes_over_unflushed=True),
    ),
    "acts on old news": (CLEAN, _broker(role=ListensToOldNews)),
    "does not truncate": (CLEAN, _broker(slave=KeepsDifference)),
    "a slave shows its whole log when it starts": (CLEAN, _broker(slave_shows_all=True)),
    "a refused second attempt tells of the first": (CLEAN, _broker(retry_tells=True)),
    "an error counts as a refusal": (CLEAN, _broker(error_refuses=True)),
    "a lost answer counts as a refusal": (CLEAN, _broker(lost_answer_refuses=True)),
    "takes its log for complete after a power cut": (
        (MEMORY, LONE_MEMORY), _broker(log_complete=True),
    ),
    "forgets a power cut when it is started again": (
        (MEMORY, LONE_MEMORY), _broker(forgets_power_cut=True),
    ),
    "services of the last epoch ask for the next one": (
        (LONE, LONE_MEMORY), _broker(asks_for_next_epoch=True),
    ),
    "elects outside of the in-sync set": (CLEAN, _controller(elect=elect_anybody)),
    "elects a replica with an incomplete log": (
        (MEMORY, LONE_MEMORY), _controller(elect=elect_incomplete),
    ),
    "elects a replica of which nothing is known": (
        (MEMORY, LONE_MEMORY), _controller(elect=elect_presumed),
    ),
    "only the elected replica can be elected next": (CLEAN, _controller(elect=elect_alone)),
    "takes requests of any master": (CLEAN, _controller(alter=alter_unchecked)),
    "does not compare the number of the set": (CLEAN, _controller(alter=alter_without_number)),
    "swaps without comparing": (CLEAN, _controller(compares=False)),
    "decides again after a lost answer": (CLEAN, _controller(states=DecidesAgain)),
    "receives before it has stored any epoch": (CLEAN, _broker(slave=ReceivesAtOnce)),
    "takes what was not flushed for flushed": (
        (SYNC, LONE), _broker(keeps_unflushed=True),
    ),
    "takes over although its disk has failed": (CLEAN, _broker(ignores_failed_disk=True)),
    "decides without reading the reports again": (CLEAN, _controller(liveness=DecidesByView)),
    "a report that is gone after an interruption kills": (
        CLEAN, _controller(liveness=WithoutGrace),
    ),
    "confirms heartbeats while it is isolated": (CLEAN, _controller(states=ConfirmsAlways)),
    "a replica that others hear stays dead": (CLEAN, _controller(liveness=IgnoresOthers)),
    "forgets what was reported meanwhile": (CLEAN, _controller(reports=ForgetsAlways)),
    "does not report again with a new lease": (CLEAN, _controller(reports=ReportsOnce)),
    "trusts a watch that went on without a lease": (CLEAN, _controller(liveness=TrustsWatch)),
}  # fmt: skip


def first_failure(modes: tuple[int, ...], rules: Rules) -> tuple[int, Exception] | None:
    """The first seed of these modes that fails, and how."""
    for seed in range(SEEDS):
        if seed % len(MODES) in modes:
            try:
                run_seed(seed, rules)
            except InvariantError as error:
                return seed, error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MUTATIONS)[:: rounds(ci=4, proof=1)])
def test_a_broken_rule_makes_a_seed_fail(name: str) -> None:
    assert first_failure(*MUTATIONS[name]) is not None
