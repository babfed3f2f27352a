"""Queue locks: one owner, a lease, and the two requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.locking import LockingHandlers
from penstock.broker.ordering import QueueLocks
from penstock.config import Live
from penstock.wire import fastjson
from penstock.wire.bodies import LockBatchRequestBody, LockBatchResponseBody, MessageQueue
from tests.unit.membership_kit import NOW_MS, Bench, change, make_bench, settings

LEASE_MS = 60_000
Q0, Q1, Q2 = (MessageQueue("T", "broker-a", n) for n in range(3))
LOCK, UNLOCK = 41, 42


@pytest.fixture
def live() -> Live:
    return settings()


@pytest.fixture
def locks(live: Live) -> QueueLocks:
    return QueueLocks(live)


def test_a_queue_has_one_owner_per_group(locks: QueueLocks) -> None:
    assert locks.lock("g", "me", [Q0, Q1, Q0], NOW_MS) == [Q0, Q1]
    assert locks.lock("g", "you", [Q1, Q2], NOW_MS) == [Q2]
    assert locks.lock("other", "you", [Q1], NOW_MS) == [Q1]
    assert locks.lock("g", "me", [Q0, Q1, Q2], NOW_MS) == [Q0, Q1]


def test_lease_ends_unless_it_is_renewed(locks: QueueLocks) -> None:
    locks.lock("g", "me", [Q0, Q1], NOW_MS)
    assert locks.lock("g", "me", [Q0], NOW_MS + LEASE_MS) == [Q0]
    assert locks.lock("g", "you", [Q0, Q1], NOW_MS + LEASE_MS) == []
    assert locks.lock("g", "you", [Q0, Q1], NOW_MS + LEASE_MS + 1) == [Q1]
    assert locks.lock("g", "me", [Q1], NOW_MS + LEASE_MS + 2) == []


def test_only_the_owner_unlocks(locks: QueueLocks) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    locks.unlock("g", "you", [Q0])
    assert locks.lock("g", "you", [Q0], NOW_MS) == []
    locks.unlock("g", "me", [Q0, Q1, Q0])
    assert not locks.is_locked("g", NOW_MS)
    assert locks.lock("g", "you", [Q0], NOW_MS) == [Q0]
    locks.unlock("nobody", "me", [Q0])


def test_group_is_locked_while_any_lease_runs(locks: QueueLocks, live: Live) -> None:
    assert not locks.is_locked("g", NOW_MS)
    locks.lock("g", "me", [Q0], NOW_MS)
    assert locks.is_locked("g", NOW_MS + LEASE_MS)
    assert not locks.is_locked("g", NOW_MS + LEASE_MS + 1)
    change(live, lock_lease_ms=90_000)
    assert locks.is_locked("g", NOW_MS + LEASE_MS + 1)


def test_locks_of_those_who_never_come_back_are_forgotten(locks: QueueLocks) -> None:
    for number in range(50):
        locks.lock(f"g{number}", "me", [Q0], NOW_MS + number)
    locks.lock("late", "me", [], NOW_MS + LEASE_MS + 50)
    assert locks._groups == {}


# --- requests


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = make_bench(tmp_path)
    bench.serve(LockingHandlers(bench.parts))
    bench.topics.ensure("T", 3, 6, NOW_MS)
    yield bench
    bench.store.close()


def wanted(client_id: str, *queues: MessageQueue, group: str = "g") -> bytes:
    body = LockBatchRequestBody(consumer_group=group, client_id=client_id, mq_set=list(queues))
    return fastjson.encode(body)


def test_lock_request_answers_what_the_client_owns(bench: Bench) -> None:
    bench.ask(LOCK, wanted("you", Q1))
    reply = bench.ask(LOCK, wanted("me", Q0, Q1, Q2))
    assert reply.code == 0
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0, Q2]
    assert b'"lockOKMQSet":[' in reply.body
    assert bench.ask(LOCK, wanted("late", Q0)).body == b'{"lockOKMQSet":[]}'


def test_unlock_request_gives_queues_back(bench: Bench) -> None:
    bench.ask(LOCK, wanted("me", Q0))
    assert bench.ask(UNLOCK, wanted("me", Q0)).code == 0
    reply = bench.ask(LOCK, wanted("you", Q0))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0]


@pytest.mark.parametrize("code", [LOCK, UNLOCK])
def test_locks_without_a_name_are_refused(bench: Bench, code: int) -> None:
    assert bench.ask(code, wanted("", Q0)).code == 29
    assert bench.ask(code, wanted("me", Q0, group="")).code == 29
    assert bench.ask(code, b"[").code == 29


def test_queues_that_are_not_there_are_nobodys(bench: Bench) -> None:
    bench.topics.ensure("%RETRY%g", 1, 6, NOW_MS)
    retry = MessageQueue("%RETRY%g", "broker-a", 0)
    strangers = [MessageQueue("unknown", "broker-a", 0), MessageQueue("T", "broker-a", 3)]
    reply = bench.ask(LOCK, wanted("me", *strangers, Q0, retry, MessageQueue("T", "broker-a", -1)))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0, retry]
    bench.ask(LOCK, wanted("me", *strangers, group="other"))
    assert not bench.locks.is_locked("other", NOW_MS)


def test_groups_that_may_not_be_made_lock_nothing(bench: Bench) -> None:
    change(bench.live, auto_create_groups=False)
    assert bench.ask(LOCK, wanted("me", Q0)).code == 26
    assert not bench.locks.is_locked("g", NOW_MS)


@pytest.mark.parametrize("code", [LOCK, UNLOCK])
def test_too_many_queues_at_once_are_refused(bench: Bench, code: int) -> None:
    queues = [MessageQueue("T", "broker-a", n) for n in range(10_001)]
    reply = bench.ask(code, wanted("me", *queues))
    assert reply.code == 29
    assert "10001 queues, the limit is 10000" in (reply.remark or "")
    assert bench.ask(code, wanted("me", *queues[:-1])).code == 0
