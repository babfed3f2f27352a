"""Ranges of queues read from a real broker, as a Spark worker does: without a running loop."""

import asyncio
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import Admin, Message, Producer
from penstock.arrow import queue_pulls, range_reader
from penstock.arrow.columns.column_builder import ColumnBuilder
from penstock.arrow.connection_options import ConnectionOptions
from penstock.arrow.message_schema import DEFAULT_COLUMNS, arrow_schema
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.range_reader import ReadSettings
from penstock.client.consumer.pull_loop import PullAnswer
from penstock.errors import DataLost, InvalidParameter, ReadGaveUp
from penstock.spark.source.range_tasks import read_range
from penstock.spark.worker_connection import close_worker_connections, worker_connection
from penstock.testing import InProcessBroker
from tests.compat.penstock import Broker, NameServer

pytestmark = pytest.mark.timeout(120)
COLUMNS = ("queue_offset", "body", "tags")
ALL = ReadSettings(columns=COLUMNS, group="spark")
Row = tuple[int, bytes, str | None]


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker:
        broker.create_topic("T", queues=1)
        yield broker
    close_worker_connections()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "ColumnBuilder", partial(ColumnBuilder, rows_max=100))


def options_of(broker: InProcessBroker, timeout_ms: int = 3_000) -> ConnectionOptions:
    return ConnectionOptions((broker.address,), timeout_ms=timeout_ms)


def fill(broker: InProcessBroker, count: int, size: int = 20) -> list[Row]:
    """Messages of one queue; every third has the tag `c`."""
    with Producer(broker.address, group="P", timeout_ms=30_000) as producer:
        texts = [f"{n:06d}" + "x" * (n % size) for n in range(count)]
        futures = [producer.submit(Message("T", t, "abc"[n % 3])) for n, t in enumerate(texts)]
        for future in futures:
            future.result()
    stored = broker.messages("T")
    assert len(stored) == count
    return [(m.queue_offset, m.body, m.tags) for m in stored]


def part(broker: InProcessBroker, first: int, until: int, queue_id: int = 0) -> QueueRange:
    with worker_connection(options_of(broker)) as way:
        name = way.run(way.session.route("T")).brokers[0]
    return QueueRange("T", name, queue_id, first, until)


