"""What a controller knows of the keys in etcd."""

from __future__ import annotations

import msgspec
import pytest

from penstock.controller.broker_set import BrokerSet
from penstock.server.controller.etcd.etcd_keys import Keys, ReportKey
from penstock.server.controller.etcd.etcd_messages import KeyValue
from penstock.server.controller.etcd.view import LiveValue, View
from penstock.server.controller.living_replicas import ReplicaKey

KEYS = Keys("/p/")
FIRST = ReplicaKey("b/1", 1)
SET = KEYS.broker_set("b/1")
OWN, OTHER, THIRD = 1, 2, 3


def state(revision: int, epoch: int = 0) -> KeyValue:
    value = BrokerSet("c", "b/1", {}, 1, master_epoch=epoch).encode()
    return KeyValue(SET, value, 1, revision)


def report(revision: int, controller: int = OTHER) -> KeyValue:
    value = msgspec.json.encode(LiveValue(epoch=1))
    return KeyValue(KEYS.report(FIRST, controller), value, 1, revision, 7)


def deletion(kv: KeyValue, revision: int) -> KeyValue:
    return KeyValue(kv.key, mod_revision=revision)


def gone(view: View) -> list[ReplicaKey]:
    return [view.gone.get_nowait() for _ in range(view.gone.qsize())]


def test_keys_name_sets_and_replicas() -> None:
    for name in ("b", "a/b", "ä ö", "%2F"):
        assert KEYS.set_of(KEYS.broker_set(name)) == name
        key = ReportKey(ReplicaKey(name, 12), 34)
        assert KEYS.report_of(KEYS.report(*key)) == key
    assert KEYS.report_of(SET) is None
    assert KEYS.set_of(KEYS.report(FIRST, 1)) is None
    for strange in (b"x/1", b"1/x", b"1", b"1/" + b"1" * 30, b"1/2/3"):
        assert KEYS.report_of(b"/p/live/b/" + strange) is None


def test_the_newest_revision_counts() -> None:
    view = View(KEYS, OWN)
    view.changed(state(5, epoch=5))
    view.learn(state(4, epoch=4))
    assert view.states["b/1"][1].master_epoch == 5
    view.learn(state(7, epoch=7))
    view.changed(state(6, epoch=6))  # the watch is behind the own write
    assert view.states["b/1"][1].master_epoch == 7


def test_what_was_deleted_does_not_come_back_by_an_old_answer() -> None:
    view = View(KEYS, OWN)
    for kv in (state(5), report(6), report(6, OWN)):
        view.changed(kv)
        view.deleted(deletion(kv, 7))
        view.learn(kv)
    assert (view.states, view.reports, view.own_reports) == ({}, {}, {})


@pytest.mark.parametrize("controller", [OWN, OTHER])
def test_an_old_deletion_does_not_remove_a_newer_key(controller: int) -> None:
    view = View(KEYS, OWN)
    view.learn(report(9, controller))
    view.deleted(deletion(report(0, controller), 8))
    assert FIRST in (view.own_reports if controller == OWN else view.reports)


def test_a_replica_is_gone_when_the_last_report_of_another_controller_is() -> None:
    view = View(KEYS, OWN)
    for revision, controller in enumerate((OWN, OTHER, THIRD), 2):
        view.changed(report(revision, controller))
    view.deleted(deletion(report(0, OWN), 10))
    view.deleted(deletion(report(0, OTHER), 11))
    assert gone(view) == []
    view.deleted(deletion(report(0, THIRD), 12))
    assert gone(view) == [FIRST]


def test_only_deletions_that_are_reported_in_time_are_deaths() -> None:
    view = View(KEYS, OWN)
    for late, expected in ((True, []), (False, [FIRST])):
        view.changed(report(view.revision + 1))
        view.deleted(deletion(report(0), view.revision + 1), late=late)
        assert gone(view) == expected
    view.changed(report(view.revision + 1))
    view.reset([], view.revision + 1)
    assert (view.reports, gone(view)) == ({}, [])


def test_a_replica_is_forgotten_with_all_its_reports() -> None:
    view = View(KEYS, OWN)
    for revision, controller in enumerate((OWN, OTHER, THIRD), 2):
        view.changed(report(revision, controller))
    view.forget_replica(FIRST, 3)
    assert set(view.reports[FIRST]) == {OTHER, THIRD}  # they are newer, or as new
    view.forget_replica(FIRST, 5)
    assert (view.reports, view.own_reports, gone(view)) == ({}, {}, [FIRST])


def test_damaged_values_do_not_stop_the_view() -> None:
    view = View(KEYS, OWN)
    view.reset([KeyValue(SET, b"{", 1, 2), KeyValue(report(0).key, b"\xff", 1, 2), state(3)], 4)
    assert FIRST in view.reports
    assert "b/1" in view.states
