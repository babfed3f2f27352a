"""Delayed messages: parked, delivered in time and in order, never early, across restarts."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.delay import delay_levels as delay_module
from penstock.config import Settings, delays_ms
from penstock.errors import DiskFull
from penstock.rpc.answers import PersistSoon, Reply
from penstock.store.tables import DelayOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable, TopicConfig
from penstock.wire.bodies.table_bodies import DelayOffsetSerializeWrapper
from penstock.wire.codes import RequestCode
from penstock.wire.message import StoredMessage, decode_messages
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BORN, House, PlainDisk, house, read_reply

SCHEDULE = "SCHEDULE_TOPIC_XXXX"
LEVELS_MS = delays_ms(small_config(sync_flush=False).delay_levels)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        yield made


def park(home: House, level: int | str = 1, **rest: Any) -> Reply:
    properties = {"DELAY": str(level), **rest.pop("properties", {})}
    return home.send(properties=properties, **rest)


def stored(home: House, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
    """All messages of a queue that readers may see."""
    home.store.settle()
    found: list[StoredMessage] = []
    offset = home.store.min_offset(topic, queue_id)
    while offset < home.store.max_offset(topic, queue_id):
        got = home.store.get(topic, queue_id, offset, wait=True)
        found += decode_messages(got.data)
        offset = got.next_offset
    return found


def bodies(home: House, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in stored(home, topic, queue_id)]


def let_pass(home: House, ms: int) -> None:
    """Sleep as the server does: until the first part is due, a second at most."""
    end = home.now_ms + ms
    while home.now_ms < end:
        wake = max(min(home.broker.due(), home.now_ms + 1000), home.now_ms + 1)
        home.tick(min(wake, end) - home.now_ms)


def test_a_delayed_message_is_parked_with_its_own_place(home: House) -> None:
    answer = park(home, 3, queue_id=2, body=b"later", tag="vip")
    assert answer.code == 0
    (parked,) = stored(home, SCHEDULE, 2)
    assert answer.ext is not None
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("2", "0")
    assert answer.ext["msgId"] == parked.offset_id
    assert answer.ext["transactionId"] == parked.unique_id
    assert parked.properties["REAL_TOPIC"] == "T"
    assert parked.properties["REAL_QID"] == "2"
    assert (parked.tags, parked.properties["CLUSTER"]) == ("vip", "DefaultCluster")
    queue = home.store.queue(SCHEDULE, 2)
    assert queue is not None
    entry = queue.entry(0)
    assert entry is not None
    assert entry[2] == home.now_ms + LEVELS_MS[2]
    assert bodies(home, queue_id=2) == []


def test_the_copy_is_the_message_as_it_was_sent(home: House) -> None:
    park(home, 1, queue_id=2, body=b"later", tag="vip", properties={"k": "v", "WAIT": "false"})
    (parked,) = stored(home, SCHEDULE, 0)
    let_pass(home, 999)
    assert bodies(home, queue_id=2) == []
    let_pass(home, 1)
    (copy,) = stored(home, queue_id=2)
    assert copy.store_ms == parked.store_ms + 1000
    same = ("body", "flag", "sys_flag", "born_ms", "born_host", "store_host", "reconsume_times",
            "properties", "body_crc")  # fmt: skip
    for name in same:
        assert getattr(copy, name) == getattr(parked, name), name
    queue = home.store.queue("T", 2)
    assert queue is not None
    entry = queue.entry(0)
    assert entry is not None
    assert entry[2] == sum(ord(c) * 31 ** (2 - i) for i, c in enumerate("vip"))  # the tag again


@pytest.mark.parametrize(("asked", "level"), [(18, 18), (19, 18), (2**31 - 1, 18), ("+2", 2)])
def test_a_level_beyond_the_table_is_the_last(home: House, asked: int | str, level: int) -> None:
    assert park(home, asked).code == 0
    (parked,) = stored(home, SCHEDULE, level - 1)
    assert int(parked.properties["DELAY"]) == level


@pytest.mark.parametrize("level", [0, -1, -(2**31)])
def test_no_level_is_no_delay(home: House, level: int) -> None:
    assert park(home, level).code == 0
    assert len(stored(home)) == 1


@pytest.mark.parametrize("level", ["x", "1.5", "-", str(2**31), "9" * 40])
def test_a_level_that_is_no_number_is_refused(home: House, level: str) -> None:
    assert park(home, level).code == 13
    assert home.store.log.end == 0


def test_a_level_counts_more_than_a_timer(home: House) -> None:
    assert park(home, 1, properties={"TIMER_DELAY_SEC": "5", "TIMER_DELIVER_MS": "7"}).code == 0
    (parked,) = stored(home, SCHEDULE, 0)
    assert not [name for name in parked.properties if name.startswith("TIMER")]


def test_a_send_that_makes_its_topic_announces_that_topic(home: House) -> None:
    named: list[str] = []
    announced = home.context.topics.reply_when_registered

    def note(topic: str, answer: Any, now_ms: int) -> Any:
        named.append(topic)
        return announced(topic, answer, now_ms)

    home.context.topics.reply_when_registered = note  # type: ignore[method-assign]
    assert park(home, 1, topic="New").code == 0
    assert named == ["New"]


def test_a_message_too_long_under_its_own_name_is_refused(home: House) -> None:
    topic = "L" * 120
    least = home.store.log.row.size - 8 - 91 - len(SCHEDULE) - 460
    lengths = range(least, least + 400, 7)
    answers = [park(home, 1, topic=topic, body=b"x" * length).code for length in lengths]
    assert answers == sorted(answers)
    assert {0, 13} == set(answers)
    let_pass(home, 2000)
    assert len(stored(home, topic)) == answers.count(0)


def test_each_level_waits_its_time(home: House) -> None:
    for level in range(1, 19):
        park(home, level, body=str(level).encode())
    sent_ms = home.now_ms
    for due_ms in LEVELS_MS:
        home.tick(sent_ms + due_ms - 1 - home.now_ms)
        home.tick(1)
    arrived = {int(message.body): message.store_ms - sent_ms for message in stored(home)}
    assert arrived == dict(enumerate(LEVELS_MS, 1))


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 40_000), st.booleans()), min_size=1, max_size=40
    )
)
def test_nothing_is_early_lost_or_out_of_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    sent: dict[int, tuple[int, int]] = {}  # number → (level, due)
    home = House(root)
    home.send(body=b"make the topic")
    try:
        for number, (level, wait_ms, restart) in enumerate(steps):
            park(home, level, body=str(number).encode())
            sent[number] = (level, home.now_ms + LEVELS_MS[level - 1])
            let_pass(home, wait_ms)
            if restart:
                now_ms = home.now_ms
                home.close()
                home = House(root)
                home.now_ms = now_ms
        let_pass(home, LEVELS_MS[4])
        arrived = [(int(m.body), m.store_ms) for m in stored(home)[1:]]
    finally:
        home.close()
    assert sorted(number for number, _ in arrived) == list(sent)
    for number, store_ms in arrived:
        assert store_ms >= sent[number][1]
    for level in range(1, 6):
        mine = [number for number, _ in arrived if sent[number][0] == level]
        assert mine == sorted(mine)


def test_deliveries_come_promptly_and_wake_pulls(home: House) -> None:
    home.send(body=b"first")
    park(home, 2, body=b"second")
    home.pull(1, flags=6, suspendTimeoutMillis=15000)
    home.tick(700)
    assert home.broker.context.delay.due() == home.now_ms - 700 + 5000
    home.tick(4299)
    assert home.woken == []
    home.tick(1)
    assert [m.body for m in decode_messages(home.woken[0].body)] == [b"second"]


def test_a_turn_delivers_a_bounded_number(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_module, "TICK_MESSAGES_MAX", 10)
    for number in range(25):
        park(home, 1 + number % 2, body=str(number).encode())
    home.now_ms += 10_000
    counts = []
    for _ in range(4):
        home.tick(0)
        counts.append(len(stored(home)))
        if len(stored(home)) < 25:
            assert home.context.delay.due() <= home.now_ms
    assert counts == [10, 20, 25, 25]


def test_a_refusing_store_makes_them_wait(home: House) -> None:
    home.send(body=b"x")
    park(home, 1)
    let_pass(home, 500)
    home.store.path.refusal = DiskFull("full")
    home.now_ms += 600
    home.context.delay.tick(home.now_ms)
    assert home.context.delay.due() == home.now_ms + delay_module.RETRY_MS
    assert len(stored(home)) == 1
    home.store.path.refusal = None
    let_pass(home, 200)
    assert len(stored(home)) == 2


# --- clocks --------------------------------------------------------------------------------------


def test_a_clock_set_back_delays_by_one_more_delay_at_most(home: House) -> None:
    home.send(body=b"x")
    home.now_ms -= 3_600_000
    park(home, 1, body=b"a")
    let_pass(home, 300)
    park(home, 1, body=b"b")
    let_pass(home, 600)
    assert bodies(home) == [b"x"]  # not early by the clock of the wall
    let_pass(home, 1400)
    assert bodies(home) == [b"x", b"a", b"b"]


def test_levels_that_the_table_lost_are_delivered(tmp_path: Path) -> None:
    with house(tmp_path) as home:
        home.send(body=b"x")
        park(home, 18, body=b"late")
        now_ms = home.now_ms
    short = msgspec.structs.replace(small_config(sync_flush=False), delay_levels="1s 10s")
    with house(tmp_path, Settings(store=short)) as home:
        home.now_ms = now_ms
        let_pass(home, 9_000)
        assert bodies(home) == [b"x"]
        let_pass(home, 3_000)
        assert bodies(home) == [b"x", b"late"]


# --- restarts ------------------------------------------------------------------------------------


def crash(home: House) -> None:
    """End as by kill -9: the files stay as they are, nothing is persisted."""
    home.store.flusher.stop()
    home.store.disk.close()
    home.store._lock.release()


def test_a_clean_restart_delivers_each_once(tmp_path: Path) -> None:
    with house(tmp_path) as home:
        home.send(body=b"x")
        park(home, 1, body=b"1")
        park(home, 2, body=b"2")
        let_pass(home, 2000)
        now_ms = home.now_ms
    with house(tmp_path) as home:
        home.now_ms = now_ms + 60_000
        home.tick(0)
        assert bodies(home) == [b"x", b"1", b"2"]


def test_after_a_crash_nothing_is_lost(tmp_path: Path) -> None:
    home = House(tmp_path)
    home.send(body=b"x")
    for number in range(5):
        park(home, 1, body=str(number).encode())
        let_pass(home, 400)
    now_ms = home.now_ms
    before = bodies(home)
    crash(home)
    with house(tmp_path) as home:
        home.now_ms = now_ms
        assert bodies(home) == before
        let_pass(home, 2000)
        assert set(bodies(home)) == {b"x", b"0", b"1", b"2", b"3", b"4"}


def test_progress_is_noted_when_the_copies_are_durable(home: House) -> None:
    home.send(body=b"x")
    park(home, 1)
    let_pass(home, 3000)
    assert len(stored(home)) == 2
    assert home.context.delay.table.get(1) == 0
    home.store.flusher.pump()
    home.tick(1)
    assert home.context.delay.table.get(1) == 1
    home.broker.effects.take()
    home.tick(10_000)
    saved = [
        effect.table for effect in home.broker.effects.take() if isinstance(effect, PersistSoon)
    ]
    assert home.context.delay.table in saved


def test_an_offset_that_the_queue_does_not_have_is_corrected(tmp_path: Path) -> None:
    with house(tmp_path) as home:
        home.send(body=b"x")
        park(home, 1, body=b"a")
        home.context.delay.table.commit(1, 77, home.now_ms)
        home.context.persistence.save(home.context.delay.table)()
        home.context.delay.table.dirty = False
    with house(tmp_path) as home:
        home.tick(0)
        assert home.context.delay.lines[0].offset == 1
        home.now_ms += 5000
        park(home, 1, body=b"b")
        let_pass(home, 1000)
        assert bodies(home) == [b"x", b"b"]


# --- topics that change --------------------------------------------------------------------------


def test_a_message_of_a_deleted_topic_is_dropped(home: House) -> None:
    park(home, 1, topic="Gone")
    home.context.topics.delete("Gone", home.now_ms)
    let_pass(home, 1500)
    assert home.context.topics.get("Gone") is None
    assert home.context.delay.dropped == 1
    park(home, 1, topic="Gone", body=b"new life")
    let_pass(home, 1500)
    assert bodies(home, "Gone") == [b"new life"]


def test_a_topic_that_a_crash_forgot_is_made_anew(home: House) -> None:
    park(home, 1, topic="Lost", queue_id=3)
    home.context.topics.table.remove("Lost", home.now_ms)
    let_pass(home, 1500)
    config = home.context.topics.get("Lost")
    assert config is not None
    assert config.read_queue_nums == 4
    assert len(stored(home, "Lost", 3)) == 1


def test_in_a_smaller_topic_it_goes_where_consumers_look(home: House) -> None:
    park(home, 1, queue_id=3)
    smaller = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2, perm=6)
    home.context.topics.put(smaller, home.now_ms)
    let_pass(home, 1500)
    assert len(stored(home, "T", 1)) == 1


# --- files ---------------------------------------------------------------------------------------


class SlowDisk(PlainDisk):
    """Nothing older than the start is in memory, and the pool answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[Any, Future[Any]]] = []
        self.slow = False

    def read_now(self, fd: int, room: Any, at: int) -> bool:
        return not self.slow and super().read_now(fd, room, at)

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


