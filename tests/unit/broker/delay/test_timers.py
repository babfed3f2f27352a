"""The timer: delivery at the millisecond, never early, over days and clock changes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.delay import timer_prefetch
from penstock.broker.delay import timers as timer_module
from penstock.errors import DiskFull
from penstock.metrics import Registry
from penstock.rpc.answers import TickAt
from penstock.store.retention import STEP_MS
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
    advance,
    advance_in_steps,
    bodies,
    crash,
    open_broker,
    send,
    stored,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    made = open_broker(tmp_path / "store")
    made.send(body=b"make the topic")
    yield made
    made.close()


def arrived(env: BrokerFixture, sent_ms: int) -> dict[bytes, int]:
    """When messages were stored, counted from the send."""
    return {message.body: message.store_ms - sent_ms for message in stored(env)[1:]}


# --- redirect


def test_a_timer_message_keeps_its_slot_and_real_queue(env: BrokerFixture) -> None:
    answer = send(env, 2500, b"later", queue_id=2, tag="vip")
    (delayed,) = stored(env, TIMER)
    assert answer.ext is not None
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("2", "0")
    assert answer.ext["msgId"] == delayed.offset_id
    assert delayed.properties["TIMER_OUT_MS"] == str(env.now_ms + 2000)
    assert (delayed.properties["REAL_TOPIC"], delayed.properties["REAL_QID"]) == ("T", "2")
    assert delayed.tags == "vip"


def test_the_delivered_message_has_its_enqueue_and_dequeue_times(env: BrokerFixture) -> None:
    send(env, 2500, b"later", queue_id=2, tag="vip", properties={"k": "v"})
    (delayed,) = stored(env, TIMER)
    advance(env, 2500)
    (copy,) = stored(env, queue_id=2)
    same = ("body", "flag", "sys_flag", "born_ms", "born_host", "store_host", "reconsume_times")
    for name in same:
        assert getattr(copy, name) == getattr(delayed, name), name
    assert copy.properties == {
        **delayed.properties,
        "TIMER_ENQUEUE_MS": str(delayed.store_ms),
        "TIMER_DEQUEUE_MS": str(delayed.store_ms + 2500),
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
def test_delivery_properties_have_an_order_of_precedence(
    env: BrokerFixture, properties: dict[str, str], delay_ms: int
) -> None:
    sent_ms = env.now_ms
    assert env.send(body=b"a", properties=properties).code == 0
    advance(env, 4000)
    assert arrived(env, sent_ms) == {b"a": delay_ms}


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
@pytest.mark.parametrize("value", ["x", "1.5", "-", "9" * 20])
def test_a_time_that_is_not_a_number_is_refused(env: BrokerFixture, name: str, value: str) -> None:
    answer = env.send(properties={name: value})
    assert answer.code == 13
    assert name in str(answer.remark)


@pytest.mark.parametrize("value", ["0", "-1", "-9223372036854775808"])
def test_a_past_time_is_delivered_at_once(env: BrokerFixture, value: str) -> None:
    assert env.send(body=b"now", properties={"TIMER_DELAY_MS": value}).code == 0
    assert bodies(env)[1:] == [b"now"]
    answer = env.send(properties={"TIMER_DELAY_MS": value, "TIMER_DEL_UNIQKEY": "k"})
    assert answer.code == 13


def test_a_time_beyond_the_limit_is_refused(env: BrokerFixture) -> None:
    most_s = 40 * 86_400
    assert env.send(properties={"TIMER_DELAY_SEC": str(most_s)}).code == 0
    answer = env.send(properties={"TIMER_DELAY_SEC": str(most_s + 1)})
    assert answer.code == 13
    for text in (str(most_s), str(most_s + 1), "timer_delay_s_max"):
        assert text in str(answer.remark)
    assert env.send(properties={"TIMER_DELAY_SEC": "9223372036854775807"}).code == 13


def test_timers_can_be_disabled(tmp_path: Path) -> None:
    env = open_broker(tmp_path, timers_enabled=False)
    answer = env.send(properties={"TIMER_DELAY_SEC": "1"})
    assert (answer.code, "timers_enabled" in str(answer.remark)) == (14, True)
    env.close()


def test_a_delivered_message_can_be_sent_again(env: BrokerFixture) -> None:
    send(env, 10)
    advance(env, 20)
    (message,) = stored(env)[1:]
    assert env.send(body=b"on", properties=dict(message.properties)).code == 0
    assert bodies(env)[-1] == b"on"


# --- precision


def test_each_message_is_delivered_at_its_millisecond(env: BrokerFixture) -> None:
    sent_ms = env.now_ms
    delays = [1, 2, 300, 999, 1000, 1001, 1500, 1999, 2000, 59_999, 60_000, 61_234, 400_007]
    for delay_ms in reversed(delays):
        send(env, delay_ms)
    advance(env, 401_000)
    assert arrived(env, sent_ms) == {str(delay_ms).encode(): delay_ms for delay_ms in delays}


def test_messages_of_one_millisecond_keep_their_order(env: BrokerFixture) -> None:
    for number in range(40):
        send(env, 5000 - (number % 2), b"%d" % number)
    advance(env, 6000)
    odd_first = [*range(1, 40, 2), *range(0, 40, 2)]
    assert bodies(env)[1:] == [b"%d" % number for number in odd_first]


def test_a_send_with_a_short_delay_wakes_the_server(env: BrokerFixture) -> None:
    env.tick(0)
    env.broker.effects.take()
    send(env, 7)
    wakes = [effect.ms for effect in env.broker.effects.take() if isinstance(effect, TickAt)]
    assert wakes == [env.now_ms + 7]
    send(env, 60_000)
    assert not [e for e in env.broker.effects.take() if isinstance(e, TickAt)], "one is enough"


def test_a_tick_delivers_a_bounded_number(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_module, "TICK_MESSAGES_MAX", 10)
    for number in range(25):
        send(env, 2000, b"%d" % number)
    advance(env, 1999)
    env.now_ms += 1
    counts = []
    for _ in range(4):
        env.broker.tick(env.now_ms)
        counts.append(len(bodies(env)) - 1)
    assert counts == [10, 20, 25, 25]


def test_long_chains_are_read_in_several_ticks(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_prefetch, "TICK_UNITS_MAX", 7)
    sent_ms = env.now_ms
    for number in range(60):
        send(env, 9000 - number, b"%d" % (9000 - number))
    advance(env, 10_000)
    assert arrived(env, sent_ms) == {b"%d" % ms: ms for ms in range(8941, 9001)}


def test_messages_added_during_the_read_of_a_chain_are_in_order(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_prefetch, "TICK_UNITS_MAX", 3)
    for number in range(20):
        send(env, 3500, b"%d" % number)
    advance(env, 1600)  # the chain is being read
    for number in range(20, 30):
        send(env, 1900, b"%d" % number)
        env.tick(0)
    advance(env, 3000)
    assert bodies(env)[1:] == [b"%d" % number for number in range(30)]


# --- clocks and downtime


def test_after_a_long_downtime_the_oldest_is_delivered_first(tmp_path: Path) -> None:
    env = open_broker(tmp_path)
    env.send(body=b"x")
    for hours in (30, 2, 50, 1):
        send(env, hours * HOUR_MS, b"%d" % hours)
    advance(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms + 20 * DAY_MS)
    advance(env, 2000)
    assert bodies(env) == [b"x", b"1", b"2", b"30", b"50"]
    send(env, 3 * DAY_MS, b"again")
    advance_in_steps(env, 3 * DAY_MS, 10 * 60_000)
    advance(env, 2000)
    assert bodies(env)[-1] == b"again"
    env.close()


def test_a_clock_that_is_set_back_delivers_by_the_clock(env: BrokerFixture) -> None:
    send(env, 5000, b"a")
    advance(env, 3000)
    env.now_ms -= HOUR_MS // 10
    send(env, 2000, b"b")
    advance(env, 1999)
    assert bodies(env)[1:] == []
    advance(env, 1)
    assert bodies(env)[1:] == [b"b"]
    advance(env, HOUR_MS // 10)
    assert bodies(env)[1:] == [b"b", b"a"]


def test_a_clock_that_is_set_forward_delivers_what_is_due(env: BrokerFixture) -> None:
    send(env, 5000, b"a")
    send(env, DAY_MS, b"b")
    advance(env, 1000)
    env.now_ms += HOUR_MS
    advance(env, 1000)
    assert bodies(env)[1:] == [b"a"]


# --- stores and topics that change


def test_messages_wait_while_the_store_refuses_writes(env: BrokerFixture) -> None:
    send(env, 1000, b"a")
    advance(env, 500)
    env.store.writer.refusal = DiskFull("full")
    env.now_ms += 600
    env.broker.timers.tick(env.now_ms)
    assert env.broker.timers.due() <= env.now_ms + timer_module.RETRY_MS
    assert bodies(env)[1:] == []
    env.store.writer.refusal = None
    advance(env, 200)
    assert bodies(env)[1:] == [b"a"]


def test_a_message_of_a_deleted_topic_is_dropped(env: BrokerFixture) -> None:
    send(env, 1000, topic="Gone")
    list(env.context.topics.delete("Gone", env.now_ms))
    advance(env, 1500)
    assert env.context.topics.get("Gone") is None
    assert env.broker.timers.metrics.dropped == 1
    send(env, 1000, b"new life", topic="Gone")
    advance(env, 1500)
    assert bodies(env, "Gone") == [b"new life"]


def test_rolling_does_not_revive_a_deleted_topic(tmp_path: Path) -> None:
    env = open_broker(tmp_path, timer_roll_slots=600)
    send(env, HOUR_MS, topic="Gone")
    advance(env, 2000)
    list(env.context.topics.delete("Gone", env.now_ms))
    advance_in_steps(env, 2 * HOUR_MS, 60_000)
    assert env.context.topics.get("Gone") is None
    assert env.broker.timers.metrics.dropped == 1
    env.close()


# --- long delays


@pytest.mark.parametrize("retain_hours", [72, 1])
@pytest.mark.slow
def test_distant_messages_are_rolled_before_retention(tmp_path: Path, retain_hours: int) -> None:
    days = 40 if retain_hours == 72 else 2
    env = open_broker(
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
        advance_in_steps(env, step_ms, min(step_ms, STEP_MS))
        env.send(body=b"y" * 3000, topic="Noise")
        for segment in env.store.log.segments.items[:-1]:  # by the machine's clock before
            at = env.store.lookup.store_ms(segment.start) / 1000
            os.utime(segment.path, (at, at))
        pin = env.broker.timers.pinned_from()
        if pin is not None and pin < env.store.log.end:
            age_ms = env.now_ms - env.store.lookup.store_ms(env.store.log.begin())
            oldest_ms = max(oldest_ms, age_ms)
    assert bodies(env)[-1:] != [b"far"]
    advance(env, sent_ms + due_ms - env.now_ms - 1)
    assert b"far" not in bodies(env)
    advance(env, 1)
    last = stored(env)[-1]
    assert (last.body, last.store_ms) == (b"far", sent_ms + due_ms)
    assert int(last.properties["TIMER_ROLL_TIMES"]) >= days * 24 // retain_hours
    assert env.store.log.begin() > 0, "retention worked all the time"
    assert oldest_ms <= retain_hours * HOUR_MS + 8 * step_ms, "timers hold the log no longer"
    assert env.broker.timers.metrics.counts == {}
    env.close()


def test_nothing_is_pinned_when_no_message_waits(env: BrokerFixture) -> None:
    send(env, 2000)
    advance(env, 1000)
    assert env.broker.timers.pinned_from() is not None
    advance(env, 5000)
    assert env.broker.timers.pinned_from() is None


# --- cold messages


def test_cold_messages_are_prefetched_in_the_thread_pool(tmp_path: Path) -> None:
    env = open_broker(tmp_path)
    env.send(body=b"x")
    send(env, 5000, b"cold")
    advance(env, 1000)
    now_ms = env.now_ms
    env.close()
    disk = SlowDisk()
    env = open_broker(tmp_path, now_ms, disk=disk)
    disk.slow = True
    advance(env, 3000)
    for _ in range(5):
        disk.work()
        env.tick(1)
    advance(env, env.now_ms % 1000 and 994)
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


# --- metrics


def test_metrics_count_waiting_messages(env: BrokerFixture) -> None:
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
    advance(env, 4000)
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
    env = open_broker(tmp_path)
    for delay_ms in (1000, 90_000, 90_000):
        send(env, delay_ms)
    advance(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms)
    assert env.broker.timers.metrics.counts["T"].count == 2
    send(env, 70_000)
    advance(env, 3000)
    crash(env)
    env = open_broker(tmp_path, env.now_ms)
    assert env.broker.timers.metrics.counts["T"].count == 3
    env.close()


def test_an_idle_broker_writes_no_timer_files(tmp_path: Path) -> None:
    env = open_broker(tmp_path)
    env.send(body=b"x")
    advance(env, 5000)
    env.close()
    for name in ("timerwheel", "timerlog", "config/timercheck"):
        assert not (tmp_path / name).exists()
