"""Queue locks: one owner, a lease, and the two requests."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from penstock.broker.consumers.queue_locks import LockRequests, QueueLocks
from penstock.config import LiveSettings
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
from tests.unit.broker.consumers.membership_kit import (
    NOW_MS,
    ConsumerFixture,
    change,
    make_fixture,
    settings,
)
from tests.unit.store.conftest import WatchedDisk

LEASE_MS = 60_000
Q0, Q1, Q2 = (MessageQueue("T", "broker-a", n) for n in range(3))
LOCK, UNLOCK = 41, 42


@pytest.fixture
def live() -> LiveSettings:
    return settings()


@pytest.fixture
def locks(live: LiveSettings) -> QueueLocks:
    return QueueLocks(live)


def test_a_queue_has_one_owner_per_group(locks: QueueLocks) -> None:
    assert locks.lock("g", "me", [Q0, Q1, Q0], NOW_MS) == [Q0, Q1]
    assert locks.lock("g", "you", [Q1, Q2], NOW_MS) == [Q2]
    assert locks.lock("other", "you", [Q1], NOW_MS) == [Q1]
    assert locks.lock("g", "me", [Q0, Q1, Q2], NOW_MS) == [Q0, Q1]


def test_a_lease_expires_unless_it_is_renewed(locks: QueueLocks) -> None:
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


def test_a_group_is_locked_while_any_lease_is_valid(locks: QueueLocks, live: LiveSettings) -> None:
    assert not locks.is_locked("g", NOW_MS)
    locks.lock("g", "me", [Q0], NOW_MS)
    assert locks.is_locked("g", NOW_MS + LEASE_MS)
    assert not locks.is_locked("g", NOW_MS + LEASE_MS + 1)
    change(live, lock_lease_ms=90_000)
    assert locks.is_locked("g", NOW_MS + LEASE_MS + 1)


def test_expired_locks_are_removed(locks: QueueLocks) -> None:
    for number in range(50):
        locks.lock(f"g{number}", "me", [Q0], NOW_MS + number)
    locks.lock("late", "me", [], NOW_MS + LEASE_MS + 50)
    assert locks._groups == {}


def test_expired_locks_are_removed_after_the_clock_was_ahead(locks: QueueLocks) -> None:
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
    """Clients lock, renew and unlock queues while time passes, writes are slow or fail, and the
    broker dies. A client considers itself the owner for a lease after each confirmed lock; Java
    clients do so for half a lease."""

    def __init__(self) -> None:
        super().__init__()
        self.live = settings()
        self.locks = QueueLocks(self.live)
        self.file = self.locks.snapshot()
        self.now_ms = self.started_ms = NOW_MS
        self.held: dict[MessageQueue, int] = {}  # until when, by the broker
        self.owners: dict[MessageQueue, tuple[str, int]] = {}  # by the owners
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
        if self.locks.are_saved("g", got):
            self.notification(answer)
        else:
            self.unsaved += answer
            self.write()
        self.held.update((queue, self.now_ms + LEASE_MS) for queue in got)
        for queue in set(queues) - set(got):
            # After a start a lease may last longer than its owner knows.
            assert self.now_ms <= max(self.held.get(queue, 0), self.started_ms + LEASE_MS)

    def notification(self, answer: list[tuple[str, MessageQueue, int]]) -> None:
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
            self.locks.mark_saved()
            self.notification(self.waiting)

    @rule(fails=st.booleans())
    def end_the_write(self, fails: bool) -> None:
        if self.writing is None:
            return
        if fails:  # and the responses are lost, too
            self.locks.dirty = True
        else:
            self.file = self.writing
            self.locks.mark_saved()
            self.notification(self.waiting)
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


def load(live: LiveSettings, data: bytes, now_ms: int) -> QueueLocks:
    """The locks of a broker that starts with this file."""
    locks = QueueLocks(live)
    locks.load(cast(ConfigFile, SimpleNamespace(load=lambda parse: parse(data))), now_ms)
    return locks


def test_locks_survive_a_restart(locks: QueueLocks, live: LiveSettings) -> None:
    locks.lock("g", "me", [Q0, Q1], NOW_MS)
    assert locks.dirty
    again = load(live, locks.snapshot(), NOW_MS + 5_000)
    assert not locks.dirty
    assert again.lock("g", "you", [Q0, Q2], NOW_MS + 5_000) == [Q2]
    assert again.lock("g", "me", [Q0], NOW_MS + LEASE_MS) == [Q0]
    # What nobody renews any more passes on: a lease after the start at the latest.
    assert again.lock("g", "you", [Q1], NOW_MS + LEASE_MS + 5_000 + 1) == [Q1]


def test_leases_expire_while_the_broker_is_down(locks: QueueLocks, live: LiveSettings) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    again = load(live, locks.snapshot(), NOW_MS + 2 * LEASE_MS)
    assert again._groups == {}


def test_the_file_follows_renewals(locks: QueueLocks, live: LiveSettings) -> None:
    writes = 0
    for ms in range(0, 10 * LEASE_MS, 10_000):
        locks.lock("g", "me", [Q0], NOW_MS + ms)
        if not locks.are_saved("g", [Q0]):
            data = locks.snapshot()
            locks.mark_saved()
            writes += 1
    assert writes == 15  # every 40 s
    dead_ms = NOW_MS + ms
    again = load(live, data, dead_ms + LEASE_MS)
    assert again.lock("g", "you", [Q0], dead_ms + LEASE_MS) == []


def test_a_renewal_waits_for_a_file_that_is_far_behind(
    locks: QueueLocks, live: LiveSettings
) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    data = locks.snapshot()
    assert not locks.are_saved("g", [Q0]), "it is not written yet"
    locks.mark_saved()
    locks.lock("g", "me", [Q0], NOW_MS + LEASE_MS // 2)
    assert locks.are_saved("g", [Q0])
    again = load(live, data, NOW_MS + LEASE_MS)
    again.lock("g", "me", [Q0], NOW_MS + LEASE_MS)
    assert not again.are_saved("g", [Q0])
    once_more = load(live, again.snapshot(), NOW_MS + LEASE_MS + 1)
    assert once_more.lock("g", "you", [Q0], NOW_MS + 2 * LEASE_MS) == []


@pytest.mark.parametrize("data", [b"[", b"{}", b'{"locks":[["g","t",0,"me"]]}'])
def test_a_damaged_file_does_not_prevent_a_start(
    tmp_path: Path, live: LiveSettings, data: bytes
) -> None:
    disk = WatchedDisk()
    path = tmp_path / "locks.json"
    path.write_bytes(data)
    locks = QueueLocks(live)
    locks.load(ConfigFile(disk, path), NOW_MS)
    assert locks.lock("g", "me", [Q0], NOW_MS) == [Q0]


# --- requests


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[ConsumerFixture]:
    fixture = make_fixture(tmp_path)
    fixture.serve(
        LockRequests(
            fixture.locks, fixture.groups, fixture.topics, fixture.clients, fixture.effects
        )
    )
    fixture.topics.ensure("T", 3, 6, NOW_MS)
    yield fixture
    fixture.store.close()


def wanted(client_id: str, *queues: MessageQueue, group: str = "g") -> bytes:
    body = LockBatchRequestBody(consumer_group=group, client_id=client_id, mq_set=list(queues))
    return fastjson.encode(body)


def test_a_lock_request_returns_the_owned_queues(fixture: ConsumerFixture) -> None:
    fixture.ask(LOCK, wanted("you", Q1))
    reply = fixture.ask(LOCK, wanted("me", Q0, Q1, Q2))
    assert reply.code == 0
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0, Q2]
    assert b'"lockOKMQSet":[' in reply.body
    assert fixture.ask(LOCK, wanted("late", Q0)).body == b'{"lockOKMQSet":[]}'


def ask_to_lock(fixture: ConsumerFixture, client_id: str) -> Answer:
    body = wanted(client_id, Q0)
    return fixture.router.handle(
        Command(LOCK, {}, body, client=1, peer="10.0.0.1:99", now_ms=NOW_MS, version=479)
    )


def test_a_new_owner_is_saved_before_the_response(fixture: ConsumerFixture) -> None:
    first = ask_to_lock(fixture, "me")
    write = fixture.persistence.save(fixture.locks)
    renewal = ask_to_lock(fixture, "me")  # while the first is being written
    for answer in (first, renewal):
        assert isinstance(answer, PersistTable)
        assert answer.table is fixture.locks
    write()
    assert isinstance(first, PersistTable)
    first.then(True)
    again = QueueLocks(fixture.live)
    again.load(fixture.persistence.file(QueueLocks.FILE), NOW_MS)
    assert again.lock("g", "you", [Q0], NOW_MS) == []
    assert not fixture.locks.dirty
    assert isinstance(ask_to_lock(fixture, "me"), InThread), "nothing new: nothing is written"


def test_the_broker_name_in_a_lock_request_does_not_matter(fixture: ConsumerFixture) -> None:
    fixture.ask(LOCK, wanted("me", Q0))
    alias = MessageQueue("T", "another-name", 0)
    assert fixture.ask(LOCK, wanted("you", alias)).body == b'{"lockOKMQSet":[]}'
    reply = fixture.ask(LOCK, wanted("me", alias))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [alias]
    assert len(fixture.locks._groups["g"]) == 1


def test_a_client_id_that_is_too_long_is_refused(fixture: ConsumerFixture) -> None:
    reply = fixture.ask(LOCK, wanted("m" * 1_025, Q0))
    assert (reply.code, fixture.locks._groups) == (29, {})
    assert fixture.ask(LOCK, wanted("m" * 1_024, Q0)).code == 0


def test_locks_are_confirmed_also_when_the_disk_fails(
    fixture: ConsumerFixture, monkeypatch: Any
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(fixture.store.disk, "replace", fail)
    reply = fixture.ask(LOCK, wanted("me", Q0))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0]
    assert fixture.locks.dirty  # it is retried
    assert isinstance(ask_to_lock(fixture, "me"), PersistTable)


def test_an_unlock_request_releases_queues(fixture: ConsumerFixture) -> None:
    fixture.ask(LOCK, wanted("me", Q0))
    fixture.effects.take()
    assert fixture.ask(UNLOCK, wanted("me", Q0)).code == 0
    assert fixture.effects.take() == [PersistSoon(fixture.locks)]
    assert fixture.ask(UNLOCK, wanted("me", Q0)).code == 0
    assert fixture.effects.take() == []
    reply = fixture.ask(LOCK, wanted("you", Q0))
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0]


@pytest.mark.parametrize("code", [LOCK, UNLOCK])
def test_locks_without_a_name_are_refused(fixture: ConsumerFixture, code: int) -> None:
    assert fixture.ask(code, wanted("", Q0)).code == 29
    assert fixture.ask(code, wanted("me", Q0, group="")).code == 29
    assert fixture.ask(code, b"[").code == 29


def test_queues_that_do_not_exist_are_not_locked(fixture: ConsumerFixture) -> None:
    fixture.topics.ensure("%RETRY%g", 1, 6, NOW_MS)
    retry = MessageQueue("%RETRY%g", "broker-a", 0)
    strangers = [MessageQueue("unknown", "broker-a", 0), MessageQueue("T", "broker-a", 3)]
    reply = fixture.ask(
        LOCK, wanted("me", *strangers, Q0, retry, MessageQueue("T", "broker-a", -1))
    )
    assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0, retry]
    fixture.ask(LOCK, wanted("me", *strangers, group="other"))
    assert not fixture.locks.is_locked("other", NOW_MS)


def test_groups_that_can_not_be_created_lock_nothing(fixture: ConsumerFixture) -> None:
    change(fixture.live, auto_create_groups=False)
    assert fixture.ask(LOCK, wanted("me", Q0)).code == 26
    assert not fixture.locks.is_locked("g", NOW_MS)


@pytest.mark.parametrize("code", [LOCK, UNLOCK])
def test_too_many_queues_at_once_are_refused(fixture: ConsumerFixture, code: int) -> None:
    queues = [MessageQueue("T", "broker-a", n) for n in range(10_001)]
    reply = fixture.ask(code, wanted("me", *queues))
    assert reply.code == 29
    assert "10001 queues, the limit is 10000" in (reply.remark or "")
    assert fixture.ask(code, wanted("me", *queues[:-1])).code == 0


# --- ordered topics


def test_topics_with_an_order_config_are_ordered(fixture: ConsumerFixture) -> None:
    fixture.topics.ensure("U", 1, 6, NOW_MS)
    fixture.effects.take()
    version = fixture.topics.table.version
    fixture.topics.mark_ordered({"T": "broker-a:2", "unknown": "broker-a:1"}, NOW_MS)
    assert [fixture.topics.need(name).order for name in "TU"] == [True, False]
    assert fixture.topics.get("unknown") is None
    assert fixture.topics.table.version != version
    assert fixture.effects.take() == [PersistSoon(fixture.topics.table), RegisterSoon()]
    # Each registration tells it again, and a config may be gone: nothing changes.
    fixture.topics.mark_ordered({"T": "broker-a:2"}, NOW_MS)
    fixture.topics.mark_ordered({}, NOW_MS)
    assert fixture.topics.need("T").order
    assert fixture.effects.take() == []
