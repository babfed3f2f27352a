"""Run-time information, settings, and cleanup on request."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.broker.admin.cleanup import STEP_TOPICS, CleaningHandlers
from penstock.broker.admin.runtime_info import RuntimeHandlers, human_bytes, human_duration
from penstock.broker.admin.settings_admin import UNSUPPORTED, SettingsHandlers
from penstock.rpc.answers import Reply
from penstock.rpc.command import Command
from penstock.store.put import ILLEGAL
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, KVTable
from penstock.wire.bodies.table_bodies import TimerCheckpoint, TimerMetricsSerializeWrapper
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_properties import parse_properties
from tests.store_kit import SEGMENT_BYTES, Message
from tests.unit.broker.admin.admin_kit import (
    NOW_MS,
    AdminFixture,
    admin_fixture,
    decoded,
    finish,
    reply,
)

APACHE_KEYS = """
EndTransactionQueueSize EndTransactionThreadPoolQueueCapacity ackThreadPoolQueueCapacity
ackThreadPoolQueueHeadWaitTimeMills ackThreadPoolQueueSize bootTimestamp brokerActive
brokerVersionDesc commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset commitLogMinOffset
consumeQueueDiskRatio dispatchBehindBytes dispatchMaxBuffer earliestMessageTimeStamp getFoundTps
getMessageEntireTimeMax getMissTps getTotalTps getTransferredTps litePullThreadPoolQueueCapacity
litePullThreadPoolQueueHeadWaitTimeMills litePullThreadPoolQueueSize msgGetTotalTodayMorning
msgGetTotalTodayNow msgGetTotalYesterdayMorning msgPutTotalTodayMorning msgPutTotalTodayNow
msgPutTotalYesterdayMorning pageCacheLockTimeMills pullThreadPoolQueueCapacity
pullThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize putLatency99 putLatency999
putMessageAverageSize putMessageDistributeTime putMessageEntireTimeMax putMessageFailedTimes
putMessageSizeTotal putMessageTimesTotal putTps queryThreadPoolQueueCapacity
queryThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueSize remainHowManyDataToFlush
remainTransientStoreBufferNumbs runtime sendThreadPoolQueueCapacity
sendThreadPoolQueueHeadWaitTimeMills sendThreadPoolQueueSize startAcceptSendRequestTimeStamp
timerCongestNum timerDequeueTps timerEnqueueTps timerOffsetBehind timerReadBehind
"""
"""The keys in the response of Apache RocketMQ 5.4.0."""


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path / "store") as env:
        yield env


def runtime(env: AdminFixture, now_ms: int = NOW_MS) -> dict[str, str]:
    family = RuntimeHandlers(env.context, env.timers)
    return decoded(family, KVTable, RequestCode.GET_BROKER_RUNTIME_INFO, now_ms=now_ms).table


def test_runtime_info_has_all_keys_of_apache(env: AdminFixture) -> None:
    table = runtime(env)
    root = env.store.paths.root
    assert set(APACHE_KEYS.split()) <= set(table)
    assert table[f"commitLogDiskRatio_{root / 'commitlog'}"] == table["commitLogDiskRatio"]
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1
    assert table["brokerVersionDesc"] == "V5_4_0"
    assert table["earliestMessageTimeStamp"] == "-1"


def test_runtime_info_has_throughput(env: AdminFixture) -> None:
    env.put("orders", ms=NOW_MS + 5)
    env.put("orders", ms=NOW_MS + 6)
    table = runtime(env, NOW_MS + 61_000)
    assert table["bootTimestamp"] == str(NOW_MS)
    assert table["runtime"] == "[ 0 days, 0 hours, 1 minutes, 1 seconds ]"
    assert table["earliestMessageTimeStamp"] == str(NOW_MS + 5)
    assert table["commitLogMaxOffset"] == str(env.store.log.end)
    assert table["msgPutTotalTodayNow"] == table["putMessageTimesTotal"] == "2"


def test_runtime_info_counts_failed_puts(env: AdminFixture) -> None:
    assert runtime(env)["putMessageFailedTimes"] == "0"
    too_long = Message("orders", 0, b"body", tags="x" * 40_000)
    for _ in range(2):
        assert env.store.put(too_long.record(), NOW_MS) == ILLEGAL
    assert runtime(env)["putMessageFailedTimes"] == "2"


def test_sizes_and_durations_are_readable() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, (1 << 20) - 1, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1024.0 KiB",
        "5.0 TiB",
    ]
    assert human_duration(90_061_999) == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"


def test_an_unused_timer_has_no_messages(env: AdminFixture) -> None:
    family = RuntimeHandlers(env.context, env.timers)
    body = reply(family, RequestCode.GET_TIMER_CHECK_POINT).body
    assert TimerCheckpoint.unpack(body) == TimerCheckpoint()
    metrics = decoded(family, TimerMetricsSerializeWrapper, RequestCode.GET_TIMER_METRICS)
    assert metrics.timing_count == {}


# --- settings


def test_settings_are_returned_and_changed(env: AdminFixture) -> None:
    family = SettingsHandlers(env.context)
    shown = reply(family, RequestCode.GET_BROKER_CONFIG)
    values = parse_properties(shown.body)
    assert (values["brokerName"], values["brokerPermission"]) == ("broker-a", "6")
    body = b"brokerPermission=4\nnoSuchSetting=1\n"
    assert reply(family, RequestCode.UPDATE_BROKER_CONFIG, body, now_ms=NOW_MS + 5).code == 0
    assert env.live.current.broker.permission == 4
    shown = reply(family, RequestCode.GET_BROKER_CONFIG)
    assert parse_properties(shown.body)["brokerPermission"] == "4"
    assert shown.ext is not None
    version = fastjson.decode(shown.ext["version"].encode(), DataVersion)
    assert version == DataVersion(counter=1, timestamp=NOW_MS + 5)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"storePathRootDir=/elsewhere", ResponseCode.NO_PERMISSION),
        (b"brokerPermission=4\nlistenPort=1", ResponseCode.NO_PERMISSION),
        (b"brokerPermission=lots", ResponseCode.INVALID_PARAMETER),
    ],
)
def test_a_refused_change_changes_nothing(env: AdminFixture, body: bytes, code: int) -> None:
    before = env.live.current
    answer = reply(SettingsHandlers(env.context), RequestCode.UPDATE_BROKER_CONFIG, body)
    assert answer.code == code
    assert env.live.current == before


def test_unsupported_requests_are_refused_with_a_reason(env: AdminFixture) -> None:
    family = SettingsHandlers(env.context)
    for code, why in UNSUPPORTED.items():
        answer = reply(family, code)
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, why)
    body = reply(family, RequestCode.GET_COLD_DATA_FLOW_CTR_INFO).body
    assert msgspec.json.decode(body) == {"runtimeTable": {}, "configTable": {}}


# --- cleaning


def test_expired_segments_are_deleted_at_any_hour(env: AdminFixture) -> None:
    for _ in range(3):
        env.put("orders", body=b"x" * (SEGMENT_BYTES // 2))
    segments = [segment.path for segment in env.store.log.segments.items]
    assert len(segments) == 3
    family, code = CleaningHandlers(env.context), RequestCode.DELETE_EXPIRED_COMMITLOG
    old_s = NOW_MS // 1000 - 73 * 3_600
    for path in segments:
        os.utime(path, (NOW_MS // 1000, NOW_MS // 1000))
    os.utime(segments[0], (old_s, old_s))
    assert reply(family, code).code == 0
    assert [path.exists() for path in segments] == [False, True, True]
    assert env.store.min_offset("orders", 0) == 1
    assert reply(family, code).code == 0
    assert env.store.log.begin() == SEGMENT_BYTES


def test_queue_files_of_deleted_messages_are_deleted(env: AdminFixture) -> None:
    for _ in range(60):  # an own file for every 50 entries
        env.put("orders", body=b"x" * 1000)
    queue = env.store.queue("orders", 0)
    assert queue is not None
    assert queue.file_starts == [0, 50]
    answer = reply(CleaningHandlers(env.context), RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)
    assert answer.code == 0
    assert queue.file_starts == [0, 50]
    row = env.store.log.segments
    while row.first <= env.store.log.end - 2 * SEGMENT_BYTES:
        row.drop_first()  # the log without its queues
    reply(CleaningHandlers(env.context), RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)
    assert queue.min_offset > 0


def test_queues_without_a_topic_are_deleted(env: AdminFixture) -> None:
    env.topic("orders")
    for topic in ("orders", "lost", "rmq_sys_wheel_timer"):
        env.put(topic)
    lost = env.store.paths.queues / "lost"
    assert lost.exists()
    answer = reply(CleaningHandlers(env.context), RequestCode.CLEAN_UNUSED_TOPIC)
    assert answer.code == 0
    left = {queue.topic for queue in env.store.queues.rows}
    assert left == {b"orders", b"rmq_sys_wheel_timer"}
    assert not lost.exists()


def test_many_topics_are_cleaned_in_steps(env: AdminFixture) -> None:
    names = [f"lost{n}" for n in range(2 * STEP_TOPICS + 1)]
    for name in names:
        env.put(name)
    stored, own = (
        env.store.queues.topics,
        set(env.store.queues.topics) - {name.encode() for name in names},
    )
    answer = CleaningHandlers(env.context).clean_topics(Command(0, {}, b"", now_ms=NOW_MS))
    assert len(stored) == STEP_TOPICS + 1 + len(own)
    env.topic(names[-1])  # created again meanwhile
    assert finish(answer) == Reply()
    assert set(stored) == {names[-1].encode(), *own}
    assert [path.name for path in env.store.paths.queues.iterdir()] == [names[-1]]


def test_runtime_info_has_the_limits_of_the_process(env: AdminFixture) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limits = {"penstockOpenFilesMax": str(soft)} if soft != resource.RLIM_INFINITY else {}
    maps = Path("/proc/sys/vm/max_map_count").read_text().strip()
    table = runtime(env)
    assert {name: text for name, text in table.items() if name.endswith("FilesMax")} == {
        **limits,
        "penstockMappedFilesMax": maps,
    }
