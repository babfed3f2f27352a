"""Messages in flight across restarts: open ones are revived, acknowledged ones are not."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.pop import revive, revive_log
from penstock.broker.pop.checkpoints import CheckpointKey, PopCheckpoint, PopCheckpoints
from penstock.broker.pop.revive_log import REVIVE_GROUP
from penstock.config import Settings, StoreConfig
from penstock.errors import DiskFull
from penstock.wire import fastjson
from penstock.wire.bodies.pop_bodies import AckMsg, PopCheckPoint
from penstock.wire.message import encode_properties
from penstock.wire.receipt_handle import Receipt, RetryKind
from penstock.wire.record import Record
from tests.unit.broker.broker_kit import BORN, BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import (
    REVIVE,
    PopClient,
    Popped,
    advance,
    persist,
    pop_settings,
    reopen,
    stored,
)

Restart = Callable[[], BrokerFixture]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


def send(env: BrokerFixture, *texts: bytes, queue_id: int = 0) -> None:
    for text in texts:
        assert env.send(body=text, queue_id=queue_id).code == 0
    env.store.publish()


def revive_entries(env: BrokerFixture) -> list[tuple[str | None, int]]:
    """Tags and queues of all entries of the revive log."""
    return [(m.tags, m.queue_id) for n in range(8) for m in stored(env, REVIVE, n)]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("persisted", [False, True])
def test_messages_in_flight_survive_a_restart(tmp_path: Path, crash: bool, persisted: bool) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a", b"b", b"c")
    client = PopClient(env)
    first = client.pop(maxMsgNums=2)
    client.ack(first[0])
    advance(env, 6_000)
    if persisted:
        persist(env)
    env = reopen(env, root, crash=crash)
    try:
        client = PopClient(env)
        assert client.bodies() == [b"c"]
        assert client.pop() == []
        advance(env, 4_000)
        env.store.publish()
        assert client.bodies() == [b"b"]
        advance(env, 20_000)
        env.store.publish()
        assert sorted(client.bodies()) == [b"b", b"c"]
    finally:
        env.close()


def test_receipt_handles_are_valid_after_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a", b"b", b"c")
    first, second, third = PopClient(env).pop()
    env = reopen(env, root, crash=True)
    try:
        client = PopClient(env)
        client.ack(first)
        changed = client.change(second, 30_000)
        env = reopen(env, root, crash=True)
        client = PopClient(env)
        advance(env, 10_000)
        env.store.publish()
        assert client.bodies() == [b"c"]
        client.ack(changed)
        env = reopen(env, root, crash=True)
        advance(env, 5_000)
        assert PopClient(env).pop() == []
        assert third.body == b"c"
    finally:
        env.close()


def test_invisible_time_passes_while_the_broker_is_down(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a")
    PopClient(env).pop()
    env.now_ms += 60_000
    env = reopen(env, root, crash=True)
    try:
        env.tick(1)
        assert PopClient(env).bodies() == [b"a"]
    finally:
        env.close()


def test_a_restart_does_not_undo_a_reset(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"0", b"1", b"2", b"3")
    client = PopClient(env)
    client.ack_all(client.pop(maxMsgNums=2))
    client.pop(maxMsgNums=1)
    env.context.offsets.reset("G", "T", {0: 1}, env.now_ms)
    advance(env, 6_000)
    persist(env)
    env = reopen(env, root, crash=True)
    try:
        assert env.context.offsets.get("G", "T", 0) == 1
        assert PopClient(env).bodies() == [b"1", b"2", b"3"]
    finally:
        env.close()


def test_a_crash_between_copy_and_ack_delivers_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a")
    PopClient(env).pop()

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(env.broker.pop.revive_log, "ack", die)
    with pytest.raises(KeyboardInterrupt):
        advance(env, 10_000)
    env = reopen(env, root, crash=True)
    try:
        env.tick(1)
        env.store.publish()
        assert PopClient(env).bodies() == [b"a", b"a"]
    finally:
        env.close()


def test_retry_topics_v2_survive_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root, pop_settings(pop_retry_topic_v2=True))
    send(env, b"a")
    PopClient(env).pop()
    advance(env, 10_000)
    env = reopen(env, root, crash=True)
    try:
        (again,) = PopClient(env).pop()
        assert (again.body, again.receipt.kind) == (b"a", RetryKind.V2)
    finally:
        env.close()


# --- progress of the revive log


def test_the_revive_log_is_read_from_the_oldest_open_checkpoint(env: BrokerFixture) -> None:
    client = PopClient(env)
    send(env, *[b"%d" % n for n in range(30)])
    batches = [client.pop(maxMsgNums=1) for _ in range(24)]
    for number, batch in enumerate(batches):
        if number != 9:
            client.ack_all(batch)
    env.tick(1)
    (open_one,) = env.broker.pop.revive_log.checkpoints
    for queue_id in range(8):
        place = env.context.offsets.get(REVIVE_GROUP, REVIVE, queue_id)
        end = env.store.max_offset(REVIVE, queue_id)
        assert (
            place == (open_one.revive_offset if queue_id == open_one.revive_queue_id else end) - 1
        )


@pytest.mark.slow
def test_a_checkpoint_that_stays_open_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revive_log, "REWRITE_AFTER", 8)
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"long", b"longer")
    client = PopClient(env)
    first = client.pop(invisibleTime=3_600_000)
    client.ack(first[0])
    for number in range(200):
        send(env, b"%d" % number)
        client.ack_all(client.pop())
        if number % 10 == 0:
            env.tick(1000)
    (checkpoint,) = env.broker.pop.revive_log.checkpoints
    assert checkpoint.revive_offset > 20
    assert (checkpoint.acked, checkpoint.open_offsets()) == (1, [1])
    assert env.broker.pop.revive_log.lag(checkpoint.revive_queue_id) < 32
    persist(env)
    env = reopen(env, root, crash=True)
    try:
        client = PopClient(env)
        (checkpoint,) = env.broker.pop.revive_log.checkpoints
        assert checkpoint.open_offsets() == [1]
        assert env.context.offsets.get("G", "T", 0) == 202  # not back to that of the old batch
        advance(env, 3_600_000)
        env.store.publish()
        assert client.bodies() == [b"longer"]
    finally:
        env.close()


def test_retention_keeps_messages_in_flight(env: BrokerFixture) -> None:
    client = PopClient(env)
    assert env.broker.pop.pinned_from() is None
    send(env, b"a")
    place = env.store.log.end
    send(env, b"b", b"c")
    first, second, third = client.pop()
    assert env.broker.pop.pinned_from() == 0
    client.ack(first)
    client.change(second, 20_000)
    client.ack(third)
    pinned = env.broker.pop.pinned_from()
    assert pinned is not None
    assert pinned <= place


def test_a_deleted_message_closes_its_checkpoint(
    env: BrokerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    client = PopClient(env)
    send(env, b"a" * 900)
    client.pop()
    send(env, *[b"x" * 900] * 200)
    env.store.expire(1)
    queue = env.store.queue("T", 0)
    assert queue is not None
    assert queue.min_offset > 0
    with caplog.at_level(logging.WARNING):
        advance(env, 10_000)
    assert "it was deleted" in caplog.text
    assert env.broker.pop.revive.lost == 1
    assert len(env.broker.pop.revive_log.checkpoints) == 0


# --- revive


def test_a_tick_revives_a_bounded_number(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revive, "TICK_MESSAGES_MAX", 10)
    client = PopClient(env)
    send(env, *[b"%d" % n for n in range(45)])
    for _ in range(9):
        client.pop(maxMsgNums=5)
    env.now_ms += 20_000
    counts = []
    for _ in range(6):
        env.tick(0)
        counts.append(len(stored(env, "%RETRY%G_T")))
    assert counts == [10, 20, 30, 40, 45, 45]


def test_revive_waits_while_the_store_refuses_writes(env: BrokerFixture) -> None:
    client = PopClient(env)
    send(env, b"a")
    client.pop()
    env.now_ms += 10_000
    env.store.writer.refusal = DiskFull("full")
    env.broker.pop.tick(env.now_ms)
    assert env.broker.pop.due() == env.now_ms + revive.RETRY_MS
    assert env.broker.pop.revive_log.checkpoints.in_flight == {("T", "G", 0): 1}
    env.store.writer.refusal = None
    advance(env, 200)
    env.store.publish()
    assert client.bodies() == [b"a"]


def test_messages_on_disk_are_read_in_the_thread_pool(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = revive._read

    def from_disk(*arguments: Any) -> Any:
        return read(*arguments) if arguments[-1] else None

    monkeypatch.setattr(revive, "_read", from_disk)
    client = PopClient(env)
    send(env, b"a", b"b", b"c")
    popped = client.pop()
    env.now_ms += 10_000
    jobs: list[Any] = []
    submit = env.store.disk.submit

    def put_off(work: Any) -> _Pending:
        jobs.append(work)
        return _Pending()

    monkeypatch.setattr(env.store.disk, "submit", put_off)
    env.broker.pop.tick(env.now_ms)
    assert env.broker.pop.due() <= env.now_ms + revive.POLL_MS
    client.ack(popped[1])  # while it is read
    monkeypatch.setattr(env.store.disk, "submit", submit)
    (checkpoint,) = env.broker.pop.revive_log.checkpoints
    env.broker.pop.revive._reading = checkpoint, submit(jobs[0])
    advance(env, 100)
    env.store.publish()
    assert client.bodies() == [b"a", b"c"]


class _Pending:
    def done(self) -> bool:
        return False


@pytest.mark.parametrize("length", [32_500, 32_600, 32_610, 32_620])
def test_full_properties_do_not_prevent_revive(tmp_path: Path, length: int) -> None:
    settings = Settings(store=StoreConfig(segment_bytes=1 << 20, queue_file_entries=50))
    with broker_fixture(tmp_path / "store", settings) as env:
        client = PopClient(env)
        assert env.send(body=b"a", properties={"p": "x" * length}).code == 0
        env.store.publish()
        for times in range(3):
            (again,) = client.pop()
            assert again.message.reconsume_times == times
            assert again.message.properties["p"] == "x" * length
            advance(env, 10_000)
            env.store.publish()


def test_revive_after_the_clock_is_set_back(env: BrokerFixture) -> None:
    client = PopClient(env)
    send(env, b"a")
    client.pop()
    env.tick(100)
    env.now_ms -= 3_600_000
    env.tick(0)
    advance(env, 10_000)
    env.store.publish()
    assert client.bodies() == [b"a"]


def test_names_that_are_too_long_for_a_retry_topic_are_refused(env: BrokerFixture) -> None:
    env.send(topic="T" * 120, body=b"a")
    answer = PopClient(env, "T" * 120, "G" * 140).ask()
    assert answer.code in (26, 29)  # type: ignore[union-attr]


# --- another broker's entries


def put(env: BrokerFixture, tag: str, body: Any, queue_id: int, **properties: str) -> None:
    """What the timer of RocketMQ's broker delivers."""
    record = Record()
    text = encode_properties({"TAGS": tag, "TIMER_OUT_MS": "1", **properties})
    record.fill(REVIVE.encode(), fastjson.encode(body), text)
    record.queue_id, record.born_host, record.store_host = queue_id, BORN, BORN
    assert env.store.put(record, env.now_ms) == 0
    env.store.publish()


