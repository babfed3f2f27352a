"""Parts of queues read from a real broker, as a Spark worker does it: no loop runs around it."""

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
from penstock.client.consumer.pull_loop import PullAnswer
from penstock.errors import DataLost, InvalidParameter, ReadGaveUp
from penstock.spark.arrow.columns import ColumnBuilder
from penstock.spark.connection_options import ConnectionOptions
from penstock.spark.message_schema import DEFAULT_COLUMNS, arrow_schema
from penstock.spark.source import queue_pulls, range_reader
from penstock.spark.source.offset_ranges import QueueRange
from penstock.spark.source.range_reader import Reading, read_range
from penstock.spark.worker_connection import close_worker_connections, worker_connection
from penstock.testing import InProcessBroker
from tests.compat.penstock import Broker, NameServer

pytestmark = pytest.mark.timeout(120)
COLUMNS = ("queue_offset", "body", "tags")
ALL = Reading(columns=COLUMNS, group="spark")
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


def here(broker: InProcessBroker, timeout_ms: int = 3_000) -> ConnectionOptions:
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
    with worker_connection(here(broker)) as way:
        name = way.run(way.session.route("T")).brokers[0]
    return QueueRange("T", name, queue_id, first, until)


def rows(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    return [
        row
        for batch in batches
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]


def test_a_part_comes_as_it_was_sent(broker: InProcessBroker) -> None:
    sent = fill(broker, 3_000)
    assert rows(read_range(here(broker), part(broker, 0, 3_000), ALL)) == sent
    assert rows(read_range(here(broker), part(broker, 17, 1_100), ALL)) == sent[17:1_100]
    assert rows(read_range(here(broker), part(broker, 2_999, 3_000), ALL)) == sent[-1:]
    assert rows(read_range(here(broker), part(broker, 5, 5), ALL)) == []


def test_all_usual_columns_with_the_schema_promised(broker: InProcessBroker) -> None:
    fill(broker, 10)
    wanted = Reading(columns=DEFAULT_COLUMNS, group="spark")
    (batch,) = read_range(here(broker), part(broker, 0, 10), wanted)
    assert batch.schema == arrow_schema(DEFAULT_COLUMNS)
    batch.validate(full=True)
    assert set(batch.column("topic").to_pylist()) == {"T"}
    assert batch.column("broker").to_pylist() == [part(broker, 0, 1).broker] * 10


def test_batches_have_a_limit(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 1_050)
    batches = list(read_range(here(broker), part(broker, 0, 1_050), ALL))
    assert all(batch.num_rows <= 100 for batch in batches)
    assert rows(iter(batches)) == sent


def test_only_the_tags_that_are_wanted(broker: InProcessBroker) -> None:
    sent = fill(broker, 2_000)
    wanted = Reading(columns=COLUMNS, group="spark", tags="c || nobody")
    found = rows(read_range(here(broker), part(broker, 10, 1_990), wanted))
    assert found == [row for row in sent[10:1_990] if row[2] == "c"]
    wanted = Reading(columns=COLUMNS, group="spark", tags="nobody")
    assert rows(read_range(here(broker), part(broker, 0, 2_000), wanted)) == []


@pytest.mark.parametrize("size", [1, 400])
def test_short_answers_are_asked_for_ahead(size: int) -> None:
    """As Apache's brokers give them: 32 at a time, or fewer by their bytes."""
    settings = {"broker.pull_messages_max": 32, "broker.pull_bytes_max": 12_000}
    flying = []
    with InProcessBroker(settings) as broker, pytest.MonkeyPatch.context() as patch:
        broker.create_topic("T", queues=1)
        sent = fill(broker, 3_000, size)
        ask_ahead = queue_pulls.Pulls.ask_ahead

        async def count(self: queue_pulls.Pulls, offset: int) -> None:
            await ask_ahead(self, offset)
            flying.append(len(self._flying))

        patch.setattr(queue_pulls.Pulls, "ask_ahead", count)
        assert rows(read_range(here(broker), part(broker, 3, 2_987), ALL)) == sent[3:2_987]
        close_worker_connections()
    assert max(flying) == (queue_pulls.AHEAD_MAX if size == 1 else max(flying))


def test_a_broker_that_restarts_is_waited_for(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 2_000)
    batches = read_range(here(broker), part(broker, 0, 2_000), ALL)
    found = rows(itertools.islice(batches, 3))
    broker.restart()
    found += rows(itertools.islice(batches, 10))
    broker.restart()
    assert found + rows(batches) == sent


@pytest.mark.slow
def test_a_broker_that_hangs_or_is_killed_is_waited_for(
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
        awake = threading.Timer(2, os.kill, (broker.pid, signal.SIGCONT))
        awake.start()
        found += rows(itertools.islice(batches, 30))
        awake.join()
        broker.kill()
        broker.start()
        assert [row[0] for row in found + rows(batches)] == list(range(8_000))
        close_worker_connections()


def test_an_answer_may_lie_unread_for_long(
    broker: InProcessBroker, small_batches: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Spark is slow with the batches, the event loop stands still meanwhile."""
    monkeypatch.setattr(queue_pulls, "PULL_TIMEOUT_MS", 1_500)
    sent = fill(broker, 4_000)
    batches = read_range(here(broker), part(broker, 0, 4_000), ALL)
    found = []
    for number, batch in enumerate(batches):
        found += rows(iter([batch]))
        if number == 3:
            time.sleep(2)
    assert found == sent
    assert "tried again" not in caplog.text


def test_a_broker_that_stays_away_is_named(small_batches: None) -> None:
    with InProcessBroker() as broker:
        broker.create_topic("T", queues=1)
        fill(broker, 4_000)
        wanted = Reading(columns=COLUMNS, group="spark", timeout_ms=1_500)
        whole = part(broker, 0, 4_000)
        address = broker.broker_address
        batches = read_range(here(broker, 500), whole, wanted)
        next(batches)
    with pytest.raises(ReadGaveUp) as caught:
        rows(batches)
    close_worker_connections()
    for text in (whole.broker, address, "T", "queue 0", "readTimeout"):
        assert text in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.hint) == (str(caught.value), caught.value.hint)


def test_a_queue_that_ends_too_early_is_a_loss(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(range_reader, "BEHIND_MS", 300)
    sent = fill(broker, 50)
    for first in (10, 50, 55):
        whole = part(broker, first, 60)
        with pytest.raises(DataLost) as caught:
            rows(read_range(here(broker), whole, ALL))
        lost = max(first, 50)
        for text in ("T", whole.broker, "queue 0", f"{lost} to 59", "0 to 49"):
            assert text in str(caught.value)
        going_on = Reading(columns=COLUMNS, group="spark", fail_on_data_loss=False)
        assert rows(read_range(here(broker), whole, going_on)) == sent[first:]
        assert f"{60 - lost} messages in all" in caplog.text


def test_messages_that_come_late_are_waited_for(broker: InProcessBroker) -> None:
    """A replica may be behind, and a broker that starts may not show everything at once."""
    fill(broker, 10)
    batches = read_range(here(broker), part(broker, 0, 20), ALL)
    behind = range_reader.RangeReader._behind

    def send() -> None:
        with Producer(broker.address, group="P") as producer:
            for n in range(10):
                producer.send(Message("T", str(n)))

    async def send_then(self: range_reader.RangeReader, answer: PullAnswer) -> None:
        await behind(self, answer)
        if answer.max_offset == 10:
            await asyncio.get_running_loop().run_in_executor(None, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_reader.RangeReader, "_behind", send_then)
        assert [row[0] for row in rows(batches)] == list(range(20))


def test_a_topic_that_is_gone_is_a_loss(broker: InProcessBroker, small_batches: None) -> None:
    fill(broker, 4_000)
    whole = part(broker, 0, 4_000)
    for fails in (True, False):
        wanted = Reading(columns=COLUMNS, group="spark", fail_on_data_loss=fails, timeout_ms=500)
        batches = read_range(here(broker), whole, wanted)
        if fails:
            next(batches)
            with Admin(broker.address) as admin:
                admin.delete_topic("T")
            with pytest.raises(DataLost, match=r"offsets \d+ to 3999 are wanted.*T does not exist"):
                rows(batches)
        else:
            assert rows(batches) == []


def test_a_queue_that_is_not_there_is_refused(broker: InProcessBroker) -> None:
    fill(broker, 5)
    gone = QueueRange("T", part(broker, 0, 5).broker, 7, 0, 5)
    with pytest.raises(InvalidParameter, match="no queue 7"):
        rows(read_range(here(broker), gone, ALL))


def test_a_reader_that_is_left_early_leaves_nothing_behind(
    broker: InProcessBroker, small_batches: None
) -> None:
    sent = fill(broker, 2_000)
    batches = read_range(here(broker), part(broker, 0, 2_000), ALL)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert rows(read_range(here(broker), part(broker, 0, 2_000), ALL)) == sent


def test_two_parts_at_a_time_on_one_link(broker: InProcessBroker, small_batches: None) -> None:
    sent = fill(broker, 1_000)
    one = read_range(here(broker), part(broker, 0, 500), ALL)
    other = read_range(here(broker), part(broker, 500, 1_000), ALL)
    pairs = list(zip(one, other, strict=True))
    assert rows(pair[0] for pair in pairs) + rows(pair[1] for pair in pairs) == sent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_worker_makes_connections_of_its_own() -> None:
    code = """
    import os, sys, warnings
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    from penstock import Message, Producer
    from penstock.spark.worker_connection import close_worker_connections
    from tests.integration.test_spark_reading import ALL, fill, here, part, read_range, rows
    from penstock.testing import InProcessBroker

    broker = InProcessBroker()
    broker.start()
    broker.create_topic("T", queues=1)
    sent = fill(broker, 3000)
    whole, connection = part(broker, 0, 3000), here(broker)
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