def test_cold_messages_are_read_by_the_pool_ahead_of_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house(tmp_path) as home:
        home.send(body=b"x")
        park(home, 2, body=b"cold")
        now_ms = home.now_ms
    disk = SlowDisk()
    monkeypatch.setattr("tests.unit.broker.broker_kit.PlainDisk", lambda: disk)
    with house(tmp_path) as home:
        home.now_ms = now_ms
        disk.slow = True
        home.context.delay.tick(home.now_ms)
        assert home.context.delay.due() == home.now_ms + delay_module.POLL_MS
        assert home.store.care.pinned_from() == 0  # as long as nobody knows
        disk.work()
        home.context.delay.tick(home.now_ms + 5)
        assert home.context.delay.due() == now_ms + 5000
        home.context.delay.tick(now_ms + 4000)
        assert len(disk.jobs) == 1
        disk.work()
        home.context.delay.tick(now_ms + 4999)
        assert home.store.max_offset("T", 0) == 1
        home.context.delay.tick(now_ms + 5000)
        assert disk.jobs == []
        disk.slow = False
        assert bodies(home) == [b"x", b"cold"]


def test_retention_keeps_what_waits(home: House) -> None:
    home.send(body=b"first")
    home.tick(1)
    assert home.store.care.pinned_from() is None
    park(home, 3)
    (parked,) = stored(home, SCHEDULE, 2)
    park(home, 1)
    home.tick(1)
    assert home.store.care.pinned_from() == parked.physical_offset
    let_pass(home, 2000)
    assert home.store.care.pinned_from() == parked.physical_offset
    let_pass(home, 9000)
    assert home.store.care.pinned_from() is None


