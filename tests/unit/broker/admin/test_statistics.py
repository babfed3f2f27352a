"""Statistics of topics and groups."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.admin import large_requests, statistics
from penstock.broker.admin.statistics import StatisticsHandlers
from penstock.rpc.answers import InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Router
from penstock.wire.bodies.admin_bodies import (
    BrokerStatsData,
    ConsumeStats,
    ConsumeStatsList,
    OffsetWrapper,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
    TopicOffset,
    TopicStatsTable,
)
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import RequestCode, ResponseCode
from tests.unit.broker.admin.admin_kit import (
    ADDRESS,
    BROKER,
    NOW_MS,
    AdminFixture,
    admin_fixture,
    decoded,
    reply,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path) as env:
        yield env


def queue(topic: str, queue_id: int) -> MessageQueue:
    return MessageQueue(topic, BROKER, queue_id)


def consume_stats(env: AdminFixture, **ext: object) -> ConsumeStats:
    return decoded(
        StatisticsHandlers(env.context), ConsumeStats, RequestCode.GET_CONSUME_STATS, **ext
    )


def test_a_counter_has_several_windows(env: AdminFixture) -> None:
    family = StatisticsHandlers(env.context)
    code = RequestCode.VIEW_BROKER_STATS_DATA
    env.topic("orders")
    env.put("orders")
    env.stats.tick(NOW_MS + 10_000)
    data = decoded(family, BrokerStatsData, code, statsName="TOPIC_PUT_NUMS", statsKey="orders")
    assert data.stats_minute is not None
    assert data.stats_minute.sum == 1
    assert data.stats_day is not None
    assert data.stats_day.sum == 0
    key = "DefaultCluster"
    assert decoded(family, BrokerStatsData, code, statsName="BROKER_PUT_NUMS", statsKey=key)
    for name, other in (("BROKER_PUT_NUMS", "OtherCluster"), ("TOPIC_PUT_NUMS", "none")):
        answer = reply(family, code, statsName=name, statsKey=other)
        assert answer.code == ResponseCode.SYSTEM_ERROR


def test_topic_stats_have_the_offsets_of_queues(env: AdminFixture) -> None:
    env.topic("orders", 2)
    env.put("orders", 1, ms=NOW_MS)
    env.put("orders", 1, ms=NOW_MS + 5)
    env.stats.tick(NOW_MS + 10_000)
    family, code = StatisticsHandlers(env.context), RequestCode.GET_TOPIC_STATS_INFO
    table = decoded(family, TopicStatsTable, code, topic="orders")
    assert table.topic_put_tps == 0.2
    assert table.offset_table == {
        queue("orders", 0): TopicOffset(),
        queue("orders", 1): TopicOffset(max_offset=2, last_update_timestamp=NOW_MS + 5),
    }
    assert reply(family, code, topic="none").code == ResponseCode.TOPIC_NOT_EXIST


def test_consume_stats_have_the_offsets_of_a_group(env: AdminFixture) -> None:
    env.topic("orders", 1)
    env.topic("sms", 1)
    for ms in (NOW_MS, NOW_MS + 1, NOW_MS + 2):
        env.put("orders", ms=ms)
    env.offsets.commit("coupons", "orders", 0, 2, NOW_MS)
    env.offsets.record_pull("coupons", "orders", 0, 3)
    env.stats.got("coupons", "orders", 2, 200, 0)
    env.stats.tick(NOW_MS + 10_000)
    stats = consume_stats(env, consumerGroup="coupons")
    assert stats.consume_tps == 0.2
    assert stats.offset_table == {
        queue("orders", 0): OffsetWrapper(
            broker_offset=3, consumer_offset=2, pull_offset=3, last_timestamp=NOW_MS + 1
        )
    }


def test_topics_requested_by_name_need_no_offsets(env: AdminFixture) -> None:
    env.topic("orders", 1)
    env.topic("sms", 1)
    env.put("sms")
    stats = consume_stats(env, consumerGroup="new", topicList="sms;orders;none;")
    assert stats.offset_table == {
        queue("sms", 0): OffsetWrapper(broker_offset=1),
        queue("orders", 0): OffsetWrapper(),
    }
    assert consume_stats(env, consumerGroup="new").offset_table == {}
    assert list(consume_stats(env, consumerGroup="new", topic="sms").offset_table) == [
        queue("sms", 0)
    ]


def test_topics_that_a_connected_group_left_are_skipped(env: AdminFixture) -> None:
    for topic in ("orders", "sms"):
        env.topic(topic, 1)
        env.offsets.commit("coupons", topic, 0, 0, NOW_MS)
    env.consumer("coupons", "sms")
    assert list(consume_stats(env, consumerGroup="coupons").offset_table) == [queue("sms", 0)]


@pytest.mark.parametrize("step_queues", [1, statistics.STEP_QUEUES])
def test_consume_stats_of_all_groups(
    env: AdminFixture, monkeypatch: pytest.MonkeyPatch, step_queues: int
) -> None:
    monkeypatch.setattr(statistics, "STEP_QUEUES", step_queues)
    env.topic("orders", 1, order=True)
    env.topic("sms", 1)
    for name in ("idle", "coupons", "mail"):
        env.group(name)
    for topic in ("orders", "orders", "sms"):
        env.put(topic)
    env.offsets.commit("coupons", "orders", 0, 1, NOW_MS)
    env.offsets.commit("mail", "sms", 0, 0, NOW_MS)
    env.offsets.commit("mail", "gone", 0, 9, NOW_MS)
    env.offsets.record_pull("mail", "sms", 0, 1)
    family, code = StatisticsHandlers(env.context), RequestCode.GET_BROKER_CONSUME_STATS
    body = decoded(family, ConsumeStatsList, code, isOrder="false")
    assert body.broker_addr == ADDRESS
    assert (body.total_diff, body.total_inflight_diff) == (2, 1)
    by_group = {group: stats for one in body.consume_stats_list for group, stats in one.items()}
    assert list(by_group) == ["idle", "coupons", "mail"]
    assert by_group["idle"] == []
    assert [list(stats.offset_table) for stats in by_group["mail"]] == [[queue("sms", 0)]]
    ordered = decoded(family, ConsumeStatsList, code, isOrder="true")
    assert ordered.total_diff == 1


def test_time_spans_of_a_group(env: AdminFixture) -> None:
    env.topic("orders", 2)
    for ms in (10, 20, 30):
        env.put("orders", 0, ms=NOW_MS + ms)
    env.offsets.commit("coupons", "orders", 0, 2, NOW_MS)
    family, code = StatisticsHandlers(env.context), RequestCode.QUERY_CONSUME_TIME_SPAN

    def spans(group: str) -> list[QueueTimeSpan]:
        body = decoded(
            family, QueryConsumeTimeSpanBody, code, topic="orders", group=group, now_ms=NOW_MS + 99
        )
        return body.consume_time_span_set

    first, second = spans("coupons")
    assert first == QueueTimeSpan(
        message_queue=queue("orders", 0),
        min_time_stamp=NOW_MS + 10,
        max_time_stamp=NOW_MS + 30,
        consume_time_stamp=NOW_MS + 20,
        delay_time=69,
    )
    assert (second.min_time_stamp, second.max_time_stamp, second.delay_time) == (-1, -1, 0)
    new = spans("new")[0]
    assert (new.consume_time_stamp, new.delay_time) == (NOW_MS + 10, 89)
    env.offsets.commit("coupons", "orders", 0, 3, NOW_MS)
    assert spans("coupons")[0].delay_time == 0


REQUESTS_BY_QUEUE = {
    RequestCode.GET_TOPIC_STATS_INFO: {"topic": "wide"},
    RequestCode.GET_CONSUME_STATS: {"consumerGroup": "g", "topic": "wide"},
    RequestCode.GET_BROKER_CONSUME_STATS: {"isOrder": "false"},
    RequestCode.QUERY_CONSUME_TIME_SPAN: {"topic": "wide", "group": "g"},
}


def wide_topic(env: AdminFixture, queues: int) -> None:
    env.topic("wide", queues)
    env.group("g")
    env.put("wide", queues - 1)
    env.offsets.commit("g", "wide", queues - 1, 1, NOW_MS)


@pytest.mark.parametrize("code", REQUESTS_BY_QUEUE)
def test_the_queues_of_a_topic_are_collected_in_steps(env: AdminFixture, code: int) -> None:
    queues = 2 * statistics.STEP_QUEUES + 1
    wide_topic(env, queues)
    command = Command(code, REQUESTS_BY_QUEUE[code], b"", peer="10.0.0.9:99", now_ms=NOW_MS)
    answer = Router([StatisticsHandlers(env.context).rows()]).handle(command)
    steps = 0
    while isinstance(answer, InThread):
        assert answer.work is not None
        answer = answer.then(answer.work())
        steps += 1
    assert steps == 4, "three parts, and the body"
    assert isinstance(answer, Reply)
    assert answer.body.count(b'"queueId"') == queues


@pytest.mark.parametrize("code", REQUESTS_BY_QUEUE)
def test_statistics_of_more_queues_than_a_frame_holds_are_refused(
    env: AdminFixture, code: int
) -> None:
    wide_topic(env, large_requests.QUEUES_MAX + 1)
    answer = reply(StatisticsHandlers(env.context), code, **REQUESTS_BY_QUEUE[code])
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "100001 queues, the limit is 100000" in (answer.remark or "")
