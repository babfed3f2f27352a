"""Delay levels: delivery in time and in order, never early, also after restarts."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.delay import delay_levels as delay_module
from penstock.broker.delay import delivered_offsets
from penstock.config import Settings, delays_ms
from penstock.errors import DiskFull
from penstock.rpc.answers import PersistSoon, Reply
from penstock.store.tables.config_tables import DelayOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable, TopicConfig
from penstock.wire.bodies.table_bodies import DelayOffsetSerializeWrapper
from penstock.wire.codes import RequestCode
from penstock.wire.message import StoredMessage, decode_messages
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BORN, BrokerFixture, PlainDisk, broker_fixture, read_reply

SCHEDULE = "SCHEDULE_TOPIC_XXXX"
LEVELS_MS = delays_ms(small_config(sync_flush=False).delay_levels)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


def send_delayed(env: BrokerFixture, level: int | str = 1, **rest: Any) -> Reply:
    properties = {"DELAY": str(level), **rest.pop("properties", {})}
    return env.send(properties=properties, **rest)


def stored(env: BrokerFixture, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
    """All visible messages of a queue."""
    env.store.publish()
    found: list[StoredMessage] = []
    offset = env.store.min_offset(topic, queue_id)
    while offset < env.store.max_offset(topic, queue_id):
        got = env.store.get(topic, queue_id, offset, wait=True)
        found += decode_messages(got.data)
        offset = got.next_offset
    return found


def bodies(env: BrokerFixture, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in stored(env, topic, queue_id)]


def advance(env: BrokerFixture, ms: int) -> None:
    """Sleep as the server does: until the first part is due, a second at most."""
    end = env.now_ms + ms
    while env.now_ms < end:
        wake = max(min(env.broker.due(), env.now_ms + 1000), env.now_ms + 1)
        env.tick(min(wake, end) - env.now_ms)


def test_a_delayed_message_keeps_its_real_topic_and_queue(env: BrokerFixture) -> None:
    answer = send_delayed(env, 3, queue_id=2, body=b"later", tag="vip")
    assert answer.code == 0
    (delayed,) = stored(env, SCHEDULE, 2)
    assert answer.ext is not None
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("2", "0")
    assert answer.ext["msgId"] == delayed.offset_id
    assert answer.ext["transactionId"] == delayed.unique_id
    assert delayed.properties["REAL_TOPIC"] == "T"
    assert delayed.properties["REAL_QID"] == "2"
    assert (delayed.tags, delayed.properties["CLUSTER"]) == ("vip", "DefaultCluster")
    queue = env.store.queue(SCHEDULE, 2)
    assert queue is not None
    entry = queue.entry(0)
    assert entry is not None
    assert entry[2] == env.now_ms + LEVELS_MS[2]
    assert bodies(env, queue_id=2) == []


def test_the_delivered_message_is_as_it_was_sent(env: BrokerFixture) -> None:
    send_delayed(
        env, 1, queue_id=2, body=b"later", tag="vip", properties={"k": "v", "WAIT": "false"}
    )
    (delayed,) = stored(env, SCHEDULE, 0)
    advance(env, 999)
    assert bodies(env, queue_id=2) == []
    advance(env, 1)
    (copy,) = stored(env, queue_id=2)
    assert copy.store_ms == delayed.store_ms + 1000
    same = (
        "body",
        "flag",
        "sys_flag",
        "born_ms",
        "born_host",
        "store_host",
        "reconsume_times",
        "properties",
        "body_crc",
    )
    for name in same:
        assert getattr(copy, name) == getattr(delayed, name), name
    queue = env.store.queue("T", 2)
    assert queue is not None
    entry = queue.entry(0)
    assert entry is not None
    assert entry[2] == sum(ord(c) * 31 ** (2 - i) for i, c in enumerate("vip"))  # the tag again


@pytest.mark.parametrize(("asked", "level"), [(18, 18), (19, 18), (2**31 - 1, 18), ("+2", 2)])
def test_a_level_above_the_last_one_is_the_last(
    env: BrokerFixture, asked: int | str, level: int
) -> None:
    assert send_delayed(env, asked).code == 0
    (delayed,) = stored(env, SCHEDULE, level - 1)
    assert int(delayed.properties["DELAY"]) == level


@pytest.mark.parametrize("level", [0, -1, -(2**31)])
def test_a_level_of_zero_or_less_is_no_delay(env: BrokerFixture, level: int) -> None:
    assert send_delayed(env, level).code == 0
    assert len(stored(env)) == 1


@pytest.mark.parametrize("level", ["x", "1.5", "-", str(2**31), "9" * 40])
def test_a_level_that_is_not_a_number_is_refused(env: BrokerFixture, level: str) -> None:
    assert send_delayed(env, level).code == 13
    assert env.store.log.end == 0


def test_a_level_takes_precedence_over_a_timer(env: BrokerFixture) -> None:
    assert (
        send_delayed(env, 1, properties={"TIMER_DELAY_SEC": "5", "TIMER_DELIVER_MS": "7"}).code == 0
    )
    (delayed,) = stored(env, SCHEDULE, 0)
    assert not [name for name in delayed.properties if name.startswith("TIMER")]


def test_a_send_that_creates_its_topic_registers_it(env: BrokerFixture) -> None:
    named: list[str] = []
    announced = env.context.topics.reply_when_registered

    def record_registration(topic: str, answer: Any, now_ms: int) -> Any:
        named.append(topic)
        return announced(topic, answer, now_ms)

    env.context.topics.reply_when_registered = record_registration  # type: ignore[method-assign]
    assert send_delayed(env, 1, topic="New").code == 0
    assert named == ["New"]


def test_a_message_too_long_for_its_real_topic_is_refused(env: BrokerFixture) -> None:
    topic = "L" * 120
    least = env.store.log.segments.segment_bytes - 8 - 91 - len(SCHEDULE) - 460
    lengths = range(least, least + 400, 7)
    answers = [send_delayed(env, 1, topic=topic, body=b"x" * length).code for length in lengths]
    assert answers == sorted(answers)
    assert {0, 13} == set(answers)
    advance(env, 2000)
    assert len(stored(env, topic)) == answers.count(0)


def test_each_level_has_its_delay(env: BrokerFixture) -> None:
    for level in range(1, 19):
        send_delayed(env, level, body=str(level).encode())
    sent_ms = env.now_ms
    for due_ms in LEVELS_MS:
        env.tick(sent_ms + due_ms - 1 - env.now_ms)
        env.tick(1)
    arrived = {int(message.body): message.store_ms - sent_ms for message in stored(env)}
    assert arrived == dict(enumerate(LEVELS_MS, 1))


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 40_000), st.booleans()), min_size=1, max_size=40
    )
)
@pytest.mark.slow
def test_nothing_is_early_lost_or_out_of_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    sent: dict[int, tuple[int, int]] = {}  # number → (level, due)
    env = BrokerFixture(root)
    env.send(body=b"make the topic")
    try:
        for number, (level, wait_ms, restart) in enumerate(steps):
            send_delayed(env, level, body=str(number).encode())
            sent[number] = (level, env.now_ms + LEVELS_MS[level - 1])
            advance(env, wait_ms)
            if restart:
                now_ms = env.now_ms
                env.close()
                env = BrokerFixture(root)
                env.now_ms = now_ms
        advance(env, LEVELS_MS[4])
        arrived = [(int(m.body), m.store_ms) for m in stored(env)[1:]]
    finally:
        env.close()
    assert sorted(number for number, _ in arrived) == list(sent)
    for number, store_ms in arrived:
        assert store_ms >= sent[number][1]
    for level in range(1, 6):
        mine = [number for number, _ in arrived if sent[number][0] == level]
        assert mine == sorted(mine)


def test_delivery_is_prompt_and_wakes_pulls(env: BrokerFixture) -> None:
    env.send(body=b"first")
    send_delayed(env, 2, body=b"second")
    env.pull(1, flags=6, suspendTimeoutMillis=15000)
    env.tick(700)
    assert env.broker.context.delay.due() == env.now_ms - 700 + 5000
    env.tick(4299)
    assert env.woken == []
    env.tick(1)
    assert [m.body for m in decode_messages(env.woken[0].body)] == [b"second"]


def test_a_tick_delivers_a_bounded_number(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_module, "TICK_MESSAGES_MAX", 10)
    for number in range(25):
        send_delayed(env, 1 + number % 2, body=str(number).encode())
    env.now_ms += 10_000
    counts = []
    for _ in range(4):
        env.tick(0)
        counts.append(len(stored(env)))
        if len(stored(env)) < 25:
            assert env.context.delay.due() <= env.now_ms
    assert counts == [10, 20, 25, 25]


def test_messages_wait_while_the_store_refuses_writes(env: BrokerFixture) -> None:
    env.send(body=b"x")
    send_delayed(env, 1)
    advance(env, 500)
    env.store.writer.refusal = DiskFull("full")
    env.now_ms += 600
    env.context.delay.tick(env.now_ms)
    assert env.context.delay.due() == env.now_ms + delay_module.RETRY_MS
    assert len(stored(env)) == 1
    env.store.writer.refusal = None
    advance(env, 200)
    assert len(stored(env)) == 2


# --- clocks --------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_adds_at_most_one_delay(env: BrokerFixture) -> None:
    env.send(body=b"x")
    env.now_ms -= 3_600_000
    send_delayed(env, 1, body=b"a")
    advance(env, 300)
    send_delayed(env, 1, body=b"b")
    advance(env, 600)
    assert bodies(env) == [b"x"]  # not early by the wall clock
    advance(env, 1400)
    assert bodies(env) == [b"x", b"a", b"b"]


def test_levels_missing_in_the_settings_are_delivered(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        send_delayed(env, 18, body=b"late")
        now_ms = env.now_ms
    short = msgspec.structs.replace(small_config(sync_flush=False), delay_levels="1s 10s")
    with broker_fixture(tmp_path, Settings(store=short)) as env:
        env.now_ms = now_ms
        advance(env, 9_000)
        assert bodies(env) == [b"x"]
        advance(env, 3_000)
        assert bodies(env) == [b"x", b"late"]


# --- restarts ------------------------------------------------------------------------------------


def crash(env: BrokerFixture) -> None:
    """End as by kill -9: the files stay as they are, nothing is persisted."""
    env.store.flusher.stop()
    env.store.disk.close()
    env.store._lock.release()


def test_a_clean_restart_delivers_each_once(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        send_delayed(env, 1, body=b"1")
        send_delayed(env, 2, body=b"2")
        advance(env, 2000)
        now_ms = env.now_ms
    with broker_fixture(tmp_path) as env:
        env.now_ms = now_ms + 60_000
        env.tick(0)
        assert bodies(env) == [b"x", b"1", b"2"]


def test_after_a_crash_nothing_is_lost(tmp_path: Path) -> None:
    env = BrokerFixture(tmp_path)
    env.send(body=b"x")
    for number in range(5):
        send_delayed(env, 1, body=str(number).encode())
        advance(env, 400)
    now_ms = env.now_ms
    before = bodies(env)
    crash(env)
    with broker_fixture(tmp_path) as env:
        env.now_ms = now_ms
        assert bodies(env) == before
        advance(env, 2000)
        assert set(bodies(env)) == {b"x", b"0", b"1", b"2", b"3", b"4"}


@pytest.mark.parametrize("count", [3, 300])
def test_a_broker_that_is_killed_after_each_start_repeats_nothing(
    tmp_path: Path, count: int
) -> None:
    env = BrokerFixture(tmp_path)
    env.send(body=b"x")
    for number in range(count):
        send_delayed(env, 1 + number % 2, body=b"%d" % number)
    now_ms = env.now_ms + 10_000
    for _ in range(5):
        crash(env)
        env = BrokerFixture(tmp_path)
        env.now_ms = now_ms
        env.tick(1)
        now_ms = env.now_ms
    advance(env, 1_000)
    assert sorted(bodies(env)) == sorted([b"x", *(b"%d" % number for number in range(count))])
    crash(env)


def delivered_and_killed(root: Path) -> int:
    """A broker that was killed after it had delivered a message; returns its time."""
    env = BrokerFixture(root)
    env.send(body=b"x")
    send_delayed(env, 1, body=b"1")
    advance(env, 2_000)
    assert bodies(env) == [b"x", b"1"]
    crash(env)
    return env.now_ms


@pytest.mark.parametrize("spoiled", ["power failure", "damaged", "shorter", "ahead of the log"])
def test_what_may_not_be_delivered_is_delivered_again(tmp_path: Path, spoiled: str) -> None:
    now_ms = delivered_and_killed(tmp_path)
    note = tmp_path / "penstock.delivered"
    data = bytearray(note.read_bytes())
    if spoiled == "power failure":
        (tmp_path / "abort").write_bytes(b"1 another-boot")
    elif spoiled == "damaged":
        data[30] ^= 1
    elif spoiled == "shorter":
        del data[30:]
    else:
        data[:44] = delivered_offsets._pack(1 << 40, {1: 1})
    note.write_bytes(data)
    env = BrokerFixture(tmp_path)
    assert not note.exists(), "it would count after the next crash"
    env.now_ms = now_ms
    advance(env, 1_000)
    assert bodies(env) == [b"x", b"1", b"1"]
    crash(env)


def test_a_note_of_an_older_run_does_not_count_after_a_clean_stop(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        send_delayed(env, 1, body=b"1")
        advance(env, 2_000)
    assert (tmp_path / "penstock.delivered").exists()
    with broker_fixture(tmp_path):
        assert not (tmp_path / "penstock.delivered").exists()


def test_a_note_that_can_not_be_written_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        (tmp_path / "penstock.delivered").mkdir()
        for _ in range(3):
            send_delayed(env, 1, body=b"1")
            advance(env, 2_000)
        assert bodies(env) == [b"x", b"1", b"1", b"1"]
        (tmp_path / "penstock.delivered").rmdir()
    assert caplog.text.count("penstock.delivered") == 1


def test_progress_is_saved_after_a_flush(env: BrokerFixture) -> None:
    env.send(body=b"x")
    send_delayed(env, 1)
    advance(env, 3000)
    assert len(stored(env)) == 2
    assert env.context.delay.table.get(1) == 0
    env.store.flusher.pump()
    env.tick(1)
    assert env.context.delay.table.get(1) == 1
    env.broker.effects.take()
    env.tick(10_000)
    saved = [
        effect.table for effect in env.broker.effects.take() if isinstance(effect, PersistSoon)
    ]
    assert env.context.delay.table in saved


def test_an_offset_outside_of_the_queue_is_corrected(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        send_delayed(env, 1, body=b"a")
        env.context.delay.table.commit(1, 77, env.now_ms)
        env.context.persistence.save(env.context.delay.table)()
        env.context.delay.table.dirty = False
    with broker_fixture(tmp_path) as env:
        env.tick(0)
        assert env.context.delay.levels[0].offset == 1
        env.now_ms += 5000
        send_delayed(env, 1, body=b"b")
        advance(env, 1000)
        assert bodies(env) == [b"x", b"b"]


# --- topics that change --------------------------------------------------------------------------


def test_a_message_of_a_deleted_topic_is_dropped(env: BrokerFixture) -> None:
    send_delayed(env, 1, topic="Gone")
    list(env.context.topics.delete("Gone", env.now_ms))
    advance(env, 1500)
    assert env.context.topics.get("Gone") is None
    assert env.context.delay.dropped == 1
    send_delayed(env, 1, topic="Gone", body=b"new life")
    advance(env, 1500)
    assert bodies(env, "Gone") == [b"new life"]


def test_a_topic_lost_in_a_crash_is_created_again(env: BrokerFixture) -> None:
    send_delayed(env, 1, topic="Lost", queue_id=3)
    env.context.topics.table.remove("Lost", env.now_ms)
    advance(env, 1500)
    config = env.context.topics.get("Lost")
    assert config is not None
    assert config.read_queue_nums == 4
    assert len(stored(env, "Lost", 3)) == 1


def test_delivery_to_a_smaller_topic_uses_a_readable_queue(env: BrokerFixture) -> None:
    send_delayed(env, 1, queue_id=3)
    smaller = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2, perm=6)
    env.context.topics.put(smaller, env.now_ms)
    advance(env, 1500)
    assert len(stored(env, "T", 1)) == 1


# --- files ---------------------------------------------------------------------------------------


class SlowDisk(PlainDisk):
    """Only messages since the start are in memory, and the pool runs its work on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[Any, Future[Any]]] = []
        self.slow = False

    def read_now(self, fd: int, target: Any, at: int) -> bool:
        return not self.slow and super().read_now(fd, target, at)

    def submit(self, work: Any) -> Any:
        if not self.slow:
            return super().submit(work)
        job: Future[Any] = Future()
        self.jobs.append((work, job))
        return job

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for work, job in jobs:
            job.set_result(work())