def test_what_retention_took_is_passed_over(home: House) -> None:
    home.send(body=b"x")
    for number in range(60):
        park(home, 1, body=str(number).encode() * 300)
    home.store.expire(1)
    home.store.care.finish()
    let_pass(home, 2000)
    left = [body for body in bodies(home) if body != b"x"]
    queue = home.store.queue(SCHEDULE, 0)
    assert queue is not None
    assert 0 < len(left) == 60 - queue.min_offset < 60


# --- figures -------------------------------------------------------------------------------------


def test_tools_see_how_far_levels_are(home: House) -> None:
    home.send(body=b"x")
    for _ in range(3):
        park(home, 1)
    let_pass(home, 1500)
    park(home, 1)
    park(home, 4)
    home.tick(1)
    table = fastjson.decode(home.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body, KVTable).table
    assert table["scheduleMessageOffset_1"] == "3,4"
    assert table["scheduleMessageOffset_4"] == "0,1"
    home.context.delay.finish(home.now_ms)
    told = home.ask(RequestCode.GET_ALL_DELAY_OFFSET).body
    assert fastjson.decode(told, DelayOffsetSerializeWrapper).offset_table == {1: 3}


def test_progress_is_read_from_the_file(tmp_path: Path) -> None:
    with house(tmp_path) as home:
        home.send(body=b"x")
        park(home, 1)
        let_pass(home, 1500)
    table = DelayOffsetTable()
    with house(tmp_path) as home:
        table.load(home.context.persistence.file(DelayOffsetTable.FILE))
        assert dict(table.offsets) == {1: 1}


def test_under_sync_flush_the_answer_waits(tmp_path: Path) -> None:
    settings = Settings(store=small_config(sync_flush=True))
    with house(tmp_path, settings) as home:
        home.send()  # makes the topic
        frame = home.send_frame(properties={"DELAY": "1"})
        home.request_loop.bind(memoryview(bytearray(frame)), BORN)
        home.request_loop.serve(0, len(frame), home.now_ms)
        assert home.request_loop.output.length == 0
        assert read_reply(home.broker.send.flush_pending.take()).code == 0
        assert read_reply(home.broker.send.flush_timeout.take()).code == 10
