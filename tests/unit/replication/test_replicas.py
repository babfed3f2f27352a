"""The in-sync set, acknowledgements and the confirm offset of a master."""

from typing import Any

import pytest

from penstock.errors import ReplicationError
from penstock.replication.replicas import NO_LIMIT, Replica, ReplicaRules, Replicas

LAG_MS = 1000
LAG_BYTES = 500


def rules(**changed: Any) -> ReplicaRules:
    defaults = ReplicaRules(
        sync=True,
        copies=2,
        in_sync_least=1,
        all_in_sync=False,
        lag_bytes_max=LAG_BYTES,
        lag_ms_max=LAG_MS,
    )
    return defaults._replace(**changed)


class Master:
    """A master with slaves, a log and a clock."""

    def __init__(self, slaves: int = 1, *, before: int = 0, **changed: Any) -> None:
        self.replicas = Replicas(rules(**changed), log_end=before)
        self.now_ms = 0
        self.end = before
        self.slaves = [self.replicas.connect(str(i), 0) for i in range(slaves)]

    def wait(self, ms: int) -> list[str]:
        """Let time pass; returns who left the in-sync set."""
        self.now_ms += ms
        return [replica.name for replica in self.replicas.tick(self.end, self.now_ms)]

    def acknowledge(self, offset: int, slave: int | Replica = 0) -> bool:
        replica = slave if isinstance(slave, Replica) else self.slaves[slave]
        return self.replicas.acknowledge(replica, offset, self.end, self.now_ms)

    def reconnect(self, slave: int = 0, *, learner: bool = False) -> Replica:
        self.replicas.disconnect(self.slaves[slave])
        self.slaves[slave] = self.replicas.connect(str(slave), self.now_ms, learner=learner)
        return self.slaves[slave]

    @property
    def members(self) -> list[str]:
        return [replica.name for replica in self.replicas.in_sync]

    @property
    def confirmed(self) -> int:
        return self.replicas.confirm_offset(self.end)

    @property
    def acknowledged(self) -> int:
        return self.replicas.acknowledged(self.end)


# --- the set -------------------------------------------------------------------------------------


def test_a_slave_joins_when_it_has_the_whole_log() -> None:
    master = Master()
    master.end = 100
    assert not master.acknowledge(60)
    assert master.members == []
    assert master.acknowledge(100)
    assert master.members == ["0"]
    assert not master.acknowledge(100)  # it has joined before


def test_a_slave_that_follows_closely_joins_although_messages_arrive_all_the_time() -> None:
    """It always lacks what arrived while its acknowledgement was on the way."""
    master = Master()
    seen = 0
    joined = False
    for end in range(100, 1000, 10):
        master.end = end
        joined = joined or master.acknowledge(end - 10)
        assert master.confirmed >= seen
        seen = master.confirmed
        master.end += 5
        if joined:
            assert master.confirmed <= end - 10
    assert joined


def test_readers_do_not_wait_for_long_for_a_slave_that_follows_and_stops() -> None:
    master = Master()
    master.end = 100
    master.acknowledge(50)
    master.end = 200
    master.acknowledge(100)
    master.end = 300
    assert master.members == []
    assert master.confirmed == 200
    assert master.wait(LAG_MS + 1) == []
    assert master.confirmed == 300


@pytest.mark.parametrize("sync", [True, False])
def test_a_slave_that_is_far_behind_does_not_join(sync: bool) -> None:
    master = Master(sync=sync)
    master.end = 10
    master.acknowledge(0)
    master.end = 20 + LAG_BYTES
    assert not master.acknowledge(15)
    assert master.confirmed == master.end
    assert master.acknowledge(master.end)


def test_a_slave_joins_only_with_all_that_the_log_had_when_the_master_took_over() -> None:
    master = Master(2, before=100)
    for offset in (0, 60, 99):
        assert not master.acknowledge(offset)
    assert master.acknowledge(100)


def test_a_slave_that_stops_leaves_after_a_time() -> None:
    master = Master()
    assert master.acknowledge(0)
    master.end = 100
    assert master.wait(LAG_MS) == []
    assert master.members == ["0"]
    assert master.wait(1) == ["0"]
    assert master.members == []
    assert master.wait(1) == []


def test_a_slave_that_has_everything_stays_without_messages() -> None:
    master = Master()
    master.end = 100
    master.acknowledge(100)
    for _ in range(5):
        assert master.wait(LAG_MS) == []
    assert master.members == ["0"]


