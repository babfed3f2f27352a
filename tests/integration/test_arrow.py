"""`penstock.arrow` reads what the Spark source reads, from a real broker and from its files."""

import asyncio
import gc
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock.arrow
from penstock import Message, Producer
from penstock.arrow import range_reader
from penstock.arrow.columns.column_builder import ColumnBuilder
from penstock.arrow.message_schema import DEFAULT_COLUMNS, FIELDS
from penstock.arrow.reading import _text
from penstock.errors import BlockingInLoop, DataLost, NoRoute, ReadFailed
from penstock.spark.source.data_source import DefaultSource
from penstock.spark.worker_connection import close_worker_connections
from penstock.testing import InProcessBroker

pytestmark = pytest.mark.timeout(120)
THREAD = "penstock-arrow"
PAGE = (Path(__file__).parents[2] / "docs" / "arrow.md").read_text()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[InProcessBroker]:
    with InProcessBroker(data=store) as broker:
        broker.create_topic("orders", queues=3)
        yield broker
    close_worker_connections()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "ColumnBuilder", partial(ColumnBuilder, rows_max=100))


def send(broker: InProcessBroker, count: int, *, size: int = 20, topic: str = "orders") -> None:
    with Producer(broker.address, group="P", timeout_ms=30_000) as producer:
        messages = [
            Message(topic, f"{n}".rjust(size), "abc"[n % 3], [f"k{n}"], {"n": str(n)})
            for n in range(count)
        ]
        for future in [producer.submit(message) for message in messages]:
            future.result()


def spark_rows(**options: str) -> list[dict[str, Any]]:
    """What the Spark source reads with these options: planned and read as Spark does it."""
    source = DefaultSource(options)
    reader = source.reader(source.schema())
    rows: list[dict[str, Any]] = []
    for partition in reader.partitions():
        for batch in reader.read(partition):
            assert isinstance(batch, pa.RecordBatch)
            rows += batch.to_pylist()
    return rows


def by_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["topic"], row["queue_id"], row["queue_offset"]))


def log_of(store: Path) -> Path:
    (folder,) = store.glob("**/commitlog")
    return folder


def read_threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def middle_ms(broker: InProcessBroker) -> int:
    """Advance the broker's clock; the time before messages that are sent from now on."""
    broker.clock.advance(seconds=10)
    return broker.clock.now_ms()


def test_rows_are_those_of_the_spark_source(broker: InProcessBroker, store: Path) -> None:
    send(broker, 500)
    early = middle_ms(broker)
    send(broker, 500)
    late = middle_ms(broker)
    send(broker, 100)
    name = broker.messages("orders")[0].broker_name
    offsets = {"orders": {name: {"0": 10, "1": -2, "2": 150}}}
    log = {"mode": "log", "path": log_of(store).parent}
    choices: list[dict[str, Any]] = [
        {"subscribe": "orders"},
        {"subscribe": "orders", "columns": "*"},
        {"subscribe": "orders", "tags": "a || c"},
        {"subscribe": "orders", "startingTimestamp": early, "endingTimestamp": late},
        {"subscribe": "orders", "startingOffsets": offsets},
        {"assign": {"orders": {name: [0, 2]}}},
        {"subscribePattern": "ord.*"},
        {**log, "subscribe": "orders"},
        {**log, "tags": "b", "columns": "*", "brokerName": name},
        {**log, "subscribe": "orders", "startingTimestamp": early},
    ]
    for choice in choices:
        options = choice if "mode" in choice else choice | {"nameserver": broker.address}
        table = penstock.arrow.read(**options)
        wanted = spark_rows(**{name: _text(name, value) for name, value in options.items()})
        assert table.num_rows > 100
        assert by_place(table.to_pylist()) == by_place(wanted), choice
        assert table.schema.names == list(FIELDS if "columns" in choice else DEFAULT_COLUMNS)


def test_rows_of_a_queue_are_in_order_and_become_a_pandas_frame(broker: InProcessBroker) -> None:
    send(broker, 300)
    table = penstock.arrow.read(
        "orders", nameserver=broker.address, columns=["queue_id", "queue_offset", "body"]
    )
    assert table.to_pylist() == sorted(table.to_pylist(), key=lambda r: tuple(r.values())[:2])
    frame = table.to_pandas()
    assert sorted(int(body) for body in frame["body"]) == list(range(300))


def test_the_end_is_fixed_when_the_reader_is_opened(broker: InProcessBroker) -> None:
    send(broker, 50)
    reader = penstock.arrow.open_reader("orders", nameserver=broker.address)
    send(broker, 70)
    assert reader.read_all().num_rows == 50
    assert penstock.arrow.read("orders", nameserver=broker.address).num_rows == 120


def test_empty_topic_is_an_empty_table(broker: InProcessBroker, store: Path) -> None:
    table = penstock.arrow.read("orders", nameserver=broker.address, columns="body,date")
    assert table.num_rows == 0
    assert table.schema.names == ["body", "date"]
    files = penstock.arrow.read("orders", mode="log", path=log_of(store).parent)
    assert files.num_rows == 0


def test_unknown_topic_is_refused_at_once(broker: InProcessBroker) -> None:
    with pytest.raises(NoRoute, match=r"no broker has the topic 'ordesr'.*similar topics: orders"):
        penstock.arrow.open_reader("ordesr", nameserver=broker.address)
    assert read_threads() == 0