def test_checkpoints_of_another_broker_are_revived(env: BrokerFixture) -> None:
    send(env, b"0", b"1", b"2")
    env.context.offsets.commit("G", "T", 0, 3, env.now_ms)
    client = PopClient(env)
    assert client.pop() == []
    pop_ms = env.now_ms - 5_000
    names = {"consumer_group": "G", "topic": "T", "queue_id": 0, "pop_time": pop_ms}
    put(env, "ack", AckMsg(ack_offset=0, **names), 3)  # type: ignore[arg-type]
    ck = PopCheckPoint(num=3, invisible_time=6_000, offset_diffs=(0, 1, 2), **names)  # type: ignore[arg-type]
    put(env, "ck", ck, 3)
    env.tick(1_000)
    put(env, "ack", AckMsg(ack_offset=2, **names), 3)  # type: ignore[arg-type]
    put(env, "ck", {"so": "no"}, 3)
    advance(env, 10_000)
    env.store.publish()
    assert client.bodies() == [b"1"]


def test_an_ack_before_its_checkpoint_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"0", b"1")
    env.context.offsets.commit("G", "T", 0, 2, env.now_ms)
    (message, _) = stored(env)
    pop_ms = env.now_ms
    env.now_ms += 1_000
    env.close()
    env = BrokerFixture(root, now_ms=env.now_ms)
    popped = Popped(message, Receipt(0, pop_ms, 20_000, 2, RetryKind.NORMAL, "broker-a", 0, 0))
    try:
        client = PopClient(env)
        assert client.ack(popped).code == 0
        ck = PopCheckPoint(
            num=2,
            invisible_time=20_000,
            offset_diffs=(0, 1),
            consumer_group="G",
            topic="T",
            pop_time=pop_ms,
        )
        put(env, "ck", ck, 2)
        advance(env, 30_000)
        env.store.publish()
        assert client.bodies() == [b"1"]
    finally:
        env.close()


