"""Counters and their windows."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

import penstock.broker.stats as stats_module
from penstock.broker.stats import Stats
from penstock.wire.bodies.admin_bodies import BrokerStatsData, BrokerStatsItem
from tests.unit.broker.admin.admin_kit import NOW_MS, AdminFixture, admin_fixture

SECOND_MS = 1_000
NOTHING = BrokerStatsItem(sum=0, tps=0.0, avgpt=0.0)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path) as env:
        for topic in ("orders", "sms", "rmq_sys_wheel_timer", "RMQ_SYS_TRACE_TOPIC"):
            env.topic(topic)
        yield env


def pass_seconds(stats: Stats, begin_ms: int, seconds: int) -> int:
    for second in range(1, seconds + 1):
        stats.tick(begin_ms + second * SECOND_MS)
    return begin_ms + seconds * SECOND_MS


def minute(stats: Stats, name: str, key: str) -> BrokerStatsItem:
    data = stats.view(name, key)
    assert data is not None
    assert data.stats_minute is not None
    return data.stats_minute


def test_topic_counts_messages_and_bytes_of_all_its_queues(env: AdminFixture) -> None:
    for queue_id in (0, 1, 1, 2):
        env.put("orders", queue_id, body=b"x" * 10)
    env.put("sms")
    pass_seconds(env.stats, NOW_MS, 10)
    size = sum(q.put_bytes for q in env.store.queues.rows if q.topic == b"orders")
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders") == BrokerStatsItem(
        sum=4, tps=0.4, avgpt=1.0
    )
    assert minute(env.stats, "TOPIC_PUT_SIZE", "orders") == BrokerStatsItem(
        sum=size, tps=size / 10, avgpt=size / 4
    )
    assert minute(env.stats, "BROKER_PUT_NUMS", "any") == BrokerStatsItem(sum=5, tps=0.5, avgpt=0.0)
    assert env.stats.put_tps("orders") == 0.4


def test_minute_is_a_sliding_window(env: AdminFixture) -> None:
    env.put("orders")
    now_ms = pass_seconds(env.stats, NOW_MS, 60)
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders").sum == 1
    pass_seconds(env.stats, now_ms, 10)
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders") == NOTHING


def test_hour_and_day_have_samples_of_their_own(env: AdminFixture) -> None:
    env.put("orders")
    env.stats.tick(NOW_MS + 600 * SECOND_MS)
    data = env.stats.view("TOPIC_PUT_NUMS", "orders")
    assert data is not None
    assert data.stats_hour == BrokerStatsItem(sum=1, tps=1 / 600, avgpt=1.0)
    assert data.stats_day == NOTHING
    env.stats.tick(NOW_MS + 3_600 * SECOND_MS)
    data = env.stats.view("TOPIC_PUT_NUMS", "orders")
    assert data is not None
    assert data.stats_day == BrokerStatsItem(sum=1, tps=1 / 3_600, avgpt=1.0)


def test_group_counts_pulled_messages(env: AdminFixture) -> None:
    env.stats.got("coupons", "orders", 30, 3_000, 5)
    env.stats.got("coupons", "orders", 10, 1_000, 7)
    pass_seconds(env.stats, NOW_MS, 10)
    assert minute(env.stats, "GROUP_GET_NUMS", "orders@coupons") == BrokerStatsItem(
        sum=40, tps=4.0, avgpt=20.0
    )
    assert minute(env.stats, "GROUP_GET_SIZE", "orders@coupons").sum == 4_000
    assert minute(env.stats, "BROKER_GET_NUMS", "any").sum == 40
    assert env.stats.get_tps("coupons", "orders") == 4.0
    assert env.stats.groups["orders", "coupons"].behind_ms == 7


def test_unknown_counters_do_not_exist(env: AdminFixture) -> None:
    assert env.stats.view("TOPIC_PUT_NUMS", "orders") is None
    assert env.stats.view("GROUP_GET_NUMS", "orders@coupons") is None
    assert env.stats.view("NO_SUCH_COUNTER", "orders") is None
    assert env.stats.put_tps("orders") == env.stats.get_tps("coupons", "orders") == 0.0


def test_new_topic_has_no_samples(env: AdminFixture) -> None:
    env.put("orders")
    assert env.stats.view("TOPIC_PUT_NUMS", "orders") == BrokerStatsData()


def test_deleted_topic_starts_again_at_zero(env: AdminFixture) -> None:
    for _ in range(3):
        env.put("orders")
    env.stats.got("coupons", "orders", 3, 300, 0)
    now_ms = pass_seconds(env.stats, NOW_MS, 10)
    list(env.store.remove_queues(b"orders"))
    env.topics.table.remove("orders", now_ms)
    now_ms = pass_seconds(env.stats, now_ms, 10)
    assert env.stats.view("TOPIC_PUT_NUMS", "orders") is None
    assert env.stats.view("GROUP_GET_NUMS", "orders@coupons") is None
    env.topic("orders")
    env.put("orders")
    pass_seconds(env.stats, now_ms, 10)
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders").sum == 1
    assert minute(env.stats, "BROKER_PUT_NUMS", "any").sum == 4


def test_group_counters_of_missing_topics_are_removed(env: AdminFixture) -> None:
    env.stats.got("coupons", "orders", 1, 100, 0)
    env.stats.got("coupons", "lost", 1, 100, 0)  # by a pull that was in flight
    env.put("lost")
    pass_seconds(env.stats, NOW_MS, 10)
    assert list(env.stats.groups) == [("orders", "coupons")]
    assert env.stats.topics == {}


def test_deleted_group_is_removed(env: AdminFixture) -> None:
    for group in ("coupons", "mail"):
        env.stats.got(group, "orders", 1, 100, 0)
        env.stats.got(group, "sms", 1, 100, 0)
    env.topics.table.remove("sms", NOW_MS)
    pass_seconds(env.stats, NOW_MS, 10)
    list(env.stats.forget_group("coupons"))
    list(env.stats.forget_group("coupons"))
    assert list(env.stats.groups) == [("orders", "mail")]
    env.stats.got("coupons", "orders", 1, 100, 0)
    list(env.stats.forget_group("mail"))
    assert list(env.stats.groups) == [("orders", "coupons")]


def test_many_counters_are_sampled_in_steps(
    env: AdminFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "STEP_COUNTERS", 4)
    stats, topics, groups = env.stats, [f"t{n}" for n in range(9)], [f"g{n}" for n in range(9)]
    for topic in topics:
        env.topic(topic)
        env.put(topic)
    for group in groups:
        stats.got(group, "orders", 5, 500, 0)
    now_ms = pass_seconds(stats, NOW_MS, 9)
    assert stats.due() == now_ms + SECOND_MS
    now_ms += SECOND_MS
    steps = 0
    while stats.due() <= now_ms:
        stats.tick(now_ms)
        steps += 1
        if stats.due() <= now_ms:  # an incomplete period does not count
            assert stats.put_tps("t0") == stats.get_tps("g0", "orders") == 0.0
    assert steps > 5
    assert [stats.put_tps(topic) for topic in topics] == [0.1] * 9
    assert [stats.get_tps(group, "orders") for group in groups] == [0.5] * 9


def test_topics_created_and_deleted_between_steps_do_not_affect_others(
    env: AdminFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "STEP_COUNTERS", 2)
    for topic in (topics := [f"t{n}" for n in range(9)]):
        env.topic(topic)
        env.put(topic)
    env.stats.tick(now_ms := NOW_MS + 10 * SECOND_MS)
    list(env.store.remove_queues(b"t0"))
    list(env.store.remove_queues(b"t5"))
    env.put("orders")
    while env.stats.due() <= now_ms:
        env.stats.tick(now_ms)
    left = [topic for topic in topics if topic not in ("t0", "t5")]
    assert sorted(env.stats.topics) == left
    assert [env.stats.put_tps(topic) for topic in left] == [0.1] * 7


@pytest.mark.parametrize("seed", range(10))
def test_windows_agree_with_a_complete_list_of_samples(env: AdminFixture, seed: int) -> None:
    """Counters record only changes; a plain list of all samples must agree."""
    rng = Random(seed)
    stats, kept, total = env.stats, 7, 0
    samples = [0]
    stats.got("coupons", "orders", 0, 0, 0)
    for number in range(1, 60):
        if rng.random() < 0.4:
            total += (count := rng.randrange(1, 50))
            stats.got("coupons", "orders", count, 0, 0)
        samples.append(total)
        stats.tick(NOW_MS + number * 10 * SECOND_MS)
        first = max(number - kept + 1, 0)
        seen = minute(stats, "GROUP_GET_NUMS", "orders@coupons")
        assert seen.sum == samples[-1] - samples[first]
        assert seen.tps == pytest.approx(seen.sum / (10 * (number - first)))
    assert len(stats.groups["orders", "coupons"].samples[0]) <= 4 * (kept + 1)


def test_idle_counters_take_no_samples(env: AdminFixture) -> None:
    env.put("orders")
    env.stats.got("coupons", "orders", 1, 100, 0)
    flows = [env.stats.groups["orders", "coupons"]]
    now_ms = pass_seconds(env.stats, NOW_MS, 10)
    flows.append(env.stats.topics["orders"])
    before = [[list(row) for row in flow.samples] for flow in flows]
    pass_seconds(env.stats, now_ms, 300)
    assert [[list(row) for row in flow.samples] for flow in flows] == before
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders") == NOTHING


def test_averages_appear_as_time_passes(env: AdminFixture) -> None:
    assert env.stats.runtime()["putTps"] == "  "
    assert env.stats.runtime()["getTotalTps"] == "0.0 0.0 0.0"
    now_ms = pass_seconds(env.stats, NOW_MS, 1)
    for _ in range(5):
        env.put("orders")
    env.stats.got("coupons", "orders", 4, 400, 0)
    env.stats.missed()
    now_ms = pass_seconds(env.stats, now_ms, 10)
    info = env.stats.runtime()
    assert info["putTps"] == "0.5  "
    assert info["getTransferredTps"] == "0.4  "
    assert info["getFoundTps"] == info["getMissTps"] == "0.1  "
    assert info["getTotalTps"] == "0.2 0.0 0.0"
    pass_seconds(env.stats, now_ms, 590)
    assert env.stats.runtime()["putTps"] == f"0.0 0.0 {5 / 600}"


def test_totals_of_the_day_leave_out_system_topics(env: AdminFixture) -> None:
    env.put("orders")
    env.put("rmq_sys_wheel_timer")
    env.stats.got("coupons", "orders", 1, 100, 0)
    env.stats.got("coupons", "RMQ_SYS_TRACE_TOPIC", 7, 100, 0)
    info = env.stats.runtime()
    assert info["msgPutTotalTodayNow"] == info["msgGetTotalTodayNow"] == "1"
    assert info["putMessageTimesTotal"] == "2"
    assert info["putMessageAverageSize"] == str(env.store.writer.put_bytes / 2)
    assert info["msgPutTotalTodayMorning"] == "0"


def test_totals_of_the_morning_are_taken_at_midnight(env: AdminFixture) -> None:
    env.put("orders")
    env.stats.got("coupons", "orders", 1, 100, 0)
    today = datetime.fromtimestamp(NOW_MS // 1000).replace(hour=0, minute=0, second=0)
    midnights = [round(today.replace(day=today.day + days).timestamp()) for days in (1, 2)]
    env.stats.tick(midnights[0] * 1000 - 1)
    assert env.stats.runtime()["msgPutTotalTodayMorning"] == "0"
    env.stats.tick(midnights[0] * 1000)
    info = env.stats.runtime()
    assert info["msgPutTotalTodayMorning"] == info["msgGetTotalTodayMorning"] == "1"
    assert info["msgPutTotalYesterdayMorning"] == "0"
    env.put("orders")
    env.stats.tick(midnights[1] * 1000)
    info = env.stats.runtime()
    assert info["msgPutTotalTodayMorning"] == "2"
    assert info["msgPutTotalYesterdayMorning"] == "1"


def test_clock_set_back_does_not_stop_the_samples(env: AdminFixture) -> None:
    env.put("orders")
    early_ms = NOW_MS - 3_600 * SECOND_MS
    assert env.stats.due() == NOW_MS + SECOND_MS
    env.stats.tick(early_ms)
    assert env.stats.due() == early_ms + SECOND_MS
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders").tps == 0.0
    env.put("orders")
    pass_seconds(env.stats, early_ms, 20)
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders").sum == 2


def test_the_queues_of_one_topic_are_sampled_in_steps(
    env: AdminFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "STEP_COUNTERS", 2)
    for queue_id in range(7):
        env.put("orders", queue_id)
    env.stats.tick(NOW_MS + 10_000)
    steps = 1
    while env.stats.due() == 0:
        env.stats.tick(NOW_MS + 10_000)
        steps += 1
    assert steps >= 4
    assert minute(env.stats, "TOPIC_PUT_NUMS", "orders").sum == 7
