"""The source as a stream: checkpoints, limits, queues and brokers that come and go, losses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from penstock import Admin
from penstock.client.admin.async_admin import QueueState
from tests.compat.penstock import Broker, NameServer
from tests.spark.kit import create_topic, send_numbers, source_options, stream_reader

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAIT_SECONDS = 90

Servers = tuple[Any, Broker]
"""A NameServer, ours or Apache's, and a broker."""


class Rows:
    """The rows of a stream by batch id."""

    def __init__(self) -> None:
        self.batches: dict[int, list[bytes]] = {}
        self.fails = False
        self.first: Callable[[], object] = list
        """What to do while the first batch runs."""

    def take(self, frame: DataFrame, batch: int) -> None:
        if batch == 0:
            self.first()
        rows = frame.select("body").collect()
        if self.fails:
            raise RuntimeError("the batch fails")
        self.batches[batch] = [bytes(row.body) for row in rows]

    @property
    def all(self) -> list[int]:
        return sorted(int(body) for batch in self.batches.values() for body in batch)


def start(frame: DataFrame, rows: Rows, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    stream = frame.writeStream.foreachBatch(rows.take)
    stream = stream.option("checkpointLocation", str(checkpoint))
    return stream.trigger(**(trigger or {"processingTime": "200 milliseconds"})).start()


def run_now(frame: DataFrame, checkpoint: Path) -> Rows:
    """Run a query on all existing messages."""
    rows = Rows()
    query = start(frame, rows, checkpoint, availableNow=True)
    assert query.awaitTermination(WAIT_SECONDS)
    return rows


def wait_for(query: StreamingQuery, done: Callable[[], bool]) -> None:
    """Wait until `done`; raises the error of the query if it fails before."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        if not query.isActive:
            raise AssertionError(f"the query has ended: {query.exception()}")
        assert time.monotonic() < deadline, f"not done yet: {query.lastProgress}"
        query.awaitTermination(0.1)


def stop_after_commit(query: StreamingQuery, rows: Rows) -> None:
    """Stop the query when its last batch is committed: otherwise the next run repeats it."""
    last = max(rows.batches)
    wait_for(query, lambda: any(each["batchId"] >= last for each in progress(query)))
    query.stop()


def wait_ready(query: StreamingQuery) -> None:
    """Wait until the query has determined its start: then `latest` is fixed."""
    wait_for(query, lambda: query.lastProgress is not None)


def progress(query: StreamingQuery) -> list[dict[str, Any]]:
    return [json.loads(each.json) for each in query.recentProgress]


def described(cluster: Any, topic: str) -> tuple[QueueState, ...]:
    with Admin(cluster.address) as admin:
        return admin.describe_topic(topic).queues


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A NameServer and a broker that can be stopped."""
    path = tmp_path_factory.mktemp("alone")
    names = NameServer(path / "ns")
    with names, Broker(path / "b", path / "store", names.address) as broker:
        yield names, broker


def test_a_stream_starts_at_the_end_and_continues_from_its_checkpoint(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 3)
    send_numbers(cluster, fresh, 5)
    frame, rows = stream_reader(spark, cluster, fresh).load(), Rows()
    query = start(frame, rows, tmp_path)
    wait_ready(query)
    send_numbers(cluster, fresh, range(5, 20))
    wait_for(query, lambda: len(rows.all) >= 15)
    stop_after_commit(query, rows)
    assert rows.all == list(range(5, 20))

    send_numbers(cluster, fresh, range(20, 30))
    earliest = stream_reader(spark, cluster, fresh, startingOffsets="earliest").load()
    assert run_now(earliest, tmp_path).all == list(range(20, 30))
    assert run_now(earliest, tmp_path).all == []


def test_a_failed_first_batch_is_repeated_from_the_same_offsets(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 2)
    send_numbers(cluster, fresh, 10)
    moment = 1 + max(q.updated_ms or 0 for q in described(cluster, fresh))
    frame = stream_reader(spark, cluster, fresh, startingTimestamp=moment).load()
    rows = Rows()
    rows.fails = True
    query = start(frame, rows, tmp_path / "empty")
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(WAIT_SECONDS)
    send_numbers(cluster, fresh, range(10, 20))
    query = start(frame, rows, tmp_path / "full")
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(WAIT_SECONDS)
    send_numbers(cluster, fresh, range(20, 30))
    # By now the option would give other offsets.
    later = stream_reader(spark, cluster, fresh).load()
    assert run_now(later, tmp_path / "empty").all == list(range(10, 30))
    assert run_now(later, tmp_path / "full").all == list(range(10, 30))


def test_rows_per_batch_are_limited_and_available_now_has_a_fixed_end(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 4)
    send_numbers(cluster, fresh, 50)
    frame = stream_reader(
        spark, cluster, fresh, startingOffsets="earliest", maxOffsetsPerTrigger=20
    ).load()
    rows = Rows()
    rows.first = lambda: send_numbers(cluster, fresh, range(50, 60))  # after the end was fixed
    query = start(frame, rows, tmp_path, availableNow=True)
    assert query.awaitTermination(WAIT_SECONDS)
    assert rows.all == list(range(50))
    assert [len(batch) for batch in rows.batches.values()] == [20, 20, 10]
    first = progress(query)[0]["sources"][0]
    assert sum(first["latestOffset"][fresh]["broker-a"].values()) == 50
    assert run_now(frame, tmp_path).all == list(range(50, 60))


def test_few_messages_wait_for_more(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 2)
    send_numbers(cluster, fresh, 4)
    frame = stream_reader(
        spark, cluster, fresh, startingOffsets="earliest", minOffsetsPerTrigger=10,
        maxTriggerDelay="1h",
    ).load()  # fmt: skip
    rows = Rows()
    query = start(frame, rows, tmp_path)
    wait_for(query, lambda: len(rows.all) == 4)  # the first batch does not wait
    send_numbers(cluster, fresh, range(4, 8))
    query.awaitTermination(1)  # several triggers
    assert rows.all == list(range(4))
    send_numbers(cluster, fresh, range(8, 14))
    wait_for(query, lambda: len(rows.all) == 14)
    stop_after_commit(query, rows)
    assert len(rows.batches) == 2
    # A run over existing messages does not wait for more.
    send_numbers(cluster, fresh, range(14, 16))
    assert run_now(frame, tmp_path).all == [14, 15]


def test_new_queues_and_topics_are_found_while_the_query_runs(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, f"{fresh}-a", 1)
    options = source_options(cluster, "", subscribePattern=f"{fresh}-.*")
    del options["subscribe"]
    frame, rows = spark.readStream.format("penstock").options(**options).load(), Rows()
    query = start(frame, rows, tmp_path)
    wait_ready(query)
    send_numbers(cluster, f"{fresh}-a", 4)
    wait_for(query, lambda: len(rows.all) == 4)
    create_topic(cluster, f"{fresh}-b", 2)
    send_numbers(cluster, f"{fresh}-b", range(4, 8))
    wait_for(query, lambda: len(rows.all) == 8)
    create_topic(cluster, f"{fresh}-a", 4)
    send_numbers(cluster, f"{fresh}-a", range(8, 16))
    wait_for(query, lambda: len(rows.all) == 16)
    query.stop()
    assert rows.all == list(range(16))


def test_progress_is_committed_for_a_group(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 2)
    send_numbers(cluster, fresh, 10)
    frame = stream_reader(
        spark, cluster, fresh, startingOffsets="earliest", commitGroup=f"g-{fresh}"
    ).load()
    assert len(run_now(frame, tmp_path).all) == 10
    send_numbers(cluster, fresh, 6)
    with Admin(cluster.address) as admin:
        queues = admin.progress(f"g-{fresh}").queues
    assert {(q.queue.topic, q.committed, q.max_offset) for q in queues} == {(fresh, 5, 8)}


def test_a_broker_restart_does_not_end_the_query(
    spark: SparkSession, alone: Servers, fresh: str, tmp_path: Path
) -> None:
    names, broker = alone
    create_topic(names, fresh, 2)
    send_numbers(names, fresh, 10)
    frame = stream_reader(spark, names, fresh, startingOffsets="earliest").load()
    rows = Rows()
    query = start(frame, rows, tmp_path)
    wait_for(query, lambda: len(rows.all) == 10)
    broker.kill()
    query.awaitTermination(1)  # several triggers
    assert query.isActive
    broker.start()
    send_numbers(names, fresh, range(10, 20))
    wait_for(query, lambda: len(rows.all) == 20)
    query.stop()
    assert rows.all == list(range(20))


def test_a_recreated_topic_is_a_loss(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 1)
    send_numbers(cluster, fresh, 10)
    frame = stream_reader(spark, cluster, fresh, startingOffsets="earliest").load()
    assert len(run_now(frame, tmp_path).all) == 10
    with Admin(cluster.address) as admin:
        admin.delete_topic(fresh)
    with pytest.raises(StreamingQueryException, match=f"{fresh}, queue 0 at broker-a.* offset 10"):
        run_now(frame, tmp_path)
    create_topic(cluster, fresh, 1)
    send_numbers(cluster, fresh, range(100, 103))
    with pytest.raises(StreamingQueryException, match="now ends at 3"):
        run_now(frame, tmp_path)
    lenient = stream_reader(spark, cluster, fresh, failOnDataLoss="false").load()
    assert run_now(lenient, tmp_path).all == [100, 101, 102]
    assert run_now(frame, tmp_path).all == []


def test_unsupported_stream_options_are_refused(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    create_topic(cluster, fresh, 1)
    for options, text in (
        ({"endingOffsets": "latest"}, "batch reads only"),
        ({"mode": "log", "path": "/x"}, "can't be a stream"),
    ):
        frame = stream_reader(spark, cluster, fresh, **options).load()
        query = frame.writeStream.format("noop").start()
        with pytest.raises(StreamingQueryException, match=text):
            query.awaitTermination(WAIT_SECONDS)
