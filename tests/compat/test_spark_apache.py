"""Spark's readers at one of Apache's brokers: pulls, a kill in between, and its log files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pytest

from penstock import Admin, Message, Producer
from penstock.arrow import range_reader
from penstock.arrow.columns.column_builder import ColumnBuilder
from penstock.arrow.connection_options import ConnectionOptions
from penstock.arrow.log_reader import LogSelection, plan_scan, read_slice
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.range_reader import ReadSettings
from penstock.errors import DataLost
from penstock.spark.source.range_tasks import read_range
from penstock.spark.worker_connection import close_worker_connections

from . import apache
from .clusters import OwnCluster

pytestmark = [pytest.mark.compat, pytest.mark.slow]

COUNT = 6_000
COLUMNS = ("queue_offset", "body", "tags")
ALL = ReadSettings(columns=COLUMNS, group="spark")
Row = tuple[int, bytes, str | None]


@pytest.fixture(scope="module")
def broker(apache_cluster: OwnCluster) -> Iterator[apache.Broker]:
    assert isinstance(apache_cluster.server, apache.Broker)
    yield apache_cluster.server
    close_worker_connections()


@pytest.fixture(scope="module")
def connection(broker: apache.Broker) -> ConnectionOptions:
    return ConnectionOptions((broker._namesrv,))


@pytest.fixture(scope="module")
def sent(broker: apache.Broker) -> list[Row]:
    """Messages of one queue, compressed ones among them."""
    with Admin(broker._namesrv) as admin:
        admin.create_topic("T", queues=1)
    bodies = [b"%06d" % n + b"x" * (9_000 if n % 500 == 7 else n % 300) for n in range(COUNT)]
    with Producer(broker._namesrv, group="P") as producer:
        for begin in range(0, COUNT, 500):
            some = bodies[begin : begin + 500]
            futures = [
                producer.submit(Message("T", body, "ab"[n % 2]), ordering_key="one")
                for n, body in enumerate(some, begin)
            ]
            for future in futures:
                future.result()
    return [(n, body, "ab"[n % 2]) for n, body in enumerate(bodies)]


def rows(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    return [
        row
        for batch in batches
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]


def part(broker: apache.Broker, first: int = 0, until: int = COUNT) -> QueueRange:
    return QueueRange("T", broker.name, 0, first, until)


def test_parts_of_a_queue(
    broker: apache.Broker, connection: ConnectionOptions, sent: list[Row]
) -> None:
    found = rows(read_range(connection, part(broker), ALL))
    assert sorted(row[1:] for row in found) == sorted(row[1:] for row in sent)
    assert [row[0] for row in found] == list(range(COUNT))
    assert rows(read_range(connection, part(broker, 17, 4_000), ALL)) == found[17:4_000]
    has_tag = ReadSettings(columns=COLUMNS, group="spark", tags="b")
    assert rows(read_range(connection, part(broker), has_tag)) == [r for r in found if r[2] == "b"]


def test_offsets_that_are_not_there(
    broker: apache.Broker,
    connection: ConnectionOptions,
    sent: list[Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(range_reader, "LAG_WAIT_MS", 300)
    for first in (COUNT - 5, COUNT, COUNT + 3):
        wanted = part(broker, first, COUNT + 10)
        lost = max(first, COUNT)
        with pytest.raises(DataLost, match=f"{lost} to {COUNT + 9} are wanted.* 0 to {COUNT - 1}"):
            rows(read_range(connection, wanted, ALL))
        going_on = ReadSettings(columns=COLUMNS, group="spark", fail_on_data_loss=False)
        assert len(rows(read_range(connection, wanted, going_on))) == max(COUNT - first, 0)


def test_its_log_files_hold_the_same(
    broker: apache.Broker, connection: ConnectionOptions, sent: list[Row]
) -> None:
    scan = LogSelection(columns=COLUMNS, topics=frozenset({"T"}))
    slices = plan_scan(str(broker.store_dir), scan)
    assert len(slices) > 1
    found = [row for one in slices for row in rows(read_slice(one, scan))]
    assert found == rows(read_range(connection, part(broker), ALL))


def test_a_kill_and_a_new_start(
    broker: apache.Broker,
    connection: ConnectionOptions,
    sent: list[Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(range_reader, "ColumnBuilder", partial(ColumnBuilder, rows_max=100))
    batches = read_range(connection, part(broker), ALL)
    found = rows(itertools.islice(batches, 5))
    broker.kill()
    broker.start()
    found += rows(batches)
    assert [row[0] for row in found] == list(range(COUNT))
