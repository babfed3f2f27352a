"""What a replica does with what it learns from controllers."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replication.controlled_role import (
    UNSURE_MS,
    ControlledRole,
    Follow,
    Lead,
    SetState,
    TakeOver,
    read_ids,
)
from tests.depth import rounds

OWN, OTHER = 1, 2


def role(*, log_epoch: int = 0, log_complete: bool = True) -> ControlledRole:
    return ControlledRole(OWN, log_epoch=log_epoch, log_complete=log_complete, now_ms=0)


def news(
    master_id: int | None, epoch: int, *in_sync: int, number: int = 1, **more: bool
) -> SetState:
    address = "" if master_id is None else f"host-{master_id}:1"
    return SetState(master_id, address, epoch, frozenset(in_sync), number, **more)


def test_a_replica_follows_the_master_of_a_greater_epoch_once() -> None:
    one = role()
    assert one.learn(news(OTHER, 1, OTHER), 0) == Follow("host-2:1", 1)
    assert one.learn(news(OTHER, 1, OTHER, OWN, number=2), 0) is None
    assert one.learn(news(OTHER, 2, OTHER), 0) == Follow("host-2:1", 2)
    moved = news(OTHER, 2, OTHER)._replace(master_address="other:1")
    assert one.learn(moved, 0) == Follow("other:1", 2)
    assert not one.leads


def test_older_news_has_no_effect() -> None:
    one = role()
    assert one.learn(news(OWN, 3, OWN), 0) == Lead(3, frozenset({OWN}), 1)
    for old in (news(OTHER, 2, OTHER), news(OWN, 2, OWN), news(None, 2, OTHER)):
        assert one.learn(old, 0) is None
    assert (one.leads, one.epoch, one.needs_election) == (True, 3, False)


def test_a_master_learns_of_each_change_of_its_set() -> None:
    one = role()
    one.learn(news(OWN, 1, OWN), 0)
    assert one.learn(news(OWN, 1, OWN, OTHER, number=2), 0) == Lead(1, frozenset({OWN, OTHER}), 2)
    assert one.agreed(1, frozenset({OWN}), 3, 0) == Lead(1, frozenset({OWN}), 3)
    assert one.agreed(0, frozenset({OWN}), 4, 0) is None


def test_a_master_that_is_replaced_follows() -> None:
    one = role()
    one.learn(news(OWN, 1, OWN), 0)
    assert one.learn(news(OTHER, 2, OTHER), 0) == Follow("host-2:1", 2)
    assert not one.leads


def test_without_a_master_an_election_is_needed() -> None:
    one = role()
    assert not one.needs_election
    assert one.learn(news(None, 1, OWN), 0) is None
    assert one.needs_election
    one.learn(news(OTHER, 2, OTHER), 0)
    assert not one.needs_election


# --- a replica that has been started


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_started_replica_does_not_continue_an_epoch(epoch: int) -> None:
    one = role(log_epoch=4)
    assert one.learn(news(OWN, epoch, OWN, OTHER), 0) is None
    assert (one.leads, one.needs_election) == (False, True)
    assert not one.alive(0)  # so that RocketMQ's controllers elect a master
    assert one.learn(news(OWN, 5, OWN), 0) == Lead(5, frozenset({OWN}), 1)
    assert (one.needs_election, one.alive(0)) == (False, True)


def test_a_master_that_resigns_needs_another_election() -> None:
    one = role()
    one.learn(news(OWN, 2, OWN), 0)
    one.resign()
    assert one.learn(news(OWN, 2, OWN, OTHER, number=2), 0) is None
    assert one.learn(news(OTHER, 1, OTHER), 0) is None
    assert (one.leads, one.needs_election, one.alive(0)) == (False, True, False)
    assert one.learn(news(OWN, 3, OWN), 0) == Lead(3, frozenset({OWN}), 1)


def test_a_replica_without_a_store_does_not_lead() -> None:
    one = role()
    one.unable = True
    assert one.learn(news(OWN, 2, OWN, OTHER), 0) is None
    assert (one.complete, one.needs_election, one.alive(0)) == (False, True, False)
    one.unable = False
    assert one.complete
    assert one.learn(news(OWN, 2, OWN, OTHER), 0) == Lead(2, frozenset({OWN, OTHER}), 1)


@pytest.mark.parametrize(("text", "ids"), [("", []), ("3", [3]), ("1,2", [1, 2]), ("x,,-", [])])
def test_ids_in_a_field(text: str, ids: list[int]) -> None:
    assert read_ids(text) == frozenset(ids)


def test_an_incomplete_log_leads_only_if_the_controllers_knew() -> None:
    one = role(log_epoch=1, log_complete=False)
    assert not one.complete
    assert one.learn(news(OWN, 2, OWN), 0) is None
    assert one.needs_election
    assert one.learn(news(OWN, 3, OWN, master_incomplete=True), 0) == Lead(3, frozenset({OWN}), 1)
    assert one.complete  # what it has is the log now


def test_a_log_is_complete_when_a_master_has_given_it() -> None:
    one = role(log_epoch=1, log_complete=False)
    one.learn(news(OTHER, 2, OTHER), 0)
    one.caught_up()
    assert (one.complete, one.alive(0)) == (True, True)
    assert one.learn(news(OWN, 3, OWN), 0) == Lead(3, frozenset({OWN}), 1)


def test_rocketmqs_controllers_get_no_heartbeats_of_an_incomplete_log() -> None:
    one = role(log_complete=False)
    assert not one.alive(UNSURE_MS + 1)  # nothing is known of a master
    one.learn(news(OTHER, 1, OTHER), 100)
    assert not one.alive(UNSURE_MS + 50)
    one.learn(news(None, 1, OTHER), 200)
    assert not one.alive(UNSURE_MS + 100)
    assert one.alive(UNSURE_MS + 101)


# --- taking over


def test_an_elected_replica_takes_over_before_it_leads() -> None:
    one = role()
    elected = news(OWN, 2, OWN, number=5, taken_over=False)
    for _ in range(2):  # again if the answer is lost
        assert one.learn(elected, 0) == TakeOver(2, 5)
    assert (one.leads, one.needs_election) == (False, False)
    assert one.agreed(2, frozenset({OWN}), 6, 0) == Lead(2, frozenset({OWN}), 6)
    assert one.leads


def test_an_incomplete_log_takes_over_if_the_controllers_knew() -> None:
    one = role(log_complete=False)
    assert one.learn(news(OWN, 2, OWN, master_incomplete=True, taken_over=False), 0) is not None
    assert one.agreed(2, frozenset({OWN}), 6, 0) == Lead(2, frozenset({OWN}), 6)


def test_a_replica_that_is_replaced_before_it_takes_over_follows() -> None:
    one = role()
    one.learn(news(OWN, 2, OWN, taken_over=False), 0)
    assert one.learn(news(OTHER, 3, OTHER, taken_over=False), 0) == Follow("host-2:1", 3)
    assert one.agreed(2, frozenset({OWN}), 6, 0) is None
    assert not one.leads


# --- any news


class News(NamedTuple):
    """A SetState whose master is given by its epoch: each epoch has one."""

    has_master: bool
    epoch: int
    number: int
    incomplete: bool
    taken_over: bool


EPOCHS = 6
NEWS = st.builds(
    News, st.booleans(), st.integers(1, EPOCHS), st.integers(1, 5), st.booleans(), st.booleans()
)


@settings(max_examples=rounds(ci=100, proof=5_000))
@given(
    st.lists(NEWS, max_size=20),
    st.lists(st.sampled_from([OWN, OTHER]), min_size=EPOCHS, max_size=EPOCHS),
    st.integers(0, 4),
    st.booleans(),
)
def test_epochs_only_grow_and_no_election_counts_that_must_not(
    all_news: list[News], masters: list[int], log_epoch: int, complete: bool
) -> None:
    one = role(log_epoch=log_epoch, log_complete=complete)
    newest = 0
    for item in all_news:
        master_id = masters[item.epoch - 1]
        state = news(
            master_id if item.has_master else None,
            item.epoch,
            master_id,
            number=item.number,
            master_incomplete=item.incomplete,
            taken_over=item.taken_over,
        )
        action = one.learn(state, 0)
        assert one.epoch >= newest
        if isinstance(action, Lead):
            assert (master_id, action.epoch) == (OWN, one.epoch)
            assert action.epoch > log_epoch
            assert action.epoch == newest or state.taken_over
            assert complete or state.master_incomplete
            complete = True
        elif isinstance(action, Follow):
            assert (master_id, action.epoch) == (OTHER, one.epoch)
        elif isinstance(action, TakeOver):
            assert (master_id, action.epoch > newest) == (OWN, True)
        newest = one.epoch
        assert one.complete == complete