# --- state


def test_the_heap_does_not_grow_with_closed_checkpoints() -> None:
    checkpoints = PopCheckpoints(8)
    for number in range(5_000):
        checkpoint = PopCheckpoint(
            CheckpointKey("T", "G", 0, number, 5), 60_000, [number], number % 8
        )
        checkpoints.add(checkpoint)
        checkpoints.ack(checkpoint, 1)
    assert len(checkpoints) == 0
    assert len(checkpoints._due_heap) < 2_100
    assert checkpoints.in_flight == {}
    assert checkpoints.due() == 1 << 62
    assert [checkpoints.oldest(n) for n in range(8)] == [None] * 8


def test_early_acks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = PopCheckpoints(8)
    for number in range(20_000):
        checkpoints.ack_early(CheckpointKey("T", "G", 0, number, 5), [number])
    assert len(checkpoints._early_acks) == 10_000


def test_offsets_are_saved_after_the_revive_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker_fixture(tmp_path / "store", pop_settings()) as env:
        send(env, b"a")
        PopClient(env).pop()
        synced: list[int] = []
        monkeypatch.setattr(env.store, "sync_log", synced.append)
        work = env.context.persistence.save(env.context.offsets.table)
        assert synced == []
        work()
        assert synced == [env.store.log.end]
        monkeypatch.undo()
        env.store.flusher.pump()
        env.context.persistence.save(env.context.offsets.table)()
        assert synced == [env.store.log.end]
