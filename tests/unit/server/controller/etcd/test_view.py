"""What a controller knows of the keys in etcd."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.controller.broker_set import BrokerSet
from penstock.server.controller.etcd.keys import Keys
from penstock.server.controller.etcd.messages import KeyValue
from penstock.server.controller.etcd.view import LiveValue, View
from penstock.server.controller.living_replicas import ReplicaKey

KEYS = Keys("/p/")
FIRST = ReplicaKey("b/1", 1)
SET = KEYS.broker_set("b/1")


def state(revision: int, epoch: int = 0) -> KeyValue:
    value = BrokerSet("c", "b/1", {}, 1, master_epoch=epoch).encode()
    return KeyValue(SET, value, 1, revision)


def replica(revision: int) -> KeyValue:
    return KeyValue(KEYS.replica(FIRST), msgspec.json.encode(LiveValue(epoch=1)), 1, revision, 7)


def deletion(kv: KeyValue, revision: int) -> KeyValue:
    return KeyValue(kv.key, mod_revision=revision)


def gone(view: View) -> list[ReplicaKey]:
    return [view.gone.get_nowait() for _ in range(view.gone.qsize())]


def test_keys_name_sets_and_replicas() -> None:
    for name in ("b", "a/b", "ä ö", "%2F"):
        assert KEYS.set_of(KEYS.broker_set(name)) == name
        assert KEYS.replica_of(KEYS.replica(ReplicaKey(name, 12))) == ReplicaKey(name, 12)
    assert KEYS.replica_of(SET) is None
    assert KEYS.set_of(KEYS.replica(FIRST)) is None
    assert KEYS.replica_of(b"/p/live/b/x") is None
    assert KEYS.replica_of(b"/p/live/b/" + b"1" * 30) is None


def test_the_newest_revision_counts() -> None:
    view = View(KEYS)
    view.changed(state(5, epoch=5))
    view.learn(state(4, epoch=4))
    assert view.states["b/1"][1].master_epoch == 5
    view.learn(state(7, epoch=7))
    view.changed(state(6, epoch=6))  # the watch is behind the own write
    assert view.states["b/1"][1].master_epoch == 7


def test_what_was_deleted_does_not_come_back_by_an_old_answer() -> None:
    view = View(KEYS)
    for kv in (state(5), replica(6)):
        view.changed(kv)
        view.deleted(deletion(kv, 7))
        view.learn(kv)
    assert (view.states, view.replicas) == ({}, {})


def test_an_old_deletion_does_not_remove_a_newer_key() -> None:
    view = View(KEYS)
    view.learn(replica(9))
    view.deleted(deletion(replica(0), 8))
    assert FIRST in view.replicas


def test_only_deletions_that_are_reported_in_time_are_deaths() -> None:
    view = View(KEYS)
    for late, expected in ((True, []), (False, [FIRST])):
        view.changed(replica(view.revision + 1))
        view.deleted(deletion(replica(0), view.revision + 1), late=late)
        assert gone(view) == expected
    view.changed(replica(view.revision + 1))
    view.reset([], view.revision + 1)
    assert (view.replicas, gone(view)) == ({}, [])


def test_damaged_values_do_not_stop_the_view() -> None:
    view = View(KEYS)
    view.reset(
        [KeyValue(SET, b"{", 1, 2), KeyValue(KEYS.replica(FIRST), b"\xff", 1, 2), state(3)], 4
    )
    assert FIRST in view.replicas
    assert "b/1" in view.states


def test_views_need_no_event_loop_of_their_own() -> None:
    async def main() -> None:
        view = View(KEYS)
        view.changed(replica(2))
        view.deleted(deletion(replica(0), 3))
        assert await view.gone.get() == FIRST

    asyncio.run(main())