def test_damaged_record_is_an_error_or_left_out(
    broker: InProcessBroker, store: Path, tmp_path: Path
) -> None:
    send(broker, 30)
    path = log_of(store).parent
    rows = penstock.arrow.read("orders", mode="log", path=path, columns="commit_log_offset")
    places = sorted(rows["commit_log_offset"].to_pylist())
    copy = tmp_path / "copy"
    shutil.copytree(path / "commitlog", copy)
    with (copy / ("0" * 20)).open("r+b") as file:
        file.seek(places[4] + 95)  # in the body
        file.write(b"\xff")
    damaged = {"mode": "log", "path": str(copy)}
    with pytest.raises(DataLost, match=f"log offset {places[4]} to {places[5] - 1}"):
        penstock.arrow.read(**damaged)  # type: ignore[arg-type]
    with pytest.raises(DataLost, match=f"log offset {places[4]} to {places[5] - 1}"):
        spark_rows(**damaged)
    kept = penstock.arrow.read(**damaged, failOnDataLoss=False)  # type: ignore[arg-type]
    assert kept.num_rows == 29
    assert by_place(kept.to_pylist()) == by_place(spark_rows(**damaged, failOnDataLoss="false"))


def test_damaged_body_from_a_broker_is_an_error_or_left_out(store: Path) -> None:
    settings = {"store.check_cold_reads": False}
    with InProcessBroker(settings, data=store) as broker:
        broker.create_topic("orders", queues=1)
        send(broker, 30)
        with (log_of(store) / ("0" * 20)).open("r+b") as file:
            data = file.read(100_000)
            file.seek(data.index(b"12".rjust(20)))
            file.write(b"!")
        reads = {"subscribe": "orders", "nameserver": broker.address}
        lost = "orders, broker .*, queue 0: offset 12: the body does not match its CRC"
        with pytest.raises(DataLost, match=lost):
            penstock.arrow.read(**reads)  # type: ignore[arg-type]
        with pytest.raises(DataLost, match=lost):
            spark_rows(**reads)
        kept = penstock.arrow.read(**reads, failOnDataLoss=False)  # type: ignore[arg-type]
        assert kept["queue_offset"].to_pylist() == [n for n in range(30) if n != 12]
        assert kept.to_pylist() == spark_rows(**reads, failOnDataLoss="false")
        unchecked = penstock.arrow.read(**reads, checkCrc=False)  # type: ignore[arg-type]
        assert unchecked.num_rows == 30
        assert unchecked.to_pylist() == spark_rows(**reads, checkCrc="false")
    close_worker_connections()


def test_lost_messages_are_an_error_that_stays(
    broker: InProcessBroker, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(broker, 3_000)
    reader = penstock.arrow.open_reader("orders", nameserver=broker.address)

    def lose(reader: range_reader.RangeReader, answer: object) -> int:
        raise DataLost("gone")

    reader.read_next_batch()
    monkeypatch.setattr(range_reader.RangeReader, "_decode", lose)
    with pytest.raises(DataLost, match="gone"):
        reader.read_all()
    with pytest.raises(ReadFailed, match="has failed before: gone"):
        reader.read_all()
    assert read_threads() == 0


def test_reader_holds_at_most_two_batches(broker: InProcessBroker, small_batches: None) -> None:
    send(broker, 3_000, size=10_000)
    before = pa.total_allocated_bytes()
    rows = 0
    peak = 0
    for batch in penstock.arrow.open_reader("orders", nameserver=broker.address):
        rows += batch.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
        assert batch.num_rows <= 100
    assert rows == 3_000
    assert peak < 8_000_000 < 3_000 * 10_000 / 3


def test_reader_that_is_not_read_to_its_end_ends_its_thread(
    broker: InProcessBroker, small_batches: None
) -> None:
    send(broker, 1_000)
    unread = penstock.arrow.open_reader("orders", nameserver=broker.address)
    begun = penstock.arrow.open_reader("orders", nameserver=broker.address)
    begun.read_next_batch()
    assert read_threads() == 2
    del unread, begun
    gc.collect()
    assert read_threads() == 0


def test_an_event_loop_is_not_blocked(broker: InProcessBroker) -> None:
    send(broker, 10)

    async def body() -> int:
        with pytest.raises(BlockingInLoop, match="an event loop runs") as caught:
            penstock.arrow.read("orders", nameserver=broker.address)
        assert "asyncio.to_thread" in caught.value.hint
        read = partial(penstock.arrow.read, "orders", nameserver=broker.address)
        return (await asyncio.to_thread(read)).num_rows

    assert asyncio.run(body()) == 10


def test_topics_are_named_without_the_namespace(broker: InProcessBroker) -> None:
    broker.create_topic("shop%orders", queues=1)
    send(broker, 5, topic="shop%orders")
    table = penstock.arrow.read(
        "orders", nameserver=broker.address, namespace="shop", columns="topic"
    )
    assert table["topic"].to_pylist() == ["orders"] * 5


def test_the_examples_of_the_page_run(
    broker: InProcessBroker, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one namespace, in the order of the page."""
    with Producer(broker.address, group="P") as producer:
        for tag in ("paid", "paid", "shipped", "new"):
            producer.send(Message("orders", b"{}", tag))
    name = broker.messages("orders")[0].broker_name
    places = {
        "localhost:9876": broker.address,
        "penstock-data/broker-a": str(log_of(store).parent),
        '{"broker-a"': f'{{"{name}"',
    }
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for shown, here in places.items():
            block = block.replace(shown, here)
        exec(compile(block, "docs/arrow.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "4 ['topic', 'broker'" in printed
    assert "2 orders are paid" in printed
    assert printed.splitlines()[-1].startswith("3 ")
