"""The decisions of a controller: ids, elections, in-sync sets."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.controller import decisions
from penstock.controller.broker_set import (
    HISTORY_MAX,
    REPLICAS_MAX,
    BrokerSet,
    LiveReplica,
    Living,
    ReplicaRecord,
    decode_broker_set,
)
from penstock.controller.decisions import ControllerDecision
from penstock.errors import StoreDamaged
from penstock.wire.codes import ResponseCode
from tests.depth import rounds

NAME = "b"
NOW_MS = 1_700_000_000_000


def alive(*ids: int) -> Living:
    return dict.fromkeys(ids, LiveReplica())


def broker_set(
    count: int, *, master: int | None = 1, in_sync: tuple[int, ...] = (1,), epoch: int = 1
) -> BrokerSet:
    addresses = {one: f"host-{one}:1" for one in range(1, count + 1)}
    replicas = {one: ReplicaRecord(at, f"{at};0") for one, at in addresses.items()}
    return BrokerSet("c", NAME, replicas, count + 1, master, epoch, in_sync, epoch)


def after(decision: ControllerDecision) -> BrokerSet:
    assert decision.state is not None
    return decision.state


# --- ids


def test_ids_are_given_in_order_and_once() -> None:
    assert decisions.next_id(None) == 1
    first = decisions.apply_id(None, "c", NAME, 1, "a:1;77")
    assert (first.code, first.changed) == (0, True)
    state = after(first)
    assert state.replicas[1].address == "a:1"
    again = decisions.apply_id(state, "c", NAME, 1, "a:1;77")
    assert (again.code, again.changed) == (0, False)
    for number, code in ((1, "other:1;78"), (3, "b:1;79")):
        refused = decisions.apply_id(state, "c", NAME, number, code)
        assert refused.code == ResponseCode.CONTROLLER_BROKER_ID_INVALID
    second = after(decisions.apply_id(state, "c", NAME, 2, "b:1;79"))
    assert decisions.next_id(second) == 3


def test_the_number_of_replicas_is_limited() -> None:
    full = broker_set(REPLICAS_MAX)
    refused = decisions.apply_id(full, "c", NAME, full.next_id, "x:1;1")
    assert (refused.code, refused.changed) == (ResponseCode.CONTROLLER_BROKER_ID_INVALID, False)
    assert str(REPLICAS_MAX) in refused.remark


def test_the_first_id_of_an_unknown_set_is_1() -> None:
    refused = decisions.apply_id(None, "c", NAME, 2, "a:1;1")
    assert refused.code == ResponseCode.CONTROLLER_BROKER_ID_INVALID


def test_a_replica_may_move_to_another_address() -> None:
    for living in ({}, {1: LiveReplica(presumed=True)}):
        moved = decisions.register(broker_set(1), NAME, living, 1, "new:1")
        assert (moved.changed, after(moved).replicas[1].address) == (True, "new:1")
        assert not decisions.register(after(moved), NAME, living, 1, "new:1").changed
    for state, number in ((None, 1), (broker_set(1), 2)):
        refused = decisions.register(state, NAME, {}, number, "x:1")
        assert refused.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED


def test_a_replica_that_is_alive_is_not_taken_for_another_broker() -> None:
    """Two brokers with copies of one data directory would both lead."""
    state = broker_set(1)
    living = {1: LiveReplica()}
    copied = decisions.register(state, NAME, living, 1, "copy:1")
    assert (copied.changed, copied.code) == (False, ResponseCode.CONTROLLER_BROKER_ID_INVALID)
    assert decisions.register(state, NAME, living, 1, state.replicas[1].address).code == 0


# --- elections


def test_the_first_replica_that_asks_is_the_first_master() -> None:
    state = broker_set(2, master=None, in_sync=(), epoch=0)
    elected = decisions.elect(state, NAME, {}, asking=2, now_ms=NOW_MS)
    assert elected.elected
    assert (after(elected).master_id, after(elected).master_epoch) == (2, 1)
    assert after(elected).in_sync == (2,)


def test_a_living_master_stays() -> None:
    kept = decisions.elect(
        broker_set(2, in_sync=(1, 2)), NAME, alive(1, 2), asking=2, now_ms=NOW_MS
    )
    assert (kept.code, kept.changed) == (ResponseCode.CONTROLLER_MASTER_STILL_EXIST, False)


def test_the_replica_with_the_highest_epoch_and_the_longest_log_is_elected() -> None:
    state = broker_set(5, in_sync=(1, 2, 3, 4, 5))
    living = {
        2: LiveReplica(epoch=1, max_offset=900),
        3: LiveReplica(epoch=2, max_offset=100, priority=2),
        4: LiveReplica(epoch=2, max_offset=200, priority=2),
        5: LiveReplica(epoch=2, max_offset=200, priority=1),
    }
    elected = decisions.elect(state, NAME, living, now_ms=NOW_MS)
    assert (after(elected).master_id, after(elected).master_epoch) == (5, 2)
    assert (after(elected).in_sync, after(elected).in_sync_epoch) == ((5,), 2)


def test_a_replica_outside_of_the_in_sync_set_is_elected_only_by_an_unclean_election() -> None:
    state = broker_set(2, in_sync=(1,))
    failed = decisions.elect(state, NAME, alive(2), asking=2, now_ms=NOW_MS)
    assert (failed.code, failed.changed) == (ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, False)
    without = decisions.elect(state, NAME, alive(2), now_ms=NOW_MS)
    assert without.code == ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
    assert (after(without).master_id, after(without).in_sync) == (None, (1,))
    back = decisions.elect(after(without), NAME, alive(1, 2), asking=1, now_ms=NOW_MS)
    assert after(back).master_id == 1
    unclean = decisions.elect(state, NAME, alive(2), unclean=True, now_ms=NOW_MS)
    assert after(unclean).master_id == 2


def test_a_designated_replica_replaces_a_living_master() -> None:
    state = broker_set(3, in_sync=(1, 2))
    chosen = decisions.elect(state, NAME, alive(1, 2, 3), asking=2, designated=True, now_ms=NOW_MS)
    assert after(chosen).master_id == 2
    refused = decisions.elect(state, NAME, alive(1, 2, 3), asking=3, designated=True, now_ms=NOW_MS)
    assert refused.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED


def test_a_master_that_asks_has_been_started_and_gets_another_epoch() -> None:
    state = broker_set(2, in_sync=(1, 2))
    again = decisions.elect(state, NAME, alive(1, 2), asking=1, now_ms=NOW_MS)
    assert (after(again).master_id, after(again).master_epoch) == (1, 2)
    assert (after(again).in_sync, after(again).in_sync_epoch) == ((1,), 2)
    # Not if its heartbeats have not arrived: another member is alive.
    other = decisions.elect(state, NAME, alive(2), asking=1, now_ms=NOW_MS)
    assert after(other).master_id == 2


def test_a_master_of_which_nothing_is_known_is_neither_replaced_nor_elected() -> None:
    """The controller has started a moment ago. After a power failure of the master, the others have
    more of the log; they must stay electable."""
    state = broker_set(3, in_sync=(1, 2, 3))
    living = {1: LiveReplica(presumed=True), **alive(2, 3)}
    for asking in (None, 2):
        kept = decisions.elect(state, NAME, living, now_ms=NOW_MS, asking=asking)
        assert (kept.changed, kept.code) == (False, ResponseCode.CONTROLLER_MASTER_STILL_EXIST)
    refused = decisions.elect(state, NAME, living, now_ms=NOW_MS, asking=1)
    assert refused.changed is False
    assert refused.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
    incomplete = {**living, 1: LiveReplica(complete=False, takes_over=True)}
    assert after(decisions.elect(state, NAME, incomplete, now_ms=NOW_MS, asking=1)).master_id == 2


def test_an_incomplete_log_is_elected_only_if_all_members_have_one() -> None:
    state = broker_set(3, in_sync=(1, 2, 3))
    short, long = (LiveReplica(1, size, complete=False) for size in (100, 200))
    unsettled = dict.fromkeys((1, 2, 3), long._replace(changing=True))
    for living in ({2: long}, {1: short, 2: long}, {}, unsettled):
        refused = decisions.elect(state, NAME, living, asking=2, now_ms=NOW_MS)
        assert refused.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
    complete = {1: short, 2: long, 3: LiveReplica(1, 50)}
    assert after(decisions.elect(state, NAME, complete, asking=1, now_ms=NOW_MS)).master_id == 3
    without = broker_set(3, master=None, in_sync=(1, 2, 3))
    for before in (state, without):
        for asking in (1, 3):
            living = {1: short, 2: long, 3: short}
            elected = after(decisions.elect(before, NAME, living, asking=asking, now_ms=NOW_MS))
            assert (elected.master_id, elected.master_incomplete) == (2, True)
    designated = decisions.elect(state, NAME, living, asking=3, designated=True, now_ms=NOW_MS)
    assert designated.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
    unclean = after(decisions.elect(without, NAME, {1: short}, unclean=True, now_ms=NOW_MS))
    assert (unclean.master_id, unclean.master_incomplete) == (1, True)


def test_a_master_that_any_controller_hears_is_not_replaced_for_an_incomplete_log() -> None:
    state = broker_set(3, in_sync=(1, 2, 3))
    living = {1: LiveReplica(1, 50, complete=False), 2: LiveReplica(1, 50)}
    decision = decisions.elect(state, NAME, living, now_ms=NOW_MS, why_dead="no heartbeat")
    assert (decision.code, decision.changed) == (ResponseCode.CONTROLLER_MASTER_STILL_EXIST, False)
    assert after(decisions.elect(state, NAME, living, now_ms=NOW_MS, asking=2)).master_id == 2


def test_the_set_before_can_be_elected_until_the_master_has_taken_over() -> None:
    state = broker_set(3, in_sync=(1, 2, 3))
    ours = dict.fromkeys((1, 2, 3), LiveReplica(takes_over=True))
    dead = after(decisions.elect(state, NAME, {2: ours[2], 3: ours[3]}, now_ms=NOW_MS))
    assert (dead.master_id, dead.in_sync, dead.before) == (2, (2,), (1, 2, 3))
    next_one = after(decisions.elect(dead, NAME, {3: ours[3]}, now_ms=NOW_MS))
    assert (next_one.master_id, next_one.in_sync, next_one.before) == (3, (3,), (1, 2, 3))
    late = _take_over(next_one, 2, dead.master_epoch, dead.in_sync_epoch)
    assert late.code == ResponseCode.CONTROLLER_INVALID_MASTER
    taken = after(_take_over(next_one, 3, next_one.master_epoch, next_one.in_sync_epoch))
    assert (taken.in_sync, taken.before) == ((3,), ())
    assert taken.in_sync_epoch == next_one.in_sync_epoch + 1
    alone = decisions.elect(taken, NAME, {2: ours[2]}, now_ms=NOW_MS)
    assert alone.code == ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE


def test_a_replica_that_does_not_take_over_is_the_master_at_once() -> None:
    elected = decisions.elect(broker_set(3, in_sync=(1, 2, 3)), NAME, alive(2, 3), now_ms=NOW_MS)
    assert after(elected).before == ()


def _take_over(state: BrokerSet, master_id: int, epoch: int, number: int) -> ControllerDecision:
    return decisions.alter_in_sync(
        state,
        NAME,
        {},
        master_id=master_id,
        master_epoch=epoch,
        members=(master_id,),
        in_sync_epoch=number,
    )


@pytest.mark.parametrize("asking", [None, 7])
def test_an_unknown_broker_set_has_no_election(asking: int | None) -> None:
    refused = decisions.elect(None, NAME, alive(7), asking=asking, now_ms=NOW_MS)
    assert refused.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED


# --- the history


def test_the_history_names_the_reasons() -> None:
    state = broker_set(3, master=None, in_sync=(), epoch=0)
    state = after(decisions.elect(state, NAME, {}, asking=1, now_ms=1))
    state = msgspec.structs.replace(state, in_sync=(1, 2))
    state = after(decisions.elect(state, NAME, alive(2), why_dead="no heartbeats", now_ms=2))
    state = msgspec.structs.replace(state, in_sync=(1, 2))
    designated = decisions.elect(state, NAME, alive(1, 2), asking=1, designated=True, now_ms=3)
    state = after(decisions.elect(after(designated), NAME, alive(2), now_ms=4))
    state = after(decisions.elect(state, NAME, alive(2), asking=2, unclean=True, now_ms=5))
    assert [(one.epoch, one.master_id, one.time_ms, one.reason) for one in state.history] == [
        (1, 1, 1, "first master"),
        (2, 2, 2, "replica 1 is dead: no heartbeats"),
        (3, 1, 3, "asked for by an operator"),
        (3, None, 4, "replica 1 is dead; no other member of the in-sync set is alive"),
        (4, 2, 5, "there was no master; unclean: replica 2 was not in the in-sync set"),
    ]


def test_the_history_is_limited() -> None:
    state = broker_set(2, in_sync=(1, 2))
    for number in range(HISTORY_MAX + 5):
        state = msgspec.structs.replace(state, in_sync=(1, 2))
        other = alive(2 if state.master_id == 1 else 1)
        state = after(decisions.elect(state, NAME, other, now_ms=number))
    assert len(state.history) == HISTORY_MAX
    assert state.history[-1].time_ms == HISTORY_MAX + 4


def test_a_state_without_a_history_can_be_read() -> None:
    """As written by earlier versions."""
    data = b'{"cluster":"c","name":"b","replicas":{},"next_id":1}'
    assert decode_broker_set(data).history == ()


# --- the in-sync set


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ResponseCode.SUCCESS),
        ({"members": (1,)}, ResponseCode.SUCCESS),
        ({"master_id": 2}, ResponseCode.CONTROLLER_INVALID_MASTER),
        ({"master_epoch": 2}, ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH),
        ({"in_sync_epoch": 2}, ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH),
        ({"members": (1, 9)}, ResponseCode.CONTROLLER_INVALID_REPLICAS),
        ({"members": (1, 3)}, ResponseCode.CONTROLLER_BROKER_NOT_ALIVE),
        ({"members": (2,)}, ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
    ],
)
def test_only_the_present_master_alters_the_in_sync_set(
    changes: dict[str, object], code: int
) -> None:
    wanted = {"master_id": 1, "master_epoch": 1, "members": (2, 1), "in_sync_epoch": 1, **changes}
    decision = decisions.alter_in_sync(broker_set(3), NAME, alive(1, 2), **wanted)  # type: ignore[arg-type]
    assert decision.code == code
    if code == ResponseCode.SUCCESS:
        assert after(decision).in_sync == tuple(sorted(wanted["members"]))  # type: ignore[call-overload]
        assert after(decision).in_sync_epoch == 2
    else:
        assert not decision.changed


# --- removal


def test_living_replicas_are_removed_only_if_asked_for() -> None:
    state = broker_set(3, in_sync=(1, 2))
    for ids in ([2], None):
        refused = decisions.clean(state, NAME, alive(1, 2), ids=ids)
        assert refused.code == ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    without = after(decisions.clean(state, NAME, alive(1, 2), ids=[3]))
    assert sorted(without.replicas) == [1, 2]
    assert decisions.next_id(without) == 4  # the id 3 is not used again
    dead = after(decisions.clean(state, NAME, alive(2), ids=[1]))
    assert (dead.master_id, dead.in_sync) == (None, (2,))
    gone = decisions.clean(state, NAME, alive(1, 2), also_living=True)
    assert (gone.state, gone.changed) == (None, True)


# --- the stored form


def test_a_state_is_stored_and_read() -> None:
    state = broker_set(3, in_sync=(1, 3))
    assert decode_broker_set(state.encode()) == state
    for damaged in (b"", b"{}", state.encode()[:-1], b"\xff"):
        with pytest.raises(StoreDamaged):
            decode_broker_set(damaged)


# --- any sequence of requests


class ControllerMachine(RuleBasedStateMachine):
    """Replicas that live and die, masters that alter the in-sync set, elections.

    Whoever is elected cleanly was in the in-sync set.
    """

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.state = broker_set(count, master=None, in_sync=(), epoch=0)
        self.living: set[int] = set(range(1, count + 1))
        self.numbers = (0, 0)

    def take(self, decision: ControllerDecision) -> None:
        before = self.state
        if decision.changed:
            self.state = after(decision)
        else:
            assert decision.state == before
        if decision.elected and not before.never_elected:
            assert self.state.master_id in before.in_sync
            assert self.state.master_id in self.living
        numbers = self.state.master_epoch, self.state.in_sync_epoch
        assert numbers >= self.numbers
        if self.state.master_id != before.master_id and self.state.master_id is not None:
            assert numbers[0] == self.numbers[0] + 1
        self.numbers = numbers

    @rule(one=st.integers(1, 4))
    def die(self, one: int) -> None:
        self.living.discard(one)

    @rule(one=st.integers(1, 4))
    def live(self, one: int) -> None:
        if one in self.state.replicas:
            self.living.add(one)

    @rule(asking=st.none() | st.integers(1, 4), designated=st.booleans())
    def elect(self, asking: int | None, designated: bool) -> None:
        living = alive(*self.living)
        self.take(
            decisions.elect(
                self.state, NAME, living, asking=asking, designated=designated, now_ms=NOW_MS
            )
        )

    @rule(
        members=st.sets(st.integers(1, 5)),
        late=st.sampled_from([0, 0, 0, 1]),
        master=st.none() | st.integers(1, 4),
    )
    def alter(self, members: set[int], late: int, master: int | None) -> None:
        self.take(
            decisions.alter_in_sync(
                self.state,
                NAME,
                alive(*self.living),
                master_id=master or self.state.master_id or 1,
                master_epoch=self.state.master_epoch,
                members=members,
                in_sync_epoch=self.state.in_sync_epoch - late,
            )
        )

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert set(state.in_sync) <= set(state.replicas)
        assert state.in_sync == tuple(sorted(set(state.in_sync)))
        assert state.master_id is None or state.master_id in state.in_sync
        assert state.never_elected or state.in_sync


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(max_examples=rounds(ci=100, proof=2_000), deadline=None)
