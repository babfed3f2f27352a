"""Incomplete logs count only when they have looked the same for long enough."""

import msgspec

from penstock.controller.broker_set import BrokerSet, LiveReplica, Living
from penstock.server.controller.unchanged_logs import UNCHANGED_MS, UNSEEN_MS, UnchangedLogs

STATE = BrokerSet("cluster", "b", {}, 4, master_epoch=2, in_sync=(1, 2))
SHORT = LiveReplica(epoch=2, max_offset=100, complete=False)
LONG = SHORT._replace(max_offset=200)
STEP_MS = 500


class Looks:
    """Looks at the logs again and again."""

    def __init__(self) -> None:
        self._logs = UnchangedLogs()
        self._now_ms = 1_000_000

    def count(self, living: Living, for_ms: int, state: BrokerSet = STATE) -> bool:
        """Whether the logs count after they have looked like this for a while."""
        for _ in range(0, for_ms, STEP_MS):
            marked = self._logs.mark(state, living, self._now_ms)
            self._now_ms += STEP_MS
        assert {one: live._replace(changing=False) for one, live in marked.items()} == living
        assert len({live.changing for live in marked.values()}) == 1
        return not marked[1].changing

    def pause(self, ms: int) -> None:
        self._now_ms += ms


def test_logs_count_after_they_have_not_changed_for_long_enough() -> None:
    looks = Looks()
    assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS)
    assert looks.count({1: SHORT, 2: LONG}, STEP_MS)


def test_a_change_of_a_log_begins_the_time_again() -> None:
    looks = Looks()
    assert not looks.count({1: SHORT, 2: SHORT}, UNCHANGED_MS)
    assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS)
    assert looks.count({1: SHORT, 2: LONG}, STEP_MS)


def test_a_time_in_which_nobody_looked_does_not_count() -> None:
    looks = Looks()
    assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS)
    looks.pause(UNSEEN_MS)
    assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS)
    assert looks.count({1: SHORT, 2: LONG}, STEP_MS)


def test_a_member_that_was_complete_or_away_begins_the_time_again() -> None:
    for interruption in ({1: SHORT, 2: LONG._replace(complete=True)}, {1: SHORT}):
        looks = Looks()
        assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS)
        assert looks.count(interruption, STEP_MS)
        assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS)


def test_the_members_before_the_election_are_those_that_matter() -> None:
    elected = msgspec.structs.replace(STATE, in_sync=(2,), before=(1, 2))
    looks = Looks()
    assert looks.count({1: SHORT._replace(complete=True), 2: LONG}, STEP_MS, elected)
    assert not looks.count({1: SHORT, 2: LONG}, UNCHANGED_MS, elected)
