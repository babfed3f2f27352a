"""The source with Apache RocketMQ: the same queries as with Penstock's broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from penstock import Admin
from tests.compat import maven
from tests.compat.apache import Broker, NameServer
from tests.spark.kit import create_topic, reader, send_numbers, stream_reader
from tests.spark.test_source_batch import bodies, numbers
from tests.spark.test_source_stream import run_now

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

Servers = tuple[Any, Broker]

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.compat]


@pytest.fixture(scope="module", params=maven.SERVER_VERSIONS)
def apache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Apache's servers; without its timer its broker can't delete topics."""
    missing = maven.missing_tools()
    if missing:
        message = f"needs {' and '.join(missing)} on the PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    path, version = tmp_path_factory.mktemp("apache"), request.param
    conf = {"version": version, "timerWheelEnable": True}
    with (
        NameServer(path / "ns", version=version) as names,
        Broker(path / "b", path / "store", names.address, **conf) as broker,
    ):
        yield names, broker


def test_batch_reads(spark: SparkSession, apache: Servers, fresh: str) -> None:
    names, _ = apache
    create_topic(names, fresh, 3)
    send_numbers(names, fresh, 300)
    whole = reader(spark, names, fresh).load()
    assert bodies(whole) == numbers(0, 300)
    odd = reader(spark, names, fresh, tags="odd", minPartitions=6).load()
    assert bodies(odd) == sorted(str(n).encode() for n in range(1, 300, 2))
    last = max(row.store_timestamp for row in whole.select("store_timestamp").collect())
    send_numbers(names, fresh, range(300, 320))
    moment = round(last.timestamp() * 1000) + 1
    assert bodies(reader(spark, names, fresh, startingTimestamp=moment).load()) == numbers(300, 320)


def test_a_stream_commits_its_group_restarts_and_reports_a_lost_topic(
    spark: SparkSession, apache: Servers, fresh: str, tmp_path: Path
) -> None:
    names, broker = apache
    create_topic(names, fresh, 3)
    send_numbers(names, fresh, 100)
    group = f"g-{fresh}"
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 60, "commitGroup": group}
    frame = stream_reader(spark, names, fresh, **options).load()
    rows = run_now(frame, tmp_path)
    assert rows.all == list(range(100))
    assert [len(batch) for batch in rows.batches.values()] == [60, 40]
    broker.kill()
    broker.start()
    send_numbers(names, fresh, range(100, 130))
    assert run_now(frame, tmp_path).all == list(range(100, 130))
    with Admin(names.address) as admin:
        progress = admin.progress(group)
        assert {q.committed == q.max_offset for q in progress.queues} == {True}
        assert progress.lag == 0
        admin.delete_topic(fresh)
    with pytest.raises(StreamingQueryException, match="no longer has it"):
        run_now(frame, tmp_path)
    create_topic(names, fresh, 3)
    send_numbers(names, fresh, range(500, 506))
    with pytest.raises(StreamingQueryException, match="now ends at 2"):
        run_now(frame, tmp_path)
    lenient = stream_reader(spark, names, fresh, **options, failOnDataLoss="false").load()
    assert run_now(lenient, tmp_path).all == list(range(500, 506))
