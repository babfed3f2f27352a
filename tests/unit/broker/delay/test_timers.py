"""Timed messages: parked, delivered at their millisecond, never early, across days and clocks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.delay import timer_prefetch
from penstock.broker.delay import timers as timer_module
from penstock.errors import DiskFull
from penstock.metrics import Registry
from penstock.rpc.answers import TickAt
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.table_bodies import TimerCheckpoint, TimerMetricsSerializeWrapper
from penstock.wire.codes import RequestCode
from tests.unit.broker.broker_kit import BrokerFixture
from tests.unit.broker.delay.test_delay_levels import SlowDisk
from tests.unit.broker.delay.timer_kit import (
    DAY_MS,
    HOUR_MS,
    TIMER,
    bodies,
    crash,
    let_days_pass,
    let_pass,
    open_house,
    send,
    stored,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    made = open_house(tmp_path / "store")
    made.send(body=b"make the topic")
    yield made
    made.close()


def arrived(env: BrokerFixture, sent_ms: int) -> dict[bytes, int]:
    """When messages were stored, counted from the send."""
    return {message.body: message.store_ms - sent_ms for message in stored(env)[1:]}


# --- parking


def test_a_timed_message_is_parked_with_its_slot_and_its_own_place(env: BrokerFixture) -> None:
    answer = send(env, 2500, b"later", queue_id=2, tag="vip")
    (parked,) = stored(env, TIMER)
    assert answer.ext is not None
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("2", "0")
    assert answer.ext["msgId"] == parked.offset_id
    assert parked.properties["TIMER_OUT_MS"] == str(env.now_ms + 2000)
    assert (parked.properties["REAL_TOPIC"], parked.properties["REAL_QID"]) == ("T", "2")
    assert parked.tags == "vip"


def test_the_copy_is_the_message_with_two_times_more(env: BrokerFixture) -> None:
    send(env, 2500, b"later", queue_id=2, tag="vip", properties={"k": "v"})
    (parked,) = stored(env, TIMER)
    let_pass(env, 2500)
    (copy,) = stored(env, queue_id=2)
    same = ("body", "flag", "sys_flag", "born_ms", "born_host", "store_host", "reconsume_times")
    for name in same:
        assert getattr(copy, name) == getattr(parked, name), name
    assert copy.properties == {
        **parked.properties,
        "TIMER_ENQUEUE_MS": str(parked.store_ms),
        "TIMER_DEQUEUE_MS": str(parked.store_ms + 2500),
    }


@pytest.mark.parametrize(
    ("properties", "delay_ms"),
    [
        ({"TIMER_DELAY_SEC": "3"}, 3000),
        ({"TIMER_DELAY_MS": "+17"}, 17),
        ({"TIMER_DELIVER_MS": "1700000000250"}, 250),
        ({"TIMER_DELAY_SEC": "1", "TIMER_DELAY_MS": "5", "TIMER_DELIVER_MS": "7"}, 1000),
        ({"TIMER_DELAY_MS": "5", "TIMER_DELIVER_MS": "7"}, 5),
    ],
)
def test_what_is_asked_for_counts_by_priority(
    env: BrokerFixture, properties: dict[str, str], delay_ms: int
) -> None:
    sent_ms = env.now_ms
    assert env.send(body=b"a", properties=properties).code == 0
    let_pass(env, 4000)
    assert arrived(env, sent_ms) == {b"a": delay_ms}


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
@pytest.mark.parametrize("value", ["x", "1.5", "-", "9" * 20])
def test_a_time_that_is_no_number_is_refused(env: BrokerFixture, name: str, value: str) -> None:
    answer = env.send(properties={name: value})
    assert answer.code == 13
    assert name in str(answer.remark)


@pytest.mark.parametrize("value", ["0", "-1", "-9223372036854775808"])
def test_a_past_time_is_no_time(env: BrokerFixture, value: str) -> None:
    assert env.send(body=b"now", properties={"TIMER_DELAY_MS": value}).code == 0
    assert bodies(env)[1:] == [b"now"]
    answer = env.send(properties={"TIMER_DELAY_MS": value, "TIMER_DEL_UNIQKEY": "k"})
    assert answer.code == 13


def test_beyond_the_limit_is_refused_with_figure_and_setting(env: BrokerFixture) -> None:
    most_s = 40 * 86_400
    assert env.send(properties={"TIMER_DELAY_SEC": str(most_s)}).code == 0
    answer = env.send(properties={"TIMER_DELAY_SEC": str(most_s + 1)})
    assert answer.code == 13
    for text in (str(most_s), str(most_s + 1), "timer_delay_s_max"):
        assert text in str(answer.remark)
    assert env.send(properties={"TIMER_DELAY_SEC": "9223372036854775807"}).code == 13


def test_a_broker_without_timers_says_so(tmp_path: Path) -> None:
    env = open_house(tmp_path, timers_enabled=False)
    answer = env.send(properties={"TIMER_DELAY_SEC": "1"})
    assert (answer.code, "timers_enabled" in str(answer.remark)) == (14, True)
    env.close()


def test_what_was_delivered_can_be_sent_on(env: BrokerFixture) -> None:
    send(env, 10)
    let_pass(env, 20)
    (message,) = stored(env)[1:]
    assert env.send(body=b"on", properties=dict(message.properties)).code == 0
    assert bodies(env)[-1] == b"on"


# --- precision


def test_each_is_delivered_at_its_own_millisecond(env: BrokerFixture) -> None:
    sent_ms = env.now_ms
    delays = [1, 2, 300, 999, 1000, 1001, 1500, 1999, 2000, 59_999, 60_000, 61_234, 400_007]
    for delay_ms in reversed(delays):
        send(env, delay_ms)
    let_pass(env, 401_000)
    assert arrived(env, sent_ms) == {str(delay_ms).encode(): delay_ms for delay_ms in delays}


def test_within_a_millisecond_the_order_is_that_of_the_sends(env: BrokerFixture) -> None:
    for number in range(40):
        send(env, 5000 - (number % 2), b"%d" % number)
    let_pass(env, 6000)
    odd_first = [*range(1, 40, 2), *range(0, 40, 2)]
    assert bodies(env)[1:] == [b"%d" % number for number in odd_first]


def test_a_send_for_soon_wakes_the_server(env: BrokerFixture) -> None:
    env.tick(0)
    env.broker.effects.take()
    send(env, 7)
    wakes = [effect.ms for effect in env.broker.effects.take() if isinstance(effect, TickAt)]
    assert wakes == [env.now_ms + 7]
    send(env, 60_000)
    assert not [e for e in env.broker.effects.take() if isinstance(e, TickAt)], "one is enough"


def test_a_turn_delivers_a_bounded_number(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_module, "TICK_MESSAGES_MAX", 10)
    for number in range(25):
        send(env, 2000, b"%d" % number)
    let_pass(env, 1999)
    env.now_ms += 1
    counts = []
    for _ in range(4):
        env.broker.tick(env.now_ms)
        counts.append(len(bodies(env)) - 1)
    assert counts == [10, 20, 25, 25]


def test_long_chains_are_read_in_turns(env: BrokerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_prefetch, "TICK_UNITS", 7)
    sent_ms = env.now_ms
    for number in range(60):
        send(env, 9000 - number, b"%d" % (9000 - number))
    let_pass(env, 10_000)
    assert arrived(env, sent_ms) == {b"%d" % ms: ms for ms in range(8941, 9001)}


def test_what_comes_while_a_chain_is_read_is_in_order(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_prefetch, "TICK_UNITS", 3)
    for number in range(20):
        send(env, 3500, b"%d" % number)
    let_pass(env, 1600)  # the chain is being read
    for number in range(20, 30):
        send(env, 1900, b"%d" % number)
        env.tick(0)
    let_pass(env, 3000)
    assert bodies(env)[1:] == [b"%d" % number for number in range(30)]


# --- clocks and downtime


def test_after_days_of_downtime_the_oldest_comes_first(tmp_path: Path) -> None:
    env = open_house(tmp_path)
    env.send(body=b"x")
    for hours in (30, 2, 50, 1):
        send(env, hours * HOUR_MS, b"%d" % hours)
    let_pass(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_house(tmp_path, now_ms + 20 * DAY_MS)
    let_pass(env, 2000)
    assert bodies(env) == [b"x", b"1", b"2", b"30", b"50"]
    send(env, 3 * DAY_MS, b"again")
    let_days_pass(env, 3 * DAY_MS, 10 * 60_000)
    let_pass(env, 2000)
    assert bodies(env)[-1] == b"again"
    env.close()


def test_a_clock_set_back_delivers_by_the_clock(env: BrokerFixture) -> None:
    send(env, 5000, b"a")
    let_pass(env, 3000)
    env.now_ms -= HOUR_MS // 10
    send(env, 2000, b"b")
    let_pass(env, 1999)
    assert bodies(env)[1:] == []
    let_pass(env, 1)
    assert bodies(env)[1:] == [b"b"]
    let_pass(env, HOUR_MS // 10)
    assert bodies(env)[1:] == [b"b", b"a"]


def test_a_clock_set_forward_delivers_what_is_due(env: BrokerFixture) -> None:
    send(env, 5000, b"a")
    send(env, DAY_MS, b"b")
    let_pass(env, 1000)
    env.now_ms += HOUR_MS
    let_pass(env, 1000)
    assert bodies(env)[1:] == [b"a"]


# --- stores and topics that change


def test_a_refusing_store_makes_them_wait(env: BrokerFixture) -> None:
    send(env, 1000, b"a")
    let_pass(env, 500)
    env.store.writer.refusal = DiskFull("full")
    env.now_ms += 600
    env.broker.timers.tick(env.now_ms)
    assert env.broker.timers.due() <= env.now_ms + timer_module.RETRY_MS
    assert bodies(env)[1:] == []
    env.store.writer.refusal = None
    let_pass(env, 200)
    assert bodies(env)[1:] == [b"a"]


def test_a_message_of_a_deleted_topic_is_dropped(env: BrokerFixture) -> None:
    send(env, 1000, topic="Gone")
    env.context.topics.delete("Gone", env.now_ms)
    let_pass(env, 1500)
    assert env.context.topics.get("Gone") is None
    assert env.broker.timers.figures.dropped == 1
    send(env, 1000, b"new life", topic="Gone")
    let_pass(env, 1500)
    assert bodies(env, "Gone") == [b"new life"]


def test_a_deleted_topic_does_not_come_back_by_rolling(tmp_path: Path) -> None:
    env = open_house(tmp_path, timer_roll_slots=600)
    send(env, HOUR_MS, topic="Gone")
    let_pass(env, 2000)
    env.context.topics.delete("Gone", env.now_ms)
    let_days_pass(env, 2 * HOUR_MS, 60_000)
    assert env.context.topics.get("Gone") is None
    assert env.broker.timers.figures.dropped == 1
    env.close()


# --- waiting for long


@pytest.mark.parametrize("retain_hours", [72, 1])
def test_far_messages_roll_on_before_retention_takes_them(
    tmp_path: Path, retain_hours: int
) -> None:
    days = 40 if retain_hours == 72 else 2
    env = open_house(
        tmp_path, retain_hours=retain_hours, delete_hours=";".join(map(str, range(24)))
    )
    env.send(body=b"x")
    sent_ms = env.now_ms
    due_ms = days * DAY_MS - 12_345
    send(env, due_ms, b"far")
    send(env, due_ms // 3, b"nearer")
    oldest_ms = 0
    step_ms = HOUR_MS if retain_hours == 72 else 4 * 60_000
    while env.now_ms + step_ms < sent_ms + due_ms:
        let_days_pass(env, step_ms, step_ms)
        env.send(body=b"y" * 3000, topic="Noise")
        for segment in env.store.log.segments.items[:-1]:  # by the machine's clock before
            at = env.store.lookup.store_ms(segment.start) / 1000
            os.utime(segment.path, (at, at))
        pin = env.broker.timers.pinned_from()
        if pin is not None and pin < env.store.log.end:
            age_ms = env.now_ms - env.store.lookup.store_ms(env.store.log.begin())
            oldest_ms = max(oldest_ms, age_ms)
    assert bodies(env)[-1:] != [b"far"]
    let_pass(env, sent_ms + due_ms - env.now_ms - 1)
    assert b"far" not in bodies(env)
    let_pass(env, 1)
    last = stored(env)[-1]
    assert (last.body, last.store_ms) == (b"far", sent_ms + due_ms)
    assert int(last.properties["TIMER_ROLL_TIMES"]) >= days * 24 // retain_hours
    assert env.store.log.begin() > 0, "retention worked all the time"
    assert oldest_ms <= retain_hours * HOUR_MS + 8 * step_ms, "timers hold the log no longer"
    assert env.broker.timers.figures.counts == {}
    env.close()


def test_nothing_is_pinned_when_nothing_waits(env: BrokerFixture) -> None:
    send(env, 2000)
    let_pass(env, 1000)
    assert env.broker.timers.pinned_from() is not None
    let_pass(env, 5000)
    assert env.broker.timers.pinned_from() is None


# --- cold messages


def test_cold_messages_are_read_by_the_pool_ahead_of_their_time(tmp_path: Path) -> None:
    env = open_house(tmp_path)
    env.send(body=b"x")
    send(env, 5000, b"cold")
    let_pass(env, 1000)
    now_ms = env.now_ms
    env.close()
    disk = SlowDisk()
    env = open_house(tmp_path, now_ms, disk=disk)
    disk.slow = True
    let_pass(env, 3000)
    for _ in range(5):
        disk.work()
        env.tick(1)
    let_pass(env, env.now_ms % 1000 and 994)
    disk.work()
    env.now_ms = now_ms + 3999
    env.broker.timers.tick(env.now_ms)
    assert bodies_now(env) == 1
    env.now_ms += 1
    env.broker.timers.tick(env.now_ms)
    assert bodies_now(env) == 2
    disk.work()
    disk.slow = False
    env.close()


def bodies_now(env: BrokerFixture) -> int:
    env.store.publish()
    return env.store.max_offset("T", 0)


# --- figures


def test_figures_tell_what_waits(env: BrokerFixture) -> None:
    send(env, 3000)
    send(env, 50_000, topic="U")
    send(env, 50_000, topic="U")
    env.tick(20)
    registry = Registry()
    env.broker.timers.add_metrics(registry)
    text = registry.text()
    assert 'rocketmq_timing_messages{topic="U"} 2' in text
    assert 'rocketmq_timer_message_snapshot{timer_bound_s="5"} 1' in text
    assert 'rocketmq_timer_message_snapshot{timer_bound_s="60"} 2' in text
    assert "rocketmq_timer_dequeue_lag 3" in text
    let_pass(env, 4000)
    text = registry.text()
    assert 'rocketmq_timer_dequeue_total{topic="T"} 1' in text
    assert "penstock_timer_late_ms 0" in text
    body = env.ask(RequestCode.GET_TIMER_METRICS).body
    counts = fastjson.decode(body, TimerMetricsSerializeWrapper).timing_count
    assert {topic: metric.count for topic, metric in counts.items()} == {"U": 2}
    check = TimerCheckpoint.unpack(env.ask(RequestCode.GET_TIMER_CHECK_POINT).body)
    assert check.last_timer_queue_offset == 3
    info = fastjson.decode(env.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body, KVTable).table
    assert (info["timerCongestNum"], info["timerOffsetBehind"]) == ("2", "0")


def test_counts_survive_a_restart_and_a_crash(tmp_path: Path) -> None:
    env = open_house(tmp_path)
    for delay_ms in (1000, 90_000, 90_000):
        send(env, delay_ms)
    let_pass(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_house(tmp_path, now_ms)
    assert env.broker.timers.figures.counts["T"].count == 2
    send(env, 70_000)
    let_pass(env, 3000)
    crash(env)
    env = open_house(tmp_path, env.now_ms)
    assert env.broker.timers.figures.counts["T"].count == 3
    env.close()


def test_an_idle_broker_writes_no_timer_files(tmp_path: Path) -> None:
    env = open_house(tmp_path)
    env.send(body=b"x")
    let_pass(env, 5000)
    env.close()
    for name in ("timerwheel", "timerlog", "config/timercheck"):
        assert not (tmp_path / name).exists()
