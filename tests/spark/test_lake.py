"""The pipeline `lake` with real servers, files and processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest

from penstock import Admin, Message, Producer
from penstock.errors import BadSetting, DataLost, LakeRefused, NoRoute, PipelineFailed
from penstock.spark.pipelines.batch_progress import BatchProgress
from penstock.spark.pipelines.lake.lake_compaction import compact_lake
from penstock.spark.pipelines.lake.lake_files import HadoopFiles
from penstock.spark.pipelines.lake.lake_writer import LakeSettings, LakeWriter, write_lake
from penstock.spark.pipelines.query_errors import translate_errors
from penstock.spark.pipelines.running import Trigger, find_pipeline, run_pipeline
from tests.compat.penstock import Up
from tests.depth import rounds
from tests.spark.kit import create_topic, send, send_numbers, stream_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def fill(
    spark: SparkSession, cluster: Up, lake: Path, topics: str, *, checkpoint: Path | None = None,
    **options: Any,
) -> list[BatchProgress]:  # fmt: skip
    """Run the pipeline on all existing messages; returns the reported batches."""
    batches: list[BatchProgress] = []
    run_pipeline(
        find_pipeline("lake"),
        {"lake": str(lake), "topics": topics, **options},
        spark=spark,
        connection={"nameserver": cluster.address},
        checkpoint=checkpoint and str(checkpoint),
        trigger="available-now",
        on_batch=batches.append,
    )
    return batches


def rows_in(lake: Path, table: str = "data") -> list[dict[str, Any]]:
    """All rows of a table, read by PyArrow."""
    found: list[dict[str, Any]] = (
        ds.dataset(lake / table, format="parquet", partitioning="hive").to_table().to_pylist()
    )
    return found


def bodies_in(lake: Path) -> Counter[bytes]:
    return Counter(row["body"] for row in rows_in(lake))


def files_in(lake: Path, table: str = "data") -> list[Path]:
    return sorted((lake / table).rglob("*.parquet"))


def test_each_message_is_written_once_by_date_and_topic(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    first, second = create_topic(cluster, f"{fresh}-1", 2), create_topic(cluster, f"{fresh}%2", 1)
    sent = send_numbers(cluster, first, 300)
    send(cluster, [Message(second, "other", "t", ["k"], {"p": "v"})])
    lake = tmp_path / "lake"
    batches = fill(spark, cluster, lake, f"{first},{second}", max_rows=200)
    assert sum(batch.rows for batch in batches) == 301
    assert len(batches) > 1
    assert batches[-1].lag == 0
    rows = rows_in(lake)
    assert Counter(row["topic"] for row in rows) == {first: 300, second: 1}
    assert sorted(row["body"] for row in rows if row["topic"] == first) == sorted(sent)
    [other] = [row for row in rows if row["topic"] == second]
    assert other["tags"] == "t"
    assert other["keys"] == "k"
    assert dict(other["properties"])["p"] == "v"
    assert str(other["date"]) == other["store_timestamp"].astimezone(UTC).date().isoformat()
    assert [p for p in (lake / "data").rglob("*") if p.is_file() and p.suffix != ".parquet"] == []

    before = files_in(lake)
    assert fill(spark, cluster, lake, f"{first},{second}") == []
    assert files_in(lake) == before
    more = send_numbers(cluster, first, range(300, 340))
    fill(spark, cluster, lake, f"{first},{second}")
    assert bodies_in(lake) == Counter([*sent, *more, b"other"])


def test_json_bodies_become_columns_and_bad_rows_are_written_separately(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 1)
    good = [{"id": "a", "amount": 1.5, "extra": 1}, {"id": "b", "lines": [{"n": 1}, {"n": 2}]}]
    bad = {
        b"nonsense": "the body is not JSON",
        b'{"id": "c", "amount": "much"}': "amount is not of type double",
        b'{"amount": 2}': "id is missing",
        b'[{"id": "d"}]': "the body is not a JSON object",
        b'{"id": "e"} {"id": "f"}': "data follows the JSON object",
        b'{"id": "\xff"}': "the body is not UTF-8",
        b'{"id": "h"} x}': "data follows the JSON object",
        b'{"id": "i"}]{"id": "j"}': "data follows the JSON object",
        b"{'id': 'k'}": "the body is not JSON",
    }
    send(cluster, [Message(topic, json.dumps(body)) for body in good])
    send(cluster, [Message(topic, body) for body in bad])
    schema = "id STRING NOT NULL, amount DOUBLE, lines ARRAY<STRUCT<n: INT>>"
    columns = "store_timestamp,message_id"
    batches = fill(spark, cluster, tmp_path, topic, schema=schema, columns=columns)
    assert sum(batch.rows for batch in batches) == len(good) + len(bad), (
        "rows that are read twice count once"
    )
    rows = {row["id"]: row for row in rows_in(tmp_path)}
    assert rows.keys() == {"a", "b"}
    assert rows["a"].keys() == {
        "store_timestamp", "message_id", "id", "amount", "lines", "date", "topic",
    }  # fmt: skip
    assert (rows["a"]["amount"], rows["a"]["lines"]) == (1.5, None)
    assert rows["b"]["lines"] == [{"n": 1}, {"n": 2}]
    assert {row["body"]: row["reason"] for row in rows_in(tmp_path, "bad")} == bad

    send(cluster, [Message(topic, '{"id": "g", "amount": 2}')])  # a batch without bad rows
    bad_files = files_in(tmp_path, "bad")
    fill(spark, cluster, tmp_path, topic, schema=schema, columns=columns)
    assert sorted(row["id"] for row in rows_in(tmp_path)) == ["a", "b", "g"]
    assert files_in(tmp_path, "bad") == bad_files
    with pytest.raises(LakeRefused, match=r"column amount double .* would become amount int"):
        fill(spark, cluster, tmp_path, topic, schema="id STRING NOT NULL, amount INT")


def test_another_checkpoint_is_refused_or_continues_where_the_lake_ends(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 2)
    lake, new = tmp_path / "lake", tmp_path / "new"
    sent = send_numbers(cluster, topic, 50)
    fill(spark, cluster, lake, topic)
    sent += send_numbers(cluster, topic, range(50, 80))
    with pytest.raises(LakeRefused, match="belongs to the checkpoint") as refused:
        fill(spark, cluster, lake, topic, checkpoint=new)
    assert "--adopt" in refused.value.hint
    batches = fill(spark, cluster, lake, topic, checkpoint=new, adopt=True)
    assert sum(batch.rows for batch in batches) == 30
    assert bodies_in(lake) == Counter(sent)
    with pytest.raises(LakeRefused):
        fill(spark, cluster, lake, topic)
    sent += send_numbers(cluster, topic, range(80, 90))
    fill(spark, cluster, lake, topic, checkpoint=new)
    assert bodies_in(lake) == Counter(sent)


def test_the_second_of_two_runs_takes_over_the_lake(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 1)
    sent = send_numbers(cluster, topic, 20)
    stream = stream_reader(spark, cluster, topic, startingOffsets="earliest").load()
    first = write_lake(stream, str(tmp_path), trigger="available-now")
    first.awaitTermination()
    first = write_lake(stream, str(tmp_path), trigger="100 ms")
    try:
        second = LakeWriter(spark, str(tmp_path), LakeSettings())
        sent += send_numbers(cluster, topic, range(20, 30))
        with (
            pytest.raises(LakeRefused, match="another run has taken over the lake"),
            translate_errors(),
        ):
            first.awaitTermination()
    finally:
        first.stop()
    assert len(rows_in(tmp_path)) == 20
    query = second.start(stream, Trigger.parse("available-now"), "second")
    query.awaitTermination()
    assert bodies_in(tmp_path) == Counter(sent)


def test_temporary_files_stay_inside_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    moves = []

    class Watched(HadoopFiles):
        def move(self, source: str, target: str) -> None:
            moves.append(self.url(source))
            super().move(source, target)

    files = Watched(spark, str(tmp_path / "checkpoint"))
    assert files.write_new("metadata", b"{}")
    assert files.read("metadata") == b"{}"
    assert not files.write_new("metadata", b"[]")
    assert [move.rpartition("/")[0] for move in moves] == [files.url()]


def test_past_dates_are_compacted_while_the_lake_is_written(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 2)
    tmp_path = tmp_path / "no [pattern]"
    sent = send_numbers(cluster, topic, 60)
    fill(spark, cluster, tmp_path, topic, max_rows=20, compression="lz4")
    small = len(files_in(tmp_path))
    assert small >= 3
    done = compact_lake(spark, str(tmp_path))
    assert done.files_before == 0, "today is not compacted"
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    done = compact_lake(spark, str(tmp_path), before=tomorrow)
    assert (done.files_before, done.files_after) == (small, 1)
    sent += send_numbers(cluster, topic, range(60, 80))
    fill(spark, cluster, tmp_path, topic)
    assert bodies_in(tmp_path) == Counter(sent)
    compact_lake(spark, str(tmp_path), before=tomorrow)
    assert len(files_in(tmp_path)) == 1
    assert bodies_in(tmp_path) == Counter(sent)
    spark_rows = spark.read.parquet(str(tmp_path / "data").replace("[", "\\["))
    assert spark_rows.where(f"topic = '{topic}'").count() == len(sent)
    assert dict(rows_in(tmp_path)[0]["properties"])["n"]


def test_write_lake_writes_a_filtered_stream(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 1)
    sent = send_numbers(cluster, topic, 20)
    stream = stream_reader(spark, cluster, topic, startingOffsets="earliest").load()
    only = stream.where("tags = 'even'")
    settings = LakeSettings(columns=("body",), date_from="born_timestamp", compression="zstd")
    query = write_lake(only, str(tmp_path), trigger="available-now", settings=settings)
    query.awaitTermination()
    assert bodies_in(tmp_path) == Counter(body for body in sent if int(body) % 2 == 0)
    assert rows_in(tmp_path)[0].keys() == {"body", "date", "topic"}


# --- errors --------------------------------------------------------------------------------------


def test_errors_have_no_traceback(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    with pytest.raises(NoRoute, match=fresh) as missing:
        fill(spark, cluster, tmp_path / "a", fresh)
    assert "Traceback" not in missing.value.remark()
    assert "java" not in missing.value.remark()
    create_topic(cluster, fresh, 1)
    for options, text in (
        ({"schema": "id STRNG"}, "can't be read"),
        ({"schema": "topic STRING"}, "which are columns of messages"),
        ({"prefix": "x"}, "--prefix needs --schema"),
        ({"columns": "nonsense"}, "a message has no column"),
        ({"files_per_batch": 0}, "less than 1"),
        ({"start": "yesterday"}, "startingOffsets"),
        ({"nonsense": 1}, "no option 'nonsense'"),
    ):
        with pytest.raises(BadSetting, match=text):
            fill(spark, cluster, tmp_path / "b", fresh, **options)


def test_a_failed_batch_ends_the_query_with_its_reason(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 1)
    send_numbers(cluster, topic, 5)
    stream = stream_reader(spark, cluster, topic, startingOffsets="earliest").load()
    broken = stream.selectExpr("topic", "store_timestamp", "raise_error('too bad') AS x")
    query = write_lake(broken, str(tmp_path), trigger="available-now")
    with pytest.raises(PipelineFailed, match="too bad") as failed, translate_errors():
        query.awaitTermination()
    assert "\n" not in failed.value.remark()
    assert files_in(tmp_path) == []


def test_lost_messages_end_the_pipeline_or_are_skipped(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 1)
    send_numbers(cluster, topic, 10)
    fill(spark, cluster, tmp_path, topic)
    with Admin(cluster.address) as admin:
        admin.delete_topic(topic)
    create_topic(cluster, topic, 1)
    send_numbers(cluster, topic, range(100, 103))
    with pytest.raises(DataLost, match=topic) as lost:
        fill(spark, cluster, tmp_path, topic)
    assert "\n" not in lost.value.remark()
    fill(spark, cluster, tmp_path, topic, skip_lost=True)
    assert len(rows_in(tmp_path)) >= 10


# --- exactly once --------------------------------------------------------------------------------


class Sender:
    """Sends messages continuously and records which are acknowledged."""

    def __init__(self, cluster: Up, topic: str) -> None:
        self.acknowledged: set[bytes] = set()
        self._cluster, self._topic = cluster, topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with Producer(self._cluster.address, group="lake-tests") as producer:
            number = 0
            while not self._stop.wait(0.02):
                messages = [Message(self._topic, str(number + i)) for i in range(20)]
                for future in [producer.submit(message) for message in messages]:
                    future.result()
                self.acknowledged |= {message.content for message in messages}
                number += len(messages)


@contextmanager
def driver(cluster: Up, lake: Path, topic: str, log: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """`penstock pipeline run lake` as a process, which is killed at the end."""
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("penstock")), "pipeline", "run", "lake",
            "--nameserver", cluster.address, "--lake", str(lake), "--topics", topic,
            "--master", "local[2]", "--trigger", "100 ms", "--max-rows", "500",
            "--conf", "spark.driver.memory=512m",
        ],
        stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to the driver and its JVM, if they still run."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def wait_for_batches(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        count -= ": " in line and line.startswith("batch ")
        if count <= 0:
            return
    raise AssertionError(f"the pipeline ended with {process.wait()}")


@pytest.mark.timeout(rounds(ci=600, proof=1800))
def test_a_killed_driver_neither_loses_nor_duplicates_messages(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 2)
    lake = tmp_path / "lake"
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with (tmp_path / "log").open("wb") as log, Sender(cluster, topic) as sender:
        for number in range(rounds(ci=1, proof=5)):
            with driver(cluster, lake, topic, log) as process:
                wait_for_batches(process, chance.randrange(1, 6))
                time.sleep(chance.uniform(0, 1.5))  # kill it at any step of a batch
                if chance.random() < 0.5 or number == 0:
                    process.kill()  # its JVM continues for a while
                    process.wait()
                else:
                    signal_group(process, signal.SIGKILL)
        with driver(cluster, lake, topic, log) as process:
            wait_for_batches(process, 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
    fill(spark, cluster, lake, topic)
    found = bodies_in(lake)
    twice = [body for body, count in found.items() if count > 1]
    assert twice == [], f"seed {seed}"
    assert sender.acknowledged - found.keys() == set(), f"seed {seed}"
    assert len(sender.acknowledged) > 100
    assert "java" not in (tmp_path / "log").read_text()