def test_a_slave_that_follows_closely_stays() -> None:
    master = Master()
    master.acknowledge(0)
    for _ in range(50):
        master.end += 100
        master.acknowledge(master.end - 100)
        assert master.wait(LAG_MS // 4) == []


def test_a_slave_stays_although_many_acknowledgements_are_always_on_the_way() -> None:
    """Each says less than what the master had at the one before."""
    master = Master()
    master.acknowledge(0)
    for _ in range(500):
        master.end += 10
        master.acknowledge(max(master.end - 300, 0))
        assert master.wait(LAG_MS // 100) == []
    assert master.members == ["0"]


def test_a_slave_joins_although_many_acknowledgements_are_always_on_the_way() -> None:
    master = Master()
    joined = False
    for end in range(400, 4000, 10):
        master.end = end
        confirmed = master.confirmed
        if master.acknowledge(end - 300):
            joined = True
            assert end - 300 >= confirmed
    assert joined


def test_a_slave_that_falls_further_behind_leaves() -> None:
    master = Master()
    master.acknowledge(0)
    left = []
    for _ in range(50):
        master.end += 100
        master.acknowledge(master.end // 2)
        left += master.wait(LAG_MS // 4)
    assert left == ["0"]


def test_a_slave_that_is_behind_does_not_stay_by_connecting_again() -> None:
    master = Master()
    master.acknowledge(0)
    left = []
    for _ in range(8):
        master.end += 100
        master.reconnect()
        master.acknowledge(0)
        left += master.wait(LAG_MS // 2)
    assert left == ["0"]


def test_a_lost_connection_changes_nothing_at_first() -> None:
    master = Master()
    master.end = 100
    master.acknowledge(100)
    master.replicas.disconnect(master.slaves[0])
    assert master.wait(LAG_MS) == []
    assert master.members == ["0"]
    assert master.wait(1) == ["0"]
    assert master.replicas.slaves == {}


def test_a_slave_that_never_joined_is_forgotten_with_its_connection() -> None:
    master = Master()
    master.replicas.disconnect(master.slaves[0])
    assert master.replicas.slaves == {}


def test_a_member_stays_one_when_it_connects_again() -> None:
    master = Master()
    master.end = 100
    master.acknowledge(100)
    master.end = 150
    replica = master.reconnect()
    assert master.members == ["0"]
    assert replica.acknowledged == 0
    assert not master.acknowledge(100)
    assert master.members == ["0"]


@pytest.mark.parametrize("sync", [True, False])
def test_a_member_that_comes_back_with_less_leaves(sync: bool) -> None:
    master = Master(sync=sync)
    master.end = 100
    master.acknowledge(100)
    master.reconnect()
    master.reconnect()  # before it has reported
    assert not master.acknowledge(60)
    assert master.members == []
    assert master.wait(0) == ["0"]
    assert master.acknowledge(100)


def test_an_old_connection_that_ends_late_does_not_remove_the_new_one() -> None:
    master = Master()
    master.acknowledge(0)
    old = master.slaves[0]
    new = master.replicas.connect("0", 0)
    assert not old.connected
    master.replicas.disconnect(old)
    assert master.replicas.slaves == {"0": new}
    assert new.connected


def test_a_delayed_connection_does_not_replace_a_later_one() -> None:
    replicas = Replicas(rules())
    first, second = replicas.next_order(), replicas.next_order()
    current = replicas.connect("0", 0, order=second)
    with pytest.raises(ReplicationError, match="connected again"):
        replicas.connect("0", 0, order=first)
    assert replicas.slaves == {"0": current}
    assert current.connected


def test_acknowledgements_of_an_old_connection_do_not_count() -> None:
    master = Master()
    old = master.slaves[0]
    master.replicas.connect("0", 0)
    master.end = 100
    assert not master.acknowledge(100, old)
    assert (master.members, master.acknowledged) == ([], 0)


@pytest.mark.parametrize("offset", [49, 101])
def test_an_impossible_acknowledgement_is_refused(offset: int) -> None:
    """Less than before, or more than the master has."""
    master = Master()
    master.acknowledge(0)
    master.end = 100
    master.acknowledge(50)
    with pytest.raises(ReplicationError):
        master.acknowledge(offset)
    assert (master.slaves[0].acknowledged, master.acknowledged) == (50, 50)


# --- learners ------------------------------------------------------------------------------------


def test_a_learner_never_counts() -> None:
    master = Master(0, in_sync_least=2, all_in_sync=True)
    learner = master.replicas.connect("7", 0, learner=True)
    master.end = 100
    for offset in (50, 100, 100):
        assert not master.acknowledge(offset, learner)
    assert (master.members, master.acknowledged, master.confirmed) == ([], 0, 0)
    assert not master.replicas.enough()


def test_readers_do_not_wait_for_a_learner() -> None:
    master = Master(0)
    learner = master.replicas.connect("7", 0, learner=True)
    for end in (100, 200, 300):
        master.end = end
        master.acknowledge(end - 100, learner)
        assert master.confirmed == end


def test_a_member_that_comes_back_as_a_learner_leaves() -> None:
    master = Master()
    master.acknowledge(0)
    master.reconnect(learner=True)
    master.acknowledge(0)
    assert master.members == []


# --- what a send waits for -----------------------------------------------------------------------


def test_an_async_master_waits_for_nothing() -> None:
    master = Master(0, sync=False)
    master.end = 100
    assert (master.acknowledged, master.confirmed) == (100, 100)
    assert master.replicas.confirm_limit() == NO_LIMIT


@pytest.mark.parametrize(("copies", "acknowledged"), [(1, 100), (2, 80), (3, 60), (4, 0)])
def test_a_send_waits_for_a_number_of_copies(copies: int, acknowledged: int) -> None:
    master = Master(2, copies=copies)
    for slave in (0, 1):
        master.acknowledge(0, slave)
    master.end = 100
    master.acknowledge(60, 0)
    master.acknowledge(80, 1)
    assert master.acknowledged == acknowledged


def test_a_send_waits_for_all_members() -> None:
    master = Master(2, copies=1, all_in_sync=True)
    for slave in (0, 1):
        master.acknowledge(0, slave)
    master.end = 100
    assert master.acknowledged == 0
    master.acknowledge(100, 0)
    assert master.acknowledged == 0
    master.acknowledge(70, 1)
    assert master.acknowledged == 70


def test_only_members_count_as_copies() -> None:
    """Only they are promoted."""
    master = Master(2)
    master.acknowledge(0, 0)
    master.end = 100
    master.acknowledge(40, 0)
    master.acknowledge(80, 1)
    assert (master.members, master.acknowledged) == (["0"], 40)


def test_a_send_does_not_wait_for_slaves_that_are_no_members() -> None:
    master = Master(2, copies=1, all_in_sync=True)
    master.acknowledge(0, 0)
    master.end = 100
    master.acknowledge(0, 1)
    master.acknowledge(100, 0)
    assert (master.members, master.acknowledged) == (["0"], 100)


@pytest.mark.parametrize("all_in_sync", [False, True])
def test_a_lost_connection_acknowledges_no_send(all_in_sync: bool) -> None:
    master = Master(copies=2 - all_in_sync, all_in_sync=all_in_sync)
    master.acknowledge(0)
    master.end = 100
    master.replicas.disconnect(master.slaves[0])
    master.wait(LAG_MS)
    assert (master.acknowledged, master.confirmed) == (0, 0)
    master.slaves[0] = master.replicas.connect("0", master.now_ms)
    assert master.acknowledged == 0
    master.acknowledge(0)
    assert master.acknowledged == 0
    master.acknowledge(100)
    assert master.acknowledged == 100


def test_a_member_that_leaves_acknowledges_no_send_below_the_least_number() -> None:
    """The send was accepted while there were enough members."""
    master = Master(copies=1, all_in_sync=True, in_sync_least=2)
    master.acknowledge(0)
    master.end = 100
    assert master.wait(LAG_MS + 1) == ["0"]
    assert (master.acknowledged, master.confirmed) == (0, 0)


def test_what_a_lost_member_has_still_counts_as_a_copy() -> None:
    master = Master()
    master.end = 100
    master.acknowledge(100)
    master.replicas.disconnect(master.slaves[0])
    assert master.acknowledged == 100


@pytest.mark.parametrize(("least", "enough"), [(1, True), (2, True), (3, False)])
def test_writing_needs_a_number_of_members(least: int, enough: bool) -> None:
    master = Master(2, in_sync_least=least)
    master.acknowledge(0, 0)
    assert master.replicas.enough() == enough


# --- what readers see ----------------------------------------------------------------------------


def test_readers_see_what_all_members_have() -> None:
    master = Master(2)
    for slave in (0, 1):
        master.acknowledge(0, slave)
    master.end = 100
    assert master.confirmed == 0
    master.acknowledge(80, 0)
    master.acknowledge(60, 1)
    assert (master.confirmed, master.replicas.confirm_limit()) == (60, 60)


def test_readers_of_a_master_without_members_see_all() -> None:
    master = Master(0)
    master.end = 100
    assert (master.confirmed, master.replicas.confirm_limit()) == (100, NO_LIMIT)


def test_readers_see_nothing_new_with_too_few_members() -> None:
    master = Master(in_sync_least=2)
    master.acknowledge(0)
    master.end = 100
    master.acknowledge(100)
    assert master.confirmed == 100
    master.end = 200
    master.wait(LAG_MS + 1)
    assert (master.members, master.confirmed) == ([], 100)
    master.acknowledge(200)
    assert (master.members, master.confirmed) == (["0"], 200)


def test_a_new_master_begins_with_what_readers_could_see_before() -> None:
    replicas = Replicas(rules(in_sync_least=2), log_end=100, confirmed=80)
    assert replicas.confirm_offset(100) == 80


def test_the_confirm_offset_never_goes_back() -> None:
    master = Master(2)
    master.acknowledge(0)
    master.end = 100
    master.acknowledge(100)
    assert master.confirmed == 100
    master.end = 200
    master.reconnect()
    assert master.confirmed == 100
    master.acknowledge(50)
    assert master.members == []
    assert master.confirmed == 200
    master.acknowledge(150)
    assert master.confirmed == 200
