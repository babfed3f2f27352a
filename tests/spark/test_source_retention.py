"""Files deleted by retention before a query has read them: reported, or skipped and counted.

The files of a small log are dated back and the broker is asked to delete what is too old, as it
does by itself every night.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from penstock import Admin, Message, Producer
from penstock.wire.codes import RequestCode
from tests.compat.penstock import Broker, NameServer
from tests.spark.kit import create_topic, source_options
from tests.spark.logged import LoggedSource
from tests.spark.test_source_stream import WAIT_SECONDS, Rows, run_now

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FILE_BYTES = 1 << 20
BODY_BYTES = 16_000
QUEUES = 2
COUNT = 400
"""Messages of a test: six files and a bit."""
MANY = 4_000
"""More than a task and Spark have on their way at a time: 64 MB against three batches of 16 MiB."""

Places = dict[tuple[int, int], int]
"""Queue and offset → the number that the message there has for its body."""


class SmallLogCluster:
    """A NameServer and a broker whose log has small files."""

    def __init__(self, path: Path) -> None:
        self.names: Any = NameServer(path / "names")  # the functions of `kit` expect another type
        conf: dict[str, Any] = {"mappedFileSizeCommitLog": FILE_BYTES, "deleteFileBatchMax": 1_000}
        self.broker = Broker(path / "broker", path / "store", self.names.address, **conf)
        self._files = path / "store" / "commitlog"

    def send(self, topic: str, first: int, until: int) -> Places:
        """Send numbers as messages; returns their queues and offsets."""
        with Producer(self.names.address, group="retention", compression=None) as producer:
            futures = {
                n: producer.submit(Message(topic, str(n).ljust(BODY_BYTES)))
                for n in range(first, until)
            }
            receipts = {n: future.result() for n, future in futures.items()}
        return {(r.queue.queue_id, r.queue_offset): n for n, r in receipts.items()}

    def expire(self, topic: str, *, keep: int) -> dict[int, int]:
        """Let retention delete all files except the last ones; returns the queues' min offsets."""
        old = sorted(self._files.iterdir())[:-keep]
        deadline = time.monotonic() + WAIT_SECONDS
        with Admin(self.names.address) as admin:
            while left := [path for path in old if path.exists()]:
                assert time.monotonic() < deadline, f"{len(left)} files are still there"
                for path in left:  # repeatedly, because the broker's flushes update the file times
                    try:
                        os.utime(path, (0, 0))
                    except FileNotFoundError:
                        continue
                admin.ask(self.broker.address, RequestCode.DELETE_EXPIRED_COMMITLOG, {})
            return {q.queue.queue_id: q.min_offset for q in admin.describe_topic(topic).queues}


@pytest.fixture(scope="module")
def small_log_cluster(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SmallLogCluster]:
    spark.dataSource.register(LoggedSource)
    small_log_cluster = SmallLogCluster(tmp_path_factory.mktemp("small-log"))
    with small_log_cluster.names, small_log_cluster.broker:
        yield small_log_cluster


class Query:
    """Reads of one topic, strict or lenient, and the log of Spark's Python processes."""

    def __init__(
        self, spark: SparkSession, small_log_cluster: SmallLogCluster, topic: str, path: Path
    ) -> None:
        self._spark = spark
        self._log = path / "log.txt"
        self._options = source_options(small_log_cluster.names, topic, logFile=self._log)

    def batch(self, *, fails: bool, **options: str) -> DataFrame:
        read = self._spark.read.format("logged").options(**self._options, **options)
        return read.option("failOnDataLoss", fails).load().select("body")

    def stream(self, *, fails: bool, **options: int) -> DataFrame:
        read = self._spark.readStream.format("logged").options(**self._options, **options)
        return read.option("startingOffsets", "earliest").option("failOnDataLoss", fails).load()

    def said(self, pattern: str) -> list[Any]:
        """All matches of the pattern (or its groups) in the log, sorted."""
        return sorted(re.findall(pattern, self._log.read_text()))

    def lost_in_tasks(self) -> dict[int, int]:
        """The number of lost messages that tasks report, by queue."""
        found = self.said(r"queue (\d+): (\d+) messages in total")
        return {int(queue): int(count) for queue, count in found}