def test_cold_messages_are_prefetched_in_the_thread_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        send_delayed(env, 2, body=b"cold")
        now_ms = env.now_ms
    disk = SlowDisk()
    monkeypatch.setattr("tests.unit.broker.broker_kit.PlainDisk", lambda: disk)
    with broker_fixture(tmp_path) as env:
        env.now_ms = now_ms
        disk.slow = True
        env.context.delay.tick(env.now_ms)
        assert env.context.delay.due() == env.now_ms + delay_module.POLL_MS
        assert env.store.maintenance.pinned_from() == 0  # until the first message is read
        disk.work()
        env.context.delay.tick(env.now_ms + 5)
        assert env.context.delay.due() == now_ms + 5000
        env.context.delay.tick(now_ms + 4000)
        assert len(disk.jobs) == 1
        disk.work()
        env.context.delay.tick(now_ms + 4999)
        assert env.store.max_offset("T", 0) == 1
        env.context.delay.tick(now_ms + 5000)
        assert disk.jobs == []
        disk.slow = False
        assert bodies(env) == [b"x", b"cold"]


def test_retention_keeps_waiting_messages(env: BrokerFixture) -> None:
    env.send(body=b"first")
    env.tick(1)
    assert env.store.maintenance.pinned_from() is None
    send_delayed(env, 3)
    (delayed,) = stored(env, SCHEDULE, 2)
    send_delayed(env, 1)
    env.tick(1)
    assert env.store.maintenance.pinned_from() == delayed.physical_offset
    advance(env, 2000)
    assert env.store.maintenance.pinned_from() == delayed.physical_offset
    advance(env, 9000)
    assert env.store.maintenance.pinned_from() is None


