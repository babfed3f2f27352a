"""Queue locks: one owner, a lease, and the two requests."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from penstock.broker.consumers.lock_requests import LockingHandlers
from penstock.broker.consumers.queue_locks import QueueLocks
from penstock.config import Live
from penstock.rpc.answers import Answer, InThread, PersistSoon, PersistTable, RegisterSoon
from penstock.rpc.command import Command
from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
)
from tests.depth import rounds
from tests.unit.broker.consumers.membership_kit import NOW_MS, Bench, change, make_bench, settings
from tests.unit.store.conftest import WatchedDisk

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


def test_locks_are_forgotten_also_when_the_clock_was_far_ahead(locks: QueueLocks) -> None:
    locks.lock("g", "me", [Q0], NOW_MS + 10 * 365 * 86_400_000)
    locks.lock("g", "you", [Q0], NOW_MS)
    locks.lock("late", "me", [], NOW_MS + LEASE_MS + 1)
    assert locks._groups == {}


def test_a_lease_does_not_last_longer_when_the_clock_is_set_back(locks: QueueLocks) -> None:
    back_ms = NOW_MS - 3_600_000
    locks.lock("g", "gone", [Q0], NOW_MS)
    locks.lock("g", "mine", [Q1], NOW_MS)
    assert locks.lock("g", "you", [Q0, Q1], back_ms) == []
    assert locks.lock("g", "mine", [Q1], back_ms + 1) == [Q1]
    assert locks.lock("g", "you", [Q0, Q1], back_ms + LEASE_MS) == []
    assert locks.lock("g", "you", [Q0, Q1], back_ms + LEASE_MS + 1) == [Q0]


class LockHistory(RuleBasedStateMachine):
    """Clients take, renew and give back queues while time passes, writes last or fail, and the
    broker dies; a client counts itself the owner for a lease after a lock that it was told of, as
    Java's do for half of one."""

    def __init__(self) -> None:
        super().__init__()
        self.live = settings()
        self.locks = QueueLocks(self.live)
        self.file = self.locks.snapshot()
        self.now_ms = self.started_ms = NOW_MS
        self.held: dict[MessageQueue, int] = {}  # until when, by the broker
        self.owners: dict[MessageQueue, tuple[str, int]] = {}  # by those who were told
        self.unsaved: list[tuple[str, MessageQueue, int]] = []
        self.waiting: list[tuple[str, MessageQueue, int]] = []
        self.writing: bytes | None = None

    clients = st.sampled_from(["a", "b"])
    queues = st.lists(st.sampled_from([Q0, Q1]), min_size=1, max_size=2)
    times = st.sampled_from([0, 1_000, LEASE_MS // 2, LEASE_MS // 2 + 1, LEASE_MS, LEASE_MS + 1])

    @rule(client=clients, queues=queues)
    def lock(self, client: str, queues: list[MessageQueue]) -> None:
        got = self.locks.lock("g", client, queues, self.now_ms)
        answer = [(client, queue, self.now_ms) for queue in got]
        if self.locks.are_noted("g", got):
            self.tell(answer)
        else:
            self.unsaved += answer
            self.write()
        self.held.update((queue, self.now_ms + LEASE_MS) for queue in got)
        for queue in set(queues) - set(got):
            # After a start a lease may last longer than its owner knows.
            assert self.now_ms <= max(self.held.get(queue, 0), self.started_ms + LEASE_MS)

    def tell(self, answer: list[tuple[str, MessageQueue, int]]) -> None:
        for client, queue, at_ms in answer:
            owner, until_ms = self.owners.get(queue, (client, 0))
            assert owner == client or at_ms > until_ms
            self.owners[queue] = (client, at_ms + LEASE_MS)

    def write(self) -> None:
        """As a server does: one write at a time."""
        if self.writing is not None:
            return
        self.waiting, self.unsaved = self.unsaved, []
        if self.locks.dirty:
            self.writing = self.locks.snapshot()
        elif self.waiting:
            self.locks.note()
            self.tell(self.waiting)

    @rule(fails=st.booleans())
    def end_the_write(self, fails: bool) -> None:
        if self.writing is None:
            return
        if fails:  # and the answers are lost as well
            self.locks.dirty = True
        else:
            self.file = self.writing
            self.locks.note()
            self.tell(self.waiting)
        self.writing = None
        if self.unsaved:
            self.write()

    @rule(client=clients, queues=queues)
    def unlock(self, client: str, queues: list[MessageQueue]) -> None:
        self.locks.unlock("g", client, queues)
        for answers in (self.unsaved, self.waiting):
            answers[:] = [one for one in answers if one[0] != client or one[1] not in queues]
        for queue in queues:
            if self.owners.get(queue, ("", 0))[0] == client:
                del self.owners[queue]

    @rule(ms=times)
    def let_time_pass(self, ms: int) -> None:
        self.now_ms += ms
        self.write()  # as the broker does now and then

    @rule(ms=times)
    def let_the_broker_die(self, ms: int) -> None:
        self.now_ms += ms
        self.started_ms = self.now_ms
        self.locks = load(self.live, self.file, self.now_ms)
        self.unsaved, self.waiting, self.writing = [], [], None


LockHistory.TestCase.settings = hypothesis.settings(
    max_examples=rounds(ci=100, proof=5000), stateful_step_count=40, deadline=None
)
TestLockHistory = LockHistory.TestCase


# --- the file


def load(live: Live, data: bytes, now_ms: int) -> QueueLocks:
    """The locks of a broker that starts with this file."""
    locks = QueueLocks(live)
    locks.load(cast(ConfigFile, SimpleNamespace(load=lambda parse: parse(data))), now_ms)
    return locks


def test_locks_outlive_the_broker(locks: QueueLocks, live: Live) -> None:
    locks.lock("g", "me", [Q0, Q1], NOW_MS)
    assert locks.dirty
    again = load(live, locks.snapshot(), NOW_MS + 5_000)
    assert not locks.dirty
    assert again.lock("g", "you", [Q0, Q2], NOW_MS + 5_000) == [Q2]
    assert again.lock("g", "me", [Q0], NOW_MS + LEASE_MS) == [Q0]
    # What nobody renews any more passes on: a lease after the start at the latest.
    assert again.lock("g", "you", [Q1], NOW_MS + LEASE_MS + 5_000 + 1) == [Q1]


def test_leases_that_ended_while_the_broker_was_down_are_over(
    locks: QueueLocks, live: Live
) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    again = load(live, locks.snapshot(), NOW_MS + 2 * LEASE_MS)
    assert again._groups == {}


def test_the_file_follows_renewals(locks: QueueLocks, live: Live) -> None:
    writes = 0
    for ms in range(0, 10 * LEASE_MS, 10_000):
        locks.lock("g", "me", [Q0], NOW_MS + ms)
        if not locks.are_noted("g", [Q0]):
            data = locks.snapshot()
            locks.note()
            writes += 1
    assert writes == 15  # every 40 s
    dead_ms = NOW_MS + ms
    again = load(live, data, dead_ms + LEASE_MS)
    assert again.lock("g", "you", [Q0], dead_ms + LEASE_MS) == []


def test_a_renewal_waits_for_a_file_that_is_far_behind(locks: QueueLocks, live: Live) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    data = locks.snapshot()
    assert not locks.are_noted("g", [Q0]), "it is not written yet"
    locks.note()
    locks.lock("g", "me", [Q0], NOW_MS + LEASE_MS // 2)
    assert locks.are_noted("g", [Q0])
    again = load(live, data, NOW_MS + LEASE_MS)
    again.lock("g", "me", [Q0], NOW_MS + LEASE_MS)
    assert not again.are_noted("g", [Q0])
    once_more = load(live, again.snapshot(), NOW_MS + LEASE_MS + 1)
    assert once_more.lock("g", "you", [Q0], NOW_MS + 2 * LEASE_MS) == []


@pytest.mark.parametrize("data", [b"[", b"{}", b'{"locks":[["g","t",0,"me"]]}'])
def test_a_damaged_file_is_no_reason_not_to_start(tmp_path: Path, live: Live, data: bytes) -> None:
    disk = WatchedDisk()
    path = tmp_path / "locks.json"
    path.write_bytes(data)
    locks = QueueLocks(live)
    locks.load(ConfigFile(disk, path), NOW_MS)
    assert locks.lock("g", "me", [Q0], NOW_MS) == [Q0]


# --- requests


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = make_bench(tmp_path)
    bench.serve(LockingHandlers(bench.locks, bench.groups, bench.topics, bench.effects))
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


def ask_to_lock(bench: Bench, client_id: str) -> Answer:
    body = wanted(client_id, Q0)
    return bench.router.handle(
        Command(LOCK, {}, body, client=1, peer="10.0.0.1:99", now_ms=NOW_MS, version=479)
    )


def test_a_new_owner_is_on_the_disk_before_it_is_told(bench: Bench) -> None:
    first = ask_to_lock(bench, "me")
    write = bench.persistence.save(bench.locks)
    renewal = ask_to_lock(bench, "me")  # while the first is being written
    for answer in (first, renewal):
        assert isinstance(answer, PersistTable)
        assert answer.table is bench.locks
    write()
    assert isinstance(first, PersistTable)
    first.then(True)
    again = QueueLocks(bench.live)
    again.load(bench.persistence.file(QueueLocks.FILE), NOW_MS)
    assert again.lock("g", "you", [Q0], NOW_MS) == []
    assert not bench.locks.dirty
    assert isinstance(ask_to_lock(bench, "me"), InThread), "nothing new: nothing is written"


def test_a_queue_has_one_owner_whatever_the_broker_is_called(bench: Bench) -> None:
    bench.ask(LOCK, wanted("me", Q0))
    alias = MessageQueue("T", "another-name", 0)
    assert bench.ask(LOCK, wanted("you", alias)).body == b'{"lockOKMQSet":[]}'
    reply = bench.ask(LOCK, wanted("me", alias))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [alias]
    assert len(bench.locks._groups["g"]) == 1


def test_a_client_id_that_would_swell_the_file_is_refused(bench: Bench) -> None:
    reply = bench.ask(LOCK, wanted("m" * 1_025, Q0))
    assert (reply.code, bench.locks._groups) == (29, {})
    assert bench.ask(LOCK, wanted("m" * 1_024, Q0)).code == 0


def test_owners_are_told_also_when_the_disk_fails(bench: Bench, monkeypatch: Any) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(bench.store.disk, "replace", fail)
    reply = bench.ask(LOCK, wanted("me", Q0))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0]
    assert bench.locks.dirty  # to be tried again
    assert isinstance(ask_to_lock(bench, "me"), PersistTable)


def test_unlock_request_gives_queues_back(bench: Bench) -> None:
    bench.ask(LOCK, wanted("me", Q0))
    bench.effects.take()
    assert bench.ask(UNLOCK, wanted("me", Q0)).code == 0
    assert bench.effects.take() == [PersistSoon(bench.locks)]
    assert bench.ask(UNLOCK, wanted("me", Q0)).code == 0
    assert bench.effects.take() == []
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


# --- ordered topics


def test_topics_with_an_order_config_are_ordered(bench: Bench) -> None:
    bench.topics.ensure("U", 1, 6, NOW_MS)
    bench.effects.take()
    version = bench.topics.table.version
    bench.topics.mark_ordered({"T": "broker-a:2", "unknown": "broker-a:1"}, NOW_MS)
    assert [bench.topics.need(name).order for name in "TU"] == [True, False]
    assert bench.topics.get("unknown") is None
    assert bench.topics.table.version != version
    assert bench.effects.take() == [PersistSoon(bench.topics.table), RegisterSoon()]
    # Each registration tells it again, and a config may be gone: nothing changes.
    bench.topics.mark_ordered({"T": "broker-a:2"}, NOW_MS)
    bench.topics.mark_ordered({}, NOW_MS)
    assert bench.topics.need("T").order
    assert bench.effects.take() == []
