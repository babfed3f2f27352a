"""Pipeline `insight`: each analysis on DataFrames, and the pipeline on all sources."""

from __future__ import annotations

import os
import signal
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Admin, Consumer, Message, Producer, ReceivedMessage
from penstock.client.trace.trace_records import ConsumeCode, encode_record
from penstock.errors import BadSetting, GroupNotExist, NoRoute, PipelineFailed
from penstock.spark.pipelines.insight import dead_letters, profiles, report_data
from penstock.spark.pipelines.insight import trace_latency as traces
from penstock.spark.pipelines.insight.group_lag import LAG_COLUMNS, group_lag
from penstock.spark.pipelines.insight.insight_pipeline import PIPELINE, TABLES
from penstock.spark.pipelines.insight.report_data import ROWS_MAX
from penstock.spark.pipelines.running import run_pipeline
from penstock.wire.bodies.client_bodies import MessageQueue
from tests.spark.kit import create_topic, reader, send_numbers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NOON = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
NOON_MS = round(NOON.timestamp() * 1000)
WAIT_SECONDS = 30


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def messages(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    """From (topic, queue, keys, bytes, born, stored)."""
    given = [
        (topic, "b", queue, f"id{n}", keys, bytes(size), at(born), at(stored))
        for n, (topic, queue, keys, size, born, stored) in enumerate(rows)
    ]
    ddl = (
        "topic string, broker string, queue_id int, message_id string, keys string, body binary, "
        "born_timestamp timestamp, store_timestamp timestamp"
    )
    return spark.createDataFrame(given, ddl)


def rows_of(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """The rows in order; times are seconds after noon."""
    return [
        tuple(
            (value.astimezone(UTC) - NOON).total_seconds() if isinstance(value, datetime) else value
            for value in row
        )
        for row in frame.select(*columns).collect()
    ]


def test_profiles_have_rates_sizes_queues_and_keys(spark: SparkSession) -> None:
    frame = messages(
        spark,
        ("a", 0, "hot x", 10, 0, 0.5), ("a", 0, "hot", 20, 0, 1), ("a", 1, "hot  hot", 30, 0, 61),
        ("a", 0, None, 40, 0, 62), ("b", 0, "", 0, 5, 3),
    )  # fmt: skip
    even = messages(spark, ("e", 0, "z k a b", 1, 0, 0))
    assert rows_of(profiles.key_skew(even), "hottest") == rows_of(
        profiles.hot_keys(even, top=1), "key"
    )
    assert rows_of(profiles.rates(frame), "topic", "time", "messages", "bytes", "per_minute") == [
        ("a", 0.0, 2, 30, 2.0), ("a", 60.0, 2, 70, 2.0), ("b", 0.0, 1, 0, 1.0),
    ]  # fmt: skip
    wide = profiles.rates(frame, bucket_ms=120_000)
    assert rows_of(wide, "topic", "per_minute") == [("a", 2.0), ("b", 0.5)]
    size_columns = ("topic", "messages", "bytes", "mean_bytes", "p50_bytes", "max_bytes", "last")
    assert rows_of(profiles.sizes(frame), *size_columns) == [
        ("a", 4, 100, 25.0, 20, 40, 62.0), ("b", 1, 0, 0.0, 0, 0, 3.0),
    ]  # fmt: skip
    known = [MessageQueue("a", "b", queue) for queue in range(4)]
    balance = profiles.queue_balance(profiles.without_bodies(frame), known)
    assert rows_of(balance, "topic", "queue_id", "messages", "share", "load") == [
        ("a", 0, 3, 0.75, 3.0), ("a", 1, 1, 0.25, 1.0), ("a", 2, 0, 0.0, 0.0),
        ("a", 3, 0, 0.0, 0.0), ("b", 0, 1, 1.0, 1.0),
    ]  # fmt: skip
    hot = profiles.hot_keys(frame, top=1)
    assert rows_of(hot, "topic", "rank", "key", "messages", "share") == [("a", 1, "hot", 3, 0.75)]
    skew = profiles.key_skew(frame)
    assert rows_of(skew, "topic", "messages", "with_key", "keys", "hottest", "skew") == [
        ("a", 4, 3, 2, "hot", 1.5), ("b", 1, 0, 0, None, None),
    ]  # fmt: skip
    stored = profiles.latencies(profiles.store_latencies(frame))
    assert rows_of(stored, "stage", "topic", "count", "max_ms", "negative") == [
        (profiles.BORN_TO_STORE, "a", 4, 62_000, 0), (profiles.BORN_TO_STORE, "b", 1, 0, 1),
    ]  # fmt: skip


def trace(*records: tuple[Any, ...]) -> bytes:
    return "".join(encode_record(*record) for record in records).encode()


def pub(name: str, time: int, cost: int = 3, ok: bool = True) -> tuple[Any, ...]:
    return ("Pub", NOON_MS + time, "r", "senders", "a", name, None, None, "h", 5, cost, 0, "o", ok)


def before(name: str, time: int, request: str = "r1", tries: int = 0) -> tuple[Any, ...]:
    return ("SubBefore", NOON_MS + time, "r", "g", request, name, tries, None)


def after(
    name: str, time: int, cost: int, request: str = "r1", code: ConsumeCode = ConsumeCode.SUCCESS
) -> tuple[Any, ...]:
    ok = code is ConsumeCode.SUCCESS
    return ("SubAfter", request, name, cost, ok, None, code, NOON_MS + time, "g")


def test_traces_give_the_latency_of_each_stage(spark: SparkSession) -> None:
    bodies = [
        trace(pub("id0", 0), before("id0", 100), after("id0", 140, 40)),
        trace(pub("id1", 0), before("id1", 200), before("id1", 900, "r2", 1)),
        trace(after("id1", 250, 50, code=ConsumeCode.TIMEOUT), after("id1", 910, 10, "r2")),
        trace(pub("failed", 0, ok=False), before("unknown", 5)) + b"Pub\x01nonsense\x02\xff",
        trace(before("id2", 300), after("id2", 310, 10, code=ConsumeCode.EXCEPTION)),
    ]
    records = traces.trace_records(spark.createDataFrame([(b,) for b in bodies], "body binary"))
    stored = messages(spark, ("a", 0, None, 1, 0, 0.01), ("a", 0, None, 1, 0, 0.02))
    took = traces.trace_latencies(records, stored).orderBy("stage", "took_ms", "topic")
    assert rows_of(took, "stage", "topic", "group", "took_ms") == [
        (traces.HANDLE, None, "g", 10), (traces.HANDLE, "a", "g", 10),
        (traces.HANDLE, "a", "g", 40), (traces.HANDLE, "a", "g", 50),
        (traces.SEND, "a", None, 3), (traces.SEND, "a", None, 3),
        (traces.SEND_TO_CONSUME, "a", "g", 100), (traces.SEND_TO_CONSUME, "a", "g", 200),
        (traces.SEND_TO_DONE, "a", "g", 140), (traces.SEND_TO_DONE, "a", "g", 910),
        (traces.STORE_TO_CONSUME, "a", "g", 90), (traces.STORE_TO_CONSUME, "a", "g", 180),
    ]  # fmt: skip
    last = traces.last_outcomes(records).orderBy("message_id")
    assert rows_of(last, "message_id", "group", "outcome") == [
        ("id0", "g", "success"), ("id1", "g", "success"), ("id2", "g", "exception"),
    ]  # fmt: skip
    assert traces.trace_latencies(records).where("stage = 'store to consume'").count() == 0
    others = spark.createDataFrame([(bodies[0],)], "body binary")
    kept = traces.trace_records(others, lambda topic: topic != "a")
    assert [row.type for row in kept.collect()] == ["SubBefore", "SubAfter"]


def test_dead_letters_have_an_origin_and_a_cause(spark: SparkSession) -> None:
    ddl = (
        "topic string, broker string, queue_id int, queue_offset long, message_id string, "
        "tags string, keys string, body binary, properties map<string,string>, "
        "born_timestamp timestamp, store_timestamp timestamp, reconsume_times int"
    )

    def letter(name: str, seconds: float, topic: str = "%DLQ%g", **properties: str) -> Any:
        all_properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": f"o-{name}", **properties}
        return (
            topic, "b", 0, 0, name, "t", None, b"\xffbody", all_properties, at(0), at(seconds), 3
        )  # fmt: skip

    given = [
        letter("one", 1, EXCEPTION="\n ValueError: x\n  at line 3"),
        letter("two", 3601, DLQ_ORIGIN_TOPIC="first"), letter("three", 3602), letter("four", 3603),
        letter("other", 1, topic="orders"),
    ]  # fmt: skip
    outcomes = spark.createDataFrame(
        [("two", "g", "timeout"), ("three", "h", "exception"), ("four", "g", "success")],
        "message_id string, group string, outcome string",
    )
    dead = dead_letters.dead_letters(spark.createDataFrame(given, ddl), outcomes)
    columns = ("message_id", "group", "origin_topic", "origin_id", "cause", "cause_from")
    assert rows_of(dead.orderBy("store_timestamp"), *columns) == [
        ("one", "g", "orders", "o-one", "ValueError: x", "property"),
        ("two", "g", "first", "o-two", "timeout", "trace"),
        ("three", "g", "orders", "o-three", dead_letters.UNKNOWN_CAUSE, None),
        ("four", "g", "orders", "o-four", dead_letters.UNKNOWN_CAUSE, None),
    ]
    counts = dead_letters.dead_letter_counts(dead)
    assert rows_of(counts, "time", "origin_topic", "tags", "cause", "messages", "tries_max") == [
        (0.0, "orders", "t", "ValueError: x", 1, 3), (3600.0, "first", "t", "timeout", 1, 3),
        (3600.0, "orders", "t", dead_letters.UNKNOWN_CAUSE, 2, 3),
    ]  # fmt: skip
    samples = dead_letters.dead_letter_samples(dead, each=1)
    assert sorted(rows_of(samples, "message_id", "body_start")) == [
        (name, "\N{REPLACEMENT CHARACTER}body") for name in ("four", "one", "two")
    ]


def test_lag_is_grouped_by_time_group_and_topic(spark: SparkSession) -> None:
    rows = [
        (at(0), "g", "a", "b", 0, 10, 4, 6, 100, None),
        (at(0), "g", "a", "b", 1, 10, 9, 1, 900, None),
        (at(0), "g", "a", "b", 2, 10, None, None, None, None),
        (at(60), "g", "a", "b", 0, 10, 10, 0, 0, None),
    ]
    found = group_lag(spark.createDataFrame(rows, LAG_COLUMNS))
    assert rows_of(found, "sampled", "group", "topic", "queues", "lag", "lag_ms", "unknown") == [
        (0.0, "g", "a", 3, 7, 900, 1), (60.0, "g", "a", 1, 0, 0, 0),
    ]  # fmt: skip


def test_report_data_has_rows_of_each_stage_and_topic(spark: SparkSession) -> None:
    many = [("born to store", f"t{n}", None, at(0), 5) for n in range(ROWS_MAX + 5)]
    took = spark.createDataFrame(
        [*many, (traces.SEND, "a", None, at(0), 1)],
        "stage string, topic string, group string, time timestamp, took_ms long",
    )
    slowest = report_data._latencies(profiles.latencies(took))
    stages = [row["stage"] for row in slowest.rows]
    assert set(stages) == {profiles.BORN_TO_STORE, traces.SEND}, "each stage is included"
    assert stages == sorted(stages, key=report_data.STAGES.index)
    assert slowest.total == ROWS_MAX + 6

    hot = spark.createDataFrame(
        [("few", 1, "only", 1, 1.0), ("busy", 1, "k", 900, 0.9), ("busy", 6, "cold", 5, 0.01)],
        "topic string, rank int, key string, messages long, share double",
    )
    assert [row["key"] for row in report_data._keys(hot).rows] == ["k", "only"]

    year = [("g", "timeout", at(3600 * hour), 1) for hour in range(0, 24 * 365, 12)]
    dead = spark.createDataFrame(year, "group string, cause string, time timestamp, messages long")
    step = report_data._dead_bucket_ms(dead)
    bars = report_data._dead_times(dead, step).rows
    assert sum(row["messages"] for row in bars) == len(year)
    assert 60 <= len(bars) <= 121, "bars are wide enough to be visible"
    assert step % (24 * 3_600_000) == 0


def run(
    spark: SparkSession, cluster: Up, output: Path, *, signal_at: str = "never", **options: Any
) -> list[str]:
    """Run the pipeline, with SIGTERM at a given line if there is one; returns its lines."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if signal_at in line:
            os.kill(os.getpid(), signal.SIGTERM)

    run_pipeline(
        PIPELINE, {"output": str(output), **options}, spark=spark,
        connection={"nameserver": cluster.address}, say=say,
    )  # fmt: skip
    return lines


def consume_and_fail(cluster: Up, topic: str, count: int) -> None:
    """Consume all messages of a topic with traces; every second one becomes a dead letter."""
    seen: set[str] = set()
    done = threading.Event()
    with Consumer(
        cluster.address, group=topic, start_at="first", retries_max=0, trace=True
    ) as consumer:

        @consumer.on(topic)
        def handle(message: ReceivedMessage) -> None:
            seen.add(message.message_id)
            if len(seen) == count:
                done.set()
            if message.tags == "odd":
                raise ValueError("odd")

        consumer.start()
        assert done.wait(WAIT_SECONDS)


def test_a_run_reads_brokers_logs_and_a_lake(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, queues=2)
    with Producer(cluster.address, group="traced", trace=True) as producer:
        for n in range(20):
            tag = "odd" if n % 2 else "even"
            producer.send(Message(fresh, "x" * (n + 1), tag, [f"<b>{n % 3}</b>"]))
        producer.send(Message(create_topic(cluster, f"{fresh}-other"), "not analysed"))
    consume_and_fail(cluster, fresh, 20)

    output = tmp_path / "out"
    lines = run(spark, cluster, output, topics=fresh, groups=fresh)
    assert any("report.html" in line for line in lines)

    def table(name: str, where: str = "true") -> DataFrame:
        return spark.read.parquet(str(output / name)).where(where)

    assert rows_of(table("sizes"), "topic", "messages", "bytes") == [(fresh, 20, 210)]
    assert {row.messages for row in table("queues").collect()} == {10}
    assert rows_of(table("hot_keys"), "key", "messages")[0] == ("<b>0</b>", 7)
    dead = table("dead_letter_counts")
    assert rows_of(dead, "group", "origin_topic", "tags", "cause", "messages") == [
        (fresh, fresh, "odd", "exception", 10)
    ]
    stages = {(row.topic, row.stage): row["count"] for row in table("latencies").collect()}
    assert stages == {
        (fresh, profiles.BORN_TO_STORE): 20, (fresh, traces.SEND): 20, (fresh, traces.HANDLE): 20,
        (fresh, traces.SEND_TO_CONSUME): 20, (fresh, traces.SEND_TO_DONE): 10,
        (fresh, traces.STORE_TO_CONSUME): 20,
    }  # fmt: skip
    page = (output / "report.html").read_text()
    assert page.count("<svg") == 7
    assert "<b>" not in page
    assert "&lt;b&gt;0&lt;/b&gt;" in page

    run(spark, cluster, output, pattern=fresh, groups=fresh, skip_traces=True)
    times = {row.sampled for row in table("lag").collect()}
    assert len(times) == 2

    (commit_log,) = cluster.log.parent.glob("data/**/commitlog")
    copy = tmp_path / "backup"  # the log without the other files of the store
    copy.symlink_to(commit_log)
    log = tmp_path / "of_log"
    run(spark, cluster, log, topics=fresh, log=str(copy))
    copied = spark.read.parquet(str(log / "dead_letters")).where(f"group = '{fresh}'")
    assert sorted(rows_of(copied, "message_id")) == sorted(
        rows_of(table("dead_letters"), "message_id")
    )
    assert "The lag has not been measured yet." in (log / "report.html").read_text()

    lake = tmp_path / "lake"
    reader(spark, cluster, fresh).load().withColumnRenamed("topic", "t").selectExpr(
        "*", "'007' as topic", "cast(store_timestamp as date) as date"
    ).drop("t").write.partitionBy("date", "topic").parquet(str(lake / "data"))
    run(spark, cluster, tmp_path / "of_lake", lake=str(lake))
    found = spark.read.parquet(str(tmp_path / "of_lake" / "sizes"))
    assert rows_of(found, "topic", "messages", "bytes") == [("007", 20, 210)]


def test_a_signal_stops_a_run(spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path) -> None:
    create_topic(cluster, fresh, queues=1)
    send_numbers(cluster, fresh, 5)
    said = run(spark, cluster, tmp_path / "out", topics=fresh, signal_at="reading ")
    assert said[-1].startswith("stopped; some tables may be from the previous run")
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.proof
def test_a_custom_trace_topic_is_not_among_the_messages(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topics = [create_topic(cluster, f"{fresh}-{n}", queues=1) for n in range(2)]
    for topic in topics:
        send_numbers(cluster, topic, 3)
    (commit_log,) = cluster.log.parent.glob("data/**/commitlog")
    run(
        spark, cluster, tmp_path / "out", pattern=f"{fresh}.*", log=str(commit_log),
        trace_topic=topics[0],
    )  # fmt: skip
    found = spark.read.parquet(str(tmp_path / "out" / "sizes"))
    assert rows_of(found, "topic", "messages") == [(topics[1], 3)]


@pytest.mark.proof
def test_a_run_without_messages_writes_a_report(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, queues=1)
    output = tmp_path / "out"
    with Admin(cluster.address) as admin:
        admin.create_group(fresh)
    zone = spark.conf.get("spark.sql.parquet.outputTimestampType")
    run(spark, cluster, output, topics=fresh, groups=fresh, skip_traces=True)
    assert spark.conf.get("spark.sql.parquet.outputTimestampType") == zone
    page = (output / "report.html").read_text()
    assert page.count('class="none"') == 7
    for name in TABLES:
        rows = spark.read.parquet(str(output / name)).count()
        assert rows == (1 if name == "queues" else 0)


@pytest.mark.proof
def test_only_messages_of_the_time_range_are_read(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, queues=1)
    send_numbers(cluster, fresh, 10)
    stored = reader(spark, cluster, fresh, columns="store_timestamp").load().collect()
    last = max(row.store_timestamp.timestamp() for row in stored)
    until = round(last * 1000)
    run(spark, cluster, tmp_path / "out", topics=fresh, until=str(until), skip_traces=True)
    found = spark.read.parquet(str(tmp_path / "out" / "sizes")).collect()
    early = sum(round(row.store_timestamp.timestamp() * 1000) < until for row in stored)
    assert sum(row.messages for row in found) == early


def test_invalid_options_are_refused(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.raises(NoRoute, match=fresh):
        run(spark, cluster, output, topics=fresh)
    with pytest.raises(NoRoute, match="no topic matches"):
        run(spark, cluster, output, pattern=fresh)
    with pytest.raises(BadSetting, match="is not a lake"):
        run(spark, cluster, output, lake=str(tmp_path / "nowhere"))
    (tmp_path / "lake" / "data").mkdir(parents=True)
    with pytest.raises(PipelineFailed, match="has no messages yet"):
        run(spark, cluster, output, lake=str(tmp_path / "lake"))
    create_topic(cluster, fresh, queues=1)
    with pytest.raises(GroupNotExist, match="no-such-group"):
        run(spark, cluster, output, topics=fresh, groups="no-such-group")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("text")
    with pytest.raises(BadSetting, match="contains files of other programs"):
        run(spark, cluster, other, topics=fresh)
