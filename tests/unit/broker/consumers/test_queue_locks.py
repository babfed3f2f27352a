"""Queue locks: one owner, a lease, their journal, and the two requests."""

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from penstock.broker.consumers import lock_journal, queue_locks
from penstock.broker.consumers.lock_journal import LockJournal
from penstock.broker.consumers.queue_locks import LockRequests, QueueLocks
from penstock.config import LiveSettings
from penstock.errors import SystemBusy
from penstock.rpc.answers import NextIteration, PersistSoon, RegisterSoon, Reply
from penstock.rpc.command import Command
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
def locks(live: LiveSettings, tmp_path: Path) -> QueueLocks:
    return start(live, tmp_path, NOW_MS)


def start(live: LiveSettings, folder: Path, now_ms: int, *, complete: bool = True) -> QueueLocks:
    """The locks of a broker that starts with the files in this directory."""
    locks = QueueLocks(live, LockJournal(WatchedDisk(), folder))
    locks.load(now_ms, complete=complete)
    return locks


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


@pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
def test_a_lease_lasts_as_long_if_the_clock_is_set(
    locks: QueueLocks, live: LiveSettings, tmp_path: Path, step_ms: int
) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    locks.clock_stepped(step_ms)
    now_ms = NOW_MS + step_ms
    for held in (locks, start(live, tmp_path, now_ms + 1)):  # also after a crash
        assert held.lock("g", "you", [Q0], now_ms + LEASE_MS // 2) == []
        assert held.lock("g", "you", [Q0], now_ms + 2 * LEASE_MS) == [Q0]


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
    assert (locks._groups, len(locks._by_renewal)) == ({}, 0)


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
    """Clients lock, renew and unlock queues while time passes, writes fail, and the broker dies or
    the power fails. A client considers itself the owner for a lease after each confirmed lock; Java
    clients do so for half a lease."""

    def __init__(self) -> None:
        super().__init__()
        self.live = settings()
        self.folder = TemporaryDirectory()
        self.flushed: dict[str, bytes] = {}
        self.now_ms = self.started_ms = NOW_MS
        self.held: dict[MessageQueue, int] = {}  # until when, by the broker
        self.owners: dict[MessageQueue, tuple[str, int]] = {}  # by the owners
        self.locks = start(self.live, self.path, self.now_ms)

    @property
    def path(self) -> Path:
        return Path(self.folder.name)

    def teardown(self) -> None:
        self.locks.close()
        self.folder.cleanup()

    clients = st.sampled_from(["a", "b"])
    queues = st.lists(st.sampled_from([Q0, Q1]), min_size=1, max_size=2)
    times = st.sampled_from([0, 1_000, LEASE_MS // 2, LEASE_MS // 2 + 1, LEASE_MS, LEASE_MS + 1])

    @rule(client=clients, queues=queues)
    def lock(self, client: str, queues: list[MessageQueue]) -> None:
        got = self.locks.lock("g", client, queues, self.now_ms)
        for queue in got:
            owner, until_ms = self.owners.get(queue, (client, 0))
            assert owner == client or self.now_ms > until_ms
            self.owners[queue] = (client, self.now_ms + LEASE_MS)
        self.held.update((queue, self.now_ms + LEASE_MS) for queue in got)
        for queue in set(queues) - set(got):
            # After a start a lease may last longer than its owner knows.
            assert self.now_ms <= max(self.held.get(queue, 0), self.started_ms + LEASE_MS)

    @rule(client=clients, queues=queues)
    def unlock(self, client: str, queues: list[MessageQueue]) -> None:
        self.locks.unlock("g", client, queues)
        for queue in queues:
            if self.owners.get(queue, ("", 0))[0] == client:
                del self.owners[queue]

    @rule(ms=times)
    def let_time_pass(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def begin_a_file(self) -> None:
        self.locks._begin_file()

    @rule()
    def write_back(self) -> None:
        self.flushed = {path.name: path.read_bytes() for path in self.path.iterdir()}

    @rule(ms=times)
    def let_the_broker_die(self, ms: int) -> None:
        self._start_again(ms, complete=True)

    @rule(ms=times)
    def cut_the_power(self, ms: int) -> None:
        for path in self.path.iterdir():
            path.write_bytes(self.flushed.get(path.name, b""))
        self._start_again(ms, complete=False)

    def _start_again(self, ms: int, *, complete: bool) -> None:
        self.locks.close()
        self.now_ms += ms
        self.started_ms = self.now_ms
        self.locks = start(self.live, self.path, self.now_ms, complete=complete)


LockHistory.TestCase.settings = hypothesis.settings(
    max_examples=rounds(ci=100, proof=5000), stateful_step_count=40, deadline=None
)
TestLockHistory = LockHistory.TestCase


# --- the journal


def test_locks_survive_a_restart(locks: QueueLocks, live: LiveSettings, tmp_path: Path) -> None:
    locks.lock("g", "me", [Q0, Q1], NOW_MS)
    locks.lock("g", "gone", [Q2], NOW_MS)
    locks.unlock("g", "gone", [Q2])
    again = start(live, tmp_path, NOW_MS + 5_000)
    assert again.lock("g", "you", [Q0, Q2], NOW_MS + 5_000) == [Q2]
    assert again.lock("g", "me", [Q0], NOW_MS + LEASE_MS) == [Q0]
    # What nobody renews any more passes on: a lease after the start at the latest.
    assert again.lock("g", "you", [Q1], NOW_MS + LEASE_MS + 5_000 + 1) == [Q1]


def test_leases_expire_while_the_broker_is_down(
    locks: QueueLocks, live: LiveSettings, tmp_path: Path
) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    again = start(live, tmp_path, NOW_MS + 2 * LEASE_MS)
    assert again._groups == {}


def test_after_a_power_failure_nothing_is_locked_until_the_old_locks_have_expired(
    locks: QueueLocks,
    live: LiveSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    again = start(live, tmp_path, NOW_MS, complete=False)
    assert "are locked again in 60 s" in caplog.text
    assert again.lock("g", "me", [Q0], NOW_MS + LEASE_MS - 1) == []
    # A broker that is killed meanwhile goes on waiting.
    again = start(live, tmp_path, NOW_MS + 5_000)
    assert again.lock("g", "you", [Q1], NOW_MS + LEASE_MS - 1) == []
    assert again.lock("g", "you", [Q1], NOW_MS + LEASE_MS + 1) == [Q1]


def test_the_wait_after_a_power_failure_ends_when_the_clock_is_set_back(
    live: LiveSettings, tmp_path: Path
) -> None:
    locks = start(live, tmp_path, NOW_MS, complete=False)
    back_ms = NOW_MS - 3_600_000
    assert locks.lock("g", "me", [Q0], back_ms) == []
    assert locks.lock("g", "me", [Q0], back_ms + LEASE_MS + 1) == [Q0]


def test_the_journal_follows_renewals(
    locks: QueueLocks, live: LiveSettings, tmp_path: Path
) -> None:
    lines = set()
    for ms in range(0, 10 * LEASE_MS, 10_000):
        locks.lock("g", "me", [Q0], NOW_MS + ms)
        lines.add((tmp_path / lock_journal.FILES[1]).read_bytes())
    assert len(lines) == 15  # every 40 s
    dead_ms = NOW_MS + ms
    again = start(live, tmp_path, dead_ms + LEASE_MS)
    assert again.lock("g", "you", [Q0], dead_ms + LEASE_MS) == []


def test_a_long_journal_begins_again_with_all_locks(
    live: LiveSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_journal, "FILE_BYTES", 1_000)
    locks = start(live, tmp_path, NOW_MS)
    locks.lock("g", "me", [Q0], NOW_MS)
    for number in range(500):
        locks.lock(f"g{number}", "you", [Q1], NOW_MS)
        locks.unlock(f"g{number}", "you", [Q1])
        if number % 7 == 0:
            locks.close()
            locks = start(live, tmp_path, NOW_MS)
            assert list(locks._groups) == ["g"]
        if number == 20:
            locks.lock("g", "me", [Q2], NOW_MS)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5_000
    assert locks.lock("g", "you", [Q0, Q1, Q2], NOW_MS) == [Q1]


@pytest.mark.parametrize("data", [b"[", b"00000000 []\n", b"\n", b"\xff" * 100, bytes(1000)])
def test_a_damaged_journal_does_not_prevent_a_start(
    tmp_path: Path, live: LiveSettings, data: bytes
) -> None:
    for name in lock_journal.FILES:
        (tmp_path / name).write_bytes(data)
    assert start(live, tmp_path, NOW_MS).lock("g", "me", [Q0], NOW_MS) == [Q0]
    assert start(live, tmp_path, NOW_MS).lock("g", "you", [Q0], NOW_MS) == []


def test_a_line_that_was_written_in_part_is_ignored(
    locks: QueueLocks, live: LiveSettings, tmp_path: Path
) -> None:
    locks.lock("g", "me", [Q0], NOW_MS)
    path = tmp_path / lock_journal.FILES[1]
    whole = path.read_bytes()
    locks.lock("g", "me", [Q1], NOW_MS)
    path.write_bytes(path.read_bytes()[:-5])
    assert len(path.read_bytes()) > len(whole)
    assert start(live, tmp_path, NOW_MS).lock("g", "you", [Q0, Q1], NOW_MS) == [Q1]


def test_the_number_of_locks_is_limited(locks: QueueLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_locks, "LOCKS_MAX", 2)
    locks.lock("g", "me", [Q0, Q1], NOW_MS)
    assert locks.lock("g", "me", [Q0, Q1], NOW_MS) == [Q0, Q1]
    with pytest.raises(SystemBusy, match="3 locks, the limit is 2"):
        locks.lock("g", "me", [Q2], NOW_MS)
    assert locks.lock("g", "me", [Q2], NOW_MS + LEASE_MS + 1) == [Q2]


# --- requests


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[ConsumerFixture]:
    fixture = make_fixture(tmp_path)
    fixture.serve(LockRequests(fixture.locks, fixture.groups, fixture.topics, fixture.clients))
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


def test_a_lock_is_in_the_journal_and_answered_without_a_flush(fixture: ConsumerFixture) -> None:
    disk = fixture.store.disk
    assert isinstance(disk, WatchedDisk)
    fixture.effects.take()
    disk.synced.clear()
    for client_id, code in (("me", LOCK), ("me", LOCK), ("me", UNLOCK), ("me", LOCK)):
        command = Command(
            code, {}, wanted(client_id, Q0), client=1, peer="10.0.0.1:99", now_ms=NOW_MS
        )
        assert isinstance(fixture.router.handle(command), Reply), "nothing is waited for"
    assert disk.synced == []
    assert not any(
        isinstance(effect, PersistSoon) and effect.table is not fixture.groups.table
        for effect in fixture.effects.take()
    )
    again = start(fixture.live, fixture.store.paths.config, NOW_MS)
    assert again.lock("g", "you", [Q0], NOW_MS) == []


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
    fixture: ConsumerFixture, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fd: int, data: memoryview, at: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(fixture.store.disk, "write", fail)
        for client_id in ("me", "me"):
            reply = fixture.ask(LOCK, wanted(client_id, Q0))
            assert fastjson.decode(reply.body, LockBatchResponseBody).lock_ok_mq_set == [Q0]
    assert caplog.text.count("can't save queue locks") == 1
    assert "No space left on device" in caplog.text
    with caplog.at_level(logging.INFO):
        fixture.ask(LOCK, wanted("me", Q0))  # it is retried with the next renewal
    assert "queue locks are saved again" in caplog.text
    again = start(fixture.live, fixture.store.paths.config, NOW_MS)
    assert again.lock("g", "you", [Q0], NOW_MS) == []


def test_an_unlock_request_releases_queues(fixture: ConsumerFixture) -> None:
    fixture.ask(LOCK, wanted("me", Q0))
    assert fixture.ask(UNLOCK, wanted("me", Q0)).code == 0
    assert fixture.ask(UNLOCK, wanted("me", Q0)).code == 0
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


def test_many_queues_are_locked_in_steps(fixture: ConsumerFixture) -> None:
    count = 2 * queue_locks.STEP_QUEUES + 1
    fixture.topics.ensure("U", count, 6, NOW_MS)
    queues = [MessageQueue("U", "broker-a", n) for n in range(count)]
    for code, left in ((LOCK, count), (UNLOCK, 0)):
        command = Command(code, {}, wanted("me", *queues), client=1, peer="p", now_ms=NOW_MS)
        answer = fixture.router.handle(command)
        steps = 1
        while isinstance(answer, NextIteration):
            answer = answer.then()
            steps += 1
        assert (type(answer), steps) == (Reply, 3)
        assert len(fixture.locks._by_renewal) == left