def test_deleted_messages_are_skipped(env: BrokerFixture) -> None:
    env.send(body=b"x")
    for number in range(60):
        send_delayed(env, 1, body=str(number).encode() * 300)
    env.store.expire(1)
    env.store.maintenance.finish()
    advance(env, 2000)
    left = [body for body in bodies(env) if body != b"x"]
    queue = env.store.queue(SCHEDULE, 0)
    assert queue is not None
    assert 0 < len(left) == 60 - queue.min_offset < 60


# --- metrics -------------------------------------------------------------------------------------


def test_mqadmin_shows_the_progress_of_levels(env: BrokerFixture) -> None:
    env.send(body=b"x")
    for _ in range(3):
        send_delayed(env, 1)
    advance(env, 1500)
    send_delayed(env, 1)
    send_delayed(env, 4)
    env.tick(1)
    table = fastjson.decode(env.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body, KVTable).table
    assert table["scheduleMessageOffset_1"] == "3,4"
    assert table["scheduleMessageOffset_4"] == "0,1"
    env.context.delay.finish(env.now_ms)
    response_body = env.ask(RequestCode.GET_ALL_DELAY_OFFSET).body
    assert fastjson.decode(response_body, DelayOffsetSerializeWrapper).offset_table == {1: 3}


def test_progress_is_loaded_from_the_file(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as env:
        env.send(body=b"x")
        send_delayed(env, 1)
        advance(env, 1500)
    table = DelayOffsetTable()
    with broker_fixture(tmp_path) as env:
        table.load(env.context.persistence.file(DelayOffsetTable.FILE))
        assert dict(table.offsets) == {1: 1}


def test_under_sync_flush_the_response_waits(tmp_path: Path) -> None:
    settings = Settings(store=small_config(sync_flush=True))
    with broker_fixture(tmp_path, settings) as env:
        env.send()  # creates the topic
        frame = env.send_frame(properties={"DELAY": "1"})
        env.request_loop.bind(memoryview(bytearray(frame)), BORN)
        env.request_loop.serve(0, len(frame), env.now_ms)
        assert env.request_loop.output.length == 0
        assert read_reply(env.broker.send.pending.take()).code == 0
        assert read_reply(env.broker.send.flush_timeout.take()).code == 10