@pytest.fixture
def query(
    spark: SparkSession, small_log_cluster: SmallLogCluster, fresh: str, tmp_path: Path
) -> Query:
    create_topic(small_log_cluster.names, fresh, QUEUES)
    return Query(spark, small_log_cluster, fresh, tmp_path)


def there(places: Places, begins: Mapping[int, int]) -> list[int]:
    """The numbers that were not deleted."""
    return sorted(n for (queue, offset), n in places.items() if offset >= begins[queue])


def gone(small_log_cluster: SmallLogCluster, topic: str, places: Places, begin: int) -> str:
    """The report of a task about the first queue."""
    last = max(offset for queue, offset in places if queue == 0)
    place = rf"topic {topic}, broker penstock \({small_log_cluster.broker.address}\), queue 0: "
    return f"{place}offsets 0 to {begin - 1} are wanted, offsets {begin} to {last} exist"


def test_a_stream_that_was_stopped_for_too_long_reports_a_loss(
    small_log_cluster: SmallLogCluster, query: Query, fresh: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    places = small_log_cluster.send(fresh, 0, 50)
    assert run_now(query.stream(fails=True), checkpoint).all == list(range(50))
    read = {queue: 1 + max(n for q, n in places if q == queue) for queue in range(QUEUES)}
    later = small_log_cluster.send(fresh, 50, COUNT)
    begins = small_log_cluster.expire(fresh, keep=3)
    left = there(later, begins)
    assert 0 < len(left) < len(later)

    with pytest.raises(StreamingQueryException) as failure:
        run_now(query.stream(fails=True), checkpoint)
    for queue, begin in begins.items():
        assert (
            f"{fresh}, queue {queue} at penstock: offsets {read[queue]} to {begin - 1} are "
            f"missing, the first offset is {begin}"
        ) in str(failure.value)
    assert f"{len(later) - len(left)} messages are lost" in str(failure.value)
    assert "failOnDataLoss=false" in str(failure.value)
    assert query.said("are lost") == []

    assert run_now(query.stream(fails=False), checkpoint).all == left
    [(count, _)] = query.said(r"(\d+) messages are lost: (.*)")
    assert int(count) == len(later) - len(left)
    small_log_cluster.send(fresh, COUNT, COUNT + 10)
    assert run_now(query.stream(fails=True), checkpoint).all == list(range(COUNT, COUNT + 10))


def test_each_batch_counts_its_lost_messages(
    small_log_cluster: SmallLogCluster, query: Query, fresh: str, tmp_path: Path
) -> None:
    places = small_log_cluster.send(fresh, 0, 10)
    assert len(run_now(query.stream(fails=True), tmp_path / "checkpoint").all) == 10
    later = small_log_cluster.send(fresh, 10, COUNT)
    left = there(later, small_log_cluster.expire(fresh, keep=3))
    limited = query.stream(fails=False, maxOffsetsPerTrigger=(COUNT - len(left)) // 2)
    assert run_now(limited, tmp_path / "checkpoint").all == left
    counts = [int(count) for count, _ in query.said(r"(\d+) messages are lost: (.*)")]
    assert len(counts) > 1
    assert sum(counts) == len(later) - len(left) == COUNT - len(places) - len(left)


def test_a_batch_from_deleted_offsets_is_a_loss(
    small_log_cluster: SmallLogCluster, query: Query, fresh: str
) -> None:
    places = small_log_cluster.send(fresh, 0, COUNT)
    begins = small_log_cluster.expire(fresh, keep=3)
    wanted = {0: 3, 1: begins[1] + 2}
    start = json.dumps({fresh: {"penstock": wanted}})
    loss = f"{begins[0] - 3} messages are lost: {fresh}, queue 0 at penstock: offsets 3 to "
    loss += f"{begins[0] - 1} are missing, the first offset is {begins[0]}"
    with pytest.raises(PySparkException, match=loss):
        query.batch(fails=True, startingOffsets=start).count()
    found = query.batch(fails=False, startingOffsets=start).collect()
    assert sorted(int(row.body) for row in found) == there(places, {**begins, 1: wanted[1]})
    assert query.said(loss) == [loss]


def test_files_deleted_between_plan_and_tasks_are_a_loss(
    small_log_cluster: SmallLogCluster, query: Query, fresh: str
) -> None:
    places = small_log_cluster.send(fresh, 0, COUNT)
    strict, lenient = query.batch(fails=True).rdd, query.batch(fails=False).rdd
    assert strict.getNumPartitions() == lenient.getNumPartitions() == 1  # plans the tasks
    begins = small_log_cluster.expire(fresh, keep=3)
    with pytest.raises(Exception, match=gone(small_log_cluster, fresh, places, begins[0])):
        strict.collect()
    assert sorted(int(row.body) for row in lenient.collect()) == there(places, begins)
    assert query.lost_in_tasks() == begins
    assert all(begins.values())


def test_files_deleted_while_a_stream_batch_runs_are_a_loss(
    small_log_cluster: SmallLogCluster, query: Query, fresh: str, tmp_path: Path
) -> None:
    places = small_log_cluster.send(fresh, 0, COUNT)
    begins: dict[int, int] = {}

    def run(*, keep: int, fails: bool) -> Rows:
        rows = Rows()

        def take(frame: DataFrame, batch: int) -> None:
            begins.update(small_log_cluster.expire(fresh, keep=keep))  # the batch is planned by now
            rows.take(frame, batch)

        stream = query.stream(fails=fails).writeStream.foreachBatch(take)
        stream = stream.option("checkpointLocation", str(tmp_path / str(fails)))
        assert stream.trigger(availableNow=True).start().awaitTermination(WAIT_SECONDS)
        return rows

    with pytest.raises(StreamingQueryException) as failure:
        run(keep=5, fails=True)
    assert re.search(gone(small_log_cluster, fresh, places, begins[0]), str(failure.value))
    before = dict(begins)
    assert run(keep=3, fails=False).all == there(places, begins)
    assert query.lost_in_tasks() == {queue: begins[queue] - before[queue] for queue in begins}


def test_files_deleted_while_a_task_reads_are_a_loss(
    spark: SparkSession, small_log_cluster: SmallLogCluster, fresh: str, tmp_path: Path
) -> None:
    """The task has read the beginning, which is deleted by now, and continues at the min offset."""
    create_topic(small_log_cluster.names, fresh, 1)
    query = Query(spark, small_log_cluster, fresh, tmp_path)
    places = small_log_cluster.send(fresh, 0, MANY)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(WAIT_SECONDS)
    address = listener.getsockname()

    def wait_after_the_first_batch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 0:
                with socket.create_connection(address) as waiting:
                    waiting.recv(1)  # until the test closes the connection
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        frame = query.batch(fails=False).mapInArrow(wait_after_the_first_batch, "body binary")
        with ThreadPoolExecutor(1) as beside, listener:
            reading = beside.submit(frame.collect)
            waiting, _ = listener.accept()
            with waiting:
                begins = small_log_cluster.expire(fresh, keep=4)
            found = sorted(int(row.body) for row in reading.result())
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    [(first, last)] = query.said(r"offsets (\d+) to (\d+) are wanted")
    lost = range(int(first), begins[0])
    assert 0 < lost.start < lost.stop == int(last) + 1
    assert found == sorted(n for (_, offset), n in places.items() if offset not in lost)
    assert query.lost_in_tasks() == {0: len(lost)}