def rows(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    return [
        row
        for batch in batches
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]


def test_range_is_read_in_order(broker: InProcessBroker) -> None:
    sent = fill(broker, 3_000)
    assert rows(read_range(options_of(broker), part(broker, 0, 3_000), ALL)) == sent
    assert rows(read_range(options_of(broker), part(broker, 17, 1_100), ALL)) == sent[17:1_100]
    assert rows(read_range(options_of(broker), part(broker, 2_999, 3_000), ALL)) == sent[-1:]
    assert rows(read_range(options_of(broker), part(broker, 5, 5), ALL)) == []


def test_default_columns_have_the_declared_schema(broker: InProcessBroker) -> None:
    fill(broker, 10)
    wanted = ReadSettings(columns=DEFAULT_COLUMNS, group="spark")
    (batch,) = read_range(options_of(broker), part(broker, 0, 10), wanted)
    assert batch.schema == arrow_schema(DEFAULT_COLUMNS)
    batch.validate(full=True)
    assert set(batch.column("topic").to_pylist()) == {"T"}
    assert batch.column("broker").to_pylist() == [part(broker, 0, 1).broker] * 10


def test_batches_are_limited(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 1_050)
    batches = list(read_range(options_of(broker), part(broker, 0, 1_050), ALL))
    assert all(batch.num_rows <= 100 for batch in batches)
    assert rows(iter(batches)) == sent


def test_only_wanted_tags_are_read(broker: InProcessBroker) -> None:
    sent = fill(broker, 2_000)
    wanted = ReadSettings(columns=COLUMNS, group="spark", tags="c || nobody")
    found = rows(read_range(options_of(broker), part(broker, 10, 1_990), wanted))
    assert found == [row for row in sent[10:1_990] if row[2] == "c"]
    wanted = ReadSettings(columns=COLUMNS, group="spark", tags="nobody")
    assert rows(read_range(options_of(broker), part(broker, 0, 2_000), wanted)) == []


@pytest.mark.parametrize("size", [1, 400])
def test_short_responses_are_prefetched(size: int) -> None:
    """As from Apache's brokers: 32 messages at a time, or fewer by their size."""
    settings = {"broker.pull_messages_max": 32, "broker.pull_bytes_max": 12_000}
    in_flight = []
    with InProcessBroker(settings) as broker, pytest.MonkeyPatch.context() as patch:
        broker.create_topic("T", queues=1)
        sent = fill(broker, 3_000, size)
        prefetch = queue_pulls.QueuePuller.prefetch

        async def count(self: queue_pulls.QueuePuller, offset: int) -> None:
            await prefetch(self, offset)
            in_flight.append(len(self._in_flight))

        patch.setattr(queue_pulls.QueuePuller, "prefetch", count)
        assert rows(read_range(options_of(broker), part(broker, 3, 2_987), ALL)) == sent[3:2_987]
        close_worker_connections()
    assert max(in_flight) == (queue_pulls.PREFETCH_MAX if size == 1 else max(in_flight))


def test_restarting_broker_is_waited_for(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 2_000)
    batches = read_range(options_of(broker), part(broker, 0, 2_000), ALL)
    found = rows(itertools.islice(batches, 3))
    broker.restart()
    found += rows(itertools.islice(batches, 10))
    broker.restart()
    assert found + rows(batches) == sent


@pytest.mark.slow
def test_hanging_or_killed_broker_is_waited_for(
    tmp_path: Path, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_pulls, "PULL_TIMEOUT_MS", 500)
    with (
        NameServer(tmp_path / "ns") as names,
        Broker(tmp_path / "b", tmp_path / "store", names.address) as broker,
    ):
        with (
            Admin(names.address) as admin,
            Producer(names.address, group="P", timeout_ms=30_000) as producer,
        ):
            admin.create_topic("T", queues=1)
            futures = [producer.submit(Message("T", str(n))) for n in range(8_000)]
            for future in futures:
                future.result()
        batches = read_range(
            ConnectionOptions((names.address,)), QueueRange("T", broker.name, 0, 0, 8_000), ALL
        )
        found = rows(itertools.islice(batches, 3))
        os.kill(broker.pid, signal.SIGSTOP)
        resume_timer = threading.Timer(2, os.kill, (broker.pid, signal.SIGCONT))
        resume_timer.start()
        found += rows(itertools.islice(batches, 30))
        resume_timer.join()
        broker.kill()
        broker.start()
        assert [row[0] for row in found + rows(batches)] == list(range(8_000))
        close_worker_connections()


def test_response_may_stay_unread_for_long(
    broker: InProcessBroker,
    small_batches: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Spark processes batches slowly, and the event loop does not run meanwhile."""
    monkeypatch.setattr(queue_pulls, "PULL_TIMEOUT_MS", 1_500)
    sent = fill(broker, 4_000)
    batches = read_range(options_of(broker), part(broker, 0, 4_000), ALL)
    found = []
    for number, batch in enumerate(batches):
        found += rows(iter([batch]))
        if number == 3:
            time.sleep(2)
    assert found == sent
    assert "retrying" not in caplog.text


def test_broker_that_stays_unavailable_is_named(small_batches: None) -> None:
    with InProcessBroker() as broker:
        broker.create_topic("T", queues=1)
        fill(broker, 4_000)
        wanted = ReadSettings(columns=COLUMNS, group="spark", timeout_ms=1_500)
        whole = part(broker, 0, 4_000)
        address = broker.broker_address
        batches = read_range(options_of(broker, 500), whole, wanted)
        next(batches)
    with pytest.raises(ReadGaveUp) as caught:
        rows(batches)
    close_worker_connections()
    for text in (whole.broker, address, "T", "queue 0", "readTimeout"):
        assert text in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.hint) == (str(caught.value), caught.value.hint)


def test_queue_that_ends_too_early_is_a_loss(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(range_reader, "LAG_WAIT_MS", 300)
    sent = fill(broker, 50)
    for first in (10, 50, 55):
        whole = part(broker, first, 60)
        with pytest.raises(DataLost) as caught:
            rows(read_range(options_of(broker), whole, ALL))
        lost = max(first, 50)
        for text in ("T", whole.broker, "queue 0", f"{lost} to 59", "0 to 49"):
            assert text in str(caught.value)
        going_on = ReadSettings(columns=COLUMNS, group="spark", fail_on_data_loss=False)
        assert rows(read_range(options_of(broker), whole, going_on)) == sent[first:]
        assert f"{60 - lost} messages in total" in caplog.text


def test_late_messages_are_waited_for(broker: InProcessBroker) -> None:
    """A replica may lag, and a broker that starts may not show its whole log at once."""
    fill(broker, 10)
    batches = read_range(options_of(broker), part(broker, 0, 20), ALL)
    wait_for_lag = range_reader.RangeReader._wait_for_lag

    def send() -> None:
        with Producer(broker.address, group="P") as producer:
            for n in range(10):
                producer.send(Message("T", str(n)))

    async def send_then(self: range_reader.RangeReader, answer: PullAnswer) -> None:
        await wait_for_lag(self, answer)
        if answer.max_offset == 10:
            await asyncio.get_running_loop().run_in_executor(None, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_reader.RangeReader, "_wait_for_lag", send_then)
        assert [row[0] for row in rows(batches)] == list(range(20))


def test_deleted_topic_is_a_loss(broker: InProcessBroker, small_batches: None) -> None:
    fill(broker, 4_000)
    whole = part(broker, 0, 4_000)
    for fails in (True, False):
        wanted = ReadSettings(
            columns=COLUMNS, group="spark", fail_on_data_loss=fails, timeout_ms=500
        )
        batches = read_range(options_of(broker), whole, wanted)
        if fails:
            next(batches)
            with Admin(broker.address) as admin:
                admin.delete_topic("T")
            with pytest.raises(DataLost, match=r"offsets \d+ to 3999 are wanted.*T does not exist"):
                rows(batches)
        else:
            assert rows(batches) == []


def test_unknown_queue_is_refused(broker: InProcessBroker) -> None:
    fill(broker, 5)
    gone = QueueRange("T", part(broker, 0, 5).broker, 7, 0, 5)
    with pytest.raises(InvalidParameter, match="no readable queue 7"):
        rows(read_range(options_of(broker), gone, ALL))


def test_abandoned_reader_cancels_its_pulls(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 2_000)
    batches = read_range(options_of(broker), part(broker, 0, 2_000), ALL)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert rows(read_range(options_of(broker), part(broker, 0, 2_000), ALL)) == sent


def test_two_ranges_share_a_connection(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 1_000)
    one = read_range(options_of(broker), part(broker, 0, 500), ALL)
    other = read_range(options_of(broker), part(broker, 500, 1_000), ALL)
    pairs = list(zip(one, other, strict=True))
    assert rows(pair[0] for pair in pairs) + rows(pair[1] for pair in pairs) == sent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_worker_makes_its_own_connections() -> None:
    code = """
    import os, sys, warnings
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    from penstock import Message, Producer
    from penstock.spark.worker_connection import close_worker_connections
    from tests.integration.test_spark_reading import ALL, fill, options_of, part, read_range, rows
    from penstock.testing import InProcessBroker

    broker = InProcessBroker()
    broker.start()
    broker.create_topic("T", queues=1)
    sent = fill(broker, 3000)
    whole, connection = part(broker, 0, 3000), options_of(broker)
    assert rows(read_range(connection, whole, ALL)) == sent
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert rows(read_range(connection, whole, ALL)) == sent
            close_worker_connections()
            code = 0
        finally:
            os._exit(code)
    assert rows(read_range(connection, whole, ALL)) == sent
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rows(read_range(connection, whole, ALL)) == sent
    broker.close()
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
