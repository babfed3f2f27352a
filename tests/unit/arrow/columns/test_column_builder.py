"""Records as Arrow columns, against the client's messages."""

import mmap
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.arrow.columns.column_builder import (
    BAD,
    BLANK,
    CUT,
    DONE,
    FULL,
    UNWRITTEN,
    ColumnBuilder,
    LogFilter,
    is_user_topic,
)
from penstock.arrow.columns.record_batch import COLUMN_BYTES_MAX, RowBatch
from penstock.arrow.columns.record_view import RecordView
from penstock.arrow.message_schema import (
    DEFAULT_COLUMNS,
    FIELDS,
    arrow_schema,
    stored_columns,
)
from penstock.client.received_message import BadRecord, ReceivedMessage, decode_records
from penstock.spark.spark_schema import spark_schema
from penstock.wire import octets
from penstock.wire.compression import Compression, compress, with_compression
from penstock.wire.layout import MAGIC_BLANK, body_at
from penstock.wire.message import encode_batch
from tests.unit.client.consumer.consumer_kit import record

ALL = stored_columns(list(FIELDS))
EVER = 2**62
WRAPPED = 0xC0
HOSTS = st.sampled_from(["10.1.2.3:54321", "255.0.0.9:0", "[2001:db8::1]:54321"])
NAMES = st.sampled_from(
    [b"TAGS", b"KEYS", b"UNIQ_KEY", b"__transactionId__", b"a", "Ä".encode(), b"TAGSX", b"\xff"]
)
PIECES = st.one_of(
    st.tuples(NAMES, st.just(b"\x01"), st.binary(max_size=40), st.just(b"\x02")).map(b"".join),
    st.binary(max_size=12),
)
TEXTS = st.one_of(
    st.lists(PIECES, max_size=6).map(b"".join),
    st.lists(st.integers(0, 60), max_size=60).map(
        lambda names: b"".join(b"name%d\x01%d\x02" % (name, at) for at, name in enumerate(names))
    ),
).map(lambda text: text.replace(b"\0", b"0"))


def time_of(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def row_of(message: ReceivedMessage, broker: str | None = "broker-a") -> dict[str, Any]:
    properties = message.properties
    return {
        "topic": message.stored_topic, "broker": broker, "queue_id": message.queue_id,
        "queue_offset": message.queue_offset, "message_id": message.message_id,
        "tags": message.tags, "keys": properties.get("KEYS"), "body": message.body,
        "properties": sorted(properties.items()), "born_timestamp": time_of(message.born_ms),
        "store_timestamp": time_of(message.store_ms), "reconsume_times": message.reconsume_times,
        "delay_level": None, "deliver_timestamp": None, "flag": message.flag,
        "sys_flag": message.sys_flag, "born_host": message.born_host,
        "store_host": message.store_host, "offset_id": message.offset_id,
        "commit_log_offset": message.physical_offset, "transaction_id": message.transaction_id,
    }  # fmt: skip


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        if "properties" in row:
            row["properties"] = sorted(row["properties"])
    return rows


def answer(
    data: bytes,
    *,
    columns: Sequence[str] = ALL,
    first: int = 0,
    until: int = EVER,
    tags: frozenset[bytes] | None = None,
    begin: int = 0,
    check_crc: bool = False,
) -> tuple[int, ColumnBuilder]:
    builder = ColumnBuilder(columns, broker="broker-a")
    why = builder.add_answer(
        data, begin, len(data), first=first, until=until, tags=tags, check_crc=check_crc
    )
    return why, builder


def offsets_of(builder: ColumnBuilder) -> list[int]:
    return [row["queue_offset"] for row in rows_of(builder.take())]


def log_of(*records: bytes, begin: int = 0) -> bytes:
    """The records as in a log, each with its log offset."""
    log = bytearray()
    for one in records:
        placed = bytearray(one)
        octets.put_i64(placed, 28, begin + len(log))
        log += placed
    return bytes(log)


def read_log(
    data: Any,
    begin: int = 0,
    end: int | None = None,
    *,
    limit: int | None = None,
    log_offset: int = 0,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    **fields: Any,
) -> tuple[int, ColumnBuilder]:
    builder = ColumnBuilder(columns)
    wanted = LogFilter(**{"topics": is_user_topic, **fields})
    limit = len(data) if limit is None else limit
    end = limit if end is None else end
    why = builder.add_log(data, begin, end, limit=limit, log_offset=log_offset, wanted=wanted)
    return why, builder


# --- the schema


@pytest.mark.parametrize("columns", [ALL, DEFAULT_COLUMNS, ("properties",), ("body", "topic")])
def test_arrow_and_spark_schemas_agree(columns: tuple[str, ...]) -> None:
    wanted = to_arrow_schema(spark_schema(columns), timezone="UTC")
    assert arrow_schema(columns).equals(wanted, check_metadata=True)
    _, builder = answer(record(0), columns=columns)
    assert builder.take().schema.equals(wanted, check_metadata=True)
    empty = builder.take()
    assert empty.num_rows == 0
    assert empty.schema.equals(wanted, check_metadata=True)


# --- values


@given(
    body=st.binary(max_size=80),
    text=TEXTS,
    topic=st.sampled_from(["Orders", "Bestellungen-Ä", "T" * 127, "%RETRY%" + "g" * 150]),
    born=HOSTS,
    store=HOSTS,
    offset=st.integers(0, 2**62 - 1),
    numbers=st.integers(-(2**31), 2**31 - 1),
    before=st.integers(0, 3),
)
@example(b"", b"TAGS\x01a\x02TAGS\x01b\x02", "Orders", "1.2.3.4:5", "1.2.3.4:5", 0, 0, 0)
@example(b"", b"\xff\x01a\x02\xfe\x01b\x02", "Orders", "1.2.3.4:5", "1.2.3.4:5", 0, 0, 1)
def test_every_column_equals_the_client_value(
    body: bytes,
    text: bytes,
    topic: str,
    born: str,
    store: str,
    offset: int,
    numbers: int,
    before: int,
) -> None:
    data = b"".join(record(n, properties={"a": "b"}) for n in range(before)) + record(
        offset + before, body, text=text, topic=topic, born_host=born, store_host=store,
        flag=numbers, queue_id=numbers, reconsume_times=numbers,
    )  # fmt: skip
    why, builder = answer(data)
    assert why == DONE
    assert builder.position == len(data)
    assert builder.offset == offset + before + 1
    size = builder.size
    assert size > sum(len(m.body) for m in decode_records(data, "b"))
    batch = builder.take()
    assert rows_of(batch) == [row_of(message) for message in decode_records(data, "b")]
    assert (builder.rows, builder.size) == (0, 0)
    assert batch.nbytes <= size + 4 * (len(ALL) + 3) + 8 * len(ALL)


@pytest.mark.parametrize("name", ALL)
def test_single_column_equals_the_client_value(name: str) -> None:
    data = b"".join(
        record(n, b"x" * n, properties={"TAGS": "t", "KEYS": None if n % 2 else "k"} if n else {})
        for n in range(5)
    )
    _, builder = answer(data, columns=(name,))
    rows = [{name: row_of(message)[name]} for message in decode_records(data, "b")]
    assert rows_of(builder.take()) == rows


def test_topic_and_broker_arguments_fill_their_columns() -> None:
    builder = ColumnBuilder(("broker", "topic"), topic="Mine")
    builder.add_answer(record(0), 0, len(record(0)), first=0, until=EVER)
    assert rows_of(builder.take()) == [{"broker": None, "topic": "Mine"}]


@pytest.mark.parametrize(
    ("properties", "level", "due_ms"),
    [
        ({"DELAY": "3"}, 3, None),
        ({"DELAY": "-1"}, -1, None),
        ({"DELAY": "three"}, None, None),
        ({"DELAY": "3000000000"}, None, None),
        ({"DELAY": "+"}, None, None),
        ({"TIMER_DELIVER_MS": "1700000005000"}, None, 1_700_000_005_000),
        ({"TIMER_DELAY_MS": "1500"}, None, 1_700_000_001_501),
        ({"TIMER_DELAY_SEC": "2", "TIMER_DELAY_MS": "9"}, None, 1_700_000_002_001),
        ({"TIMER_DELAY_MS": "9", "TIMER_DELAY_SEC": "2"}, None, 1_700_000_002_001),
        ({"TIMER_DELAY_MS": "9", "TIMER_DELIVER_MS": "77"}, None, 77),
        ({"TIMER_DELIVER_MS": "9223372036854775808"}, None, None),
        ({"TIMER_DELIVER_MS": "12345678901234567890"}, None, None),
        ({"TIMER_DELAY_MS": "soon"}, None, None),
    ],
)
def test_delay_properties_become_level_and_deliver_time(
    properties: dict[str, str], level: int | None, due_ms: int | None
) -> None:
    _, builder = answer(record(properties=properties))
    (row,) = rows_of(builder.take())
    assert row["delay_level"] == level
    assert row["deliver_timestamp"] == (None if due_ms is None else time_of(due_ms))


@pytest.mark.parametrize("number", ["9223372036854775807", "-9223372036854775807"])
def test_timestamps_out_of_range_are_clamped(number: str) -> None:
    _, builder = answer(record(properties={"TIMER_DELIVER_MS": number}, store_ms=int(number)))
    batch = builder.take()
    last = (2**63 - 1) // 1000 * 1000
    for name in ("deliver_timestamp", "store_timestamp"):
        (value,) = batch.column(name).cast(pa.int64()).to_pylist()
        assert value == (last if int(number) > 0 else -last)
    _, builder = answer(record(properties={"TIMER_DELAY_SEC": number}))
    assert builder.take().column("deliver_timestamp").null_count == 0


@pytest.mark.parametrize("kind", list(Compression))
def test_compressed_bodies_are_decompressed(kind: Compression) -> None:
    body = b"hello " * 50_000
    flag = with_compression(0, kind)
    data = record(0) + record(1, compress(body, kind), sys_flag=flag) + record(2)
    why, builder = answer(data)
    assert why == DONE
    assert [len(row["body"]) for row in rows_of(builder.take())] == [5, len(body), 5]


def test_body_that_can_not_be_decompressed_is_reported() -> None:
    data = record(0) + record(1, b"no zlib", sys_flag=1) + record(2)
    why, builder = answer(data)
    assert (why, builder.offset, builder.rows) == (BAD, 1, 1)
    assert "decompressed" in builder.problem
    at = builder.resume
    assert at == len(record(0)) + len(record(1, b"no zlib"))
    assert builder.add_answer(data, at, len(data), first=1, until=EVER) == DONE
    assert offsets_of(builder) == [0, 2]
    why, builder = answer(data, columns=("queue_offset",))
    assert offsets_of(builder) == [0, 1, 2]


# --- pull responses


def test_only_offsets_in_range_are_added_and_once() -> None:
    data = b"".join(record(n) for n in (3, 4, 4, 6, 5, 7, 9))
    why, builder = answer(data, first=4, until=9)
    assert (why, builder.offset) == (DONE, 9)
    assert offsets_of(builder) == [4, 6, 7]
    why, builder = answer(data, first=20)
    assert (why, builder.offset, builder.rows) == (DONE, 20, 0)
    assert answer(b"")[0] == DONE


def test_only_messages_with_wanted_tags_are_added() -> None:
    tags = ["a", "b", "", "ab", "a", "ä"]
    data = b"".join(
        record(n, properties={"TAGS": tag} if tag else {}) for n, tag in enumerate(tags)
    )
    why, builder = answer(data, tags=frozenset([b"a", "ä".encode(), b""]))
    assert (why, builder.offset) == (DONE, 6)
    assert offsets_of(builder) == [0, 4, 5]
    _, builder = answer(data, tags=frozenset([b"b"]), columns=("queue_offset",))
    assert offsets_of(builder) == [1]


@given(rows_max=st.integers(1, 7), bytes_max=st.integers(1, 3000), count=st.integers(0, 20))
def test_full_batches_hold_every_row_once(rows_max: int, bytes_max: int, count: int) -> None:
    data = b"".join(record(n, b"x" * (10 * n), properties={"k": "v" * n}) for n in range(count))
    builder = ColumnBuilder(ALL, broker="broker-a", rows_max=rows_max, bytes_max=bytes_max)
    batches: list[pa.RecordBatch] = []
    why = FULL
    while why == FULL:
        at, first = builder.position, builder.offset
        why = builder.add_answer(data, at, len(data), first=first, until=EVER)
        assert builder.rows <= rows_max
        batches.append(builder.take())
    assert why == DONE
    rows = [row for batch in batches for row in rows_of(batch)]
    assert rows == [row_of(message) for message in decode_records(data, "b")]


def test_batch_refuses_rows_beyond_the_offset_limit() -> None:
    batch, view, data = RowBatch(("body",), None, None), RecordView(), memoryview(record(0))
    view.bind(data)
    batch.bind(data)
    assert view.parse(0, len(data)) == 0
    assert batch.fits(2**31 - 1)
    assert batch.add(view)
    assert batch.fits(COLUMN_BYTES_MAX - batch.size)
    assert not batch.fits(COLUMN_BYTES_MAX - batch.size + 1)


def test_batches_are_independent_of_later_ones() -> None:
    kinds: list[dict[str, str | None]] = [{}, {"TAGS": "t", "KEYS": "some keys"}, {"DELAY": "2"}]
    data = b"".join(record(n, b"x" * (n % 300), properties=kinds[n % 3]) for n in range(3000))
    expected = [row_of(message) for message in decode_records(data, "b")]
    for row in expected[2::3]:
        row["delay_level"] = 2
    builder = ColumnBuilder(ALL, broker="broker-a")
    taken = []
    for _ in range(3):
        assert builder.add_answer(data, 0, len(data), first=0, until=EVER) == DONE
        taken.append(builder.take())
    for batch in taken:
        assert rows_of(batch) == expected


def test_nulls_may_start_late_and_values_may_start_late() -> None:
    tagged, plain = {"TAGS": "t"}, {"KEYS": "k"}
    data = b"".join(record(n, properties=tagged if n < 2000 else plain) for n in range(2500))
    _, builder = answer(data, columns=("tags", "keys"))
    batch = builder.take()
    batch.validate(full=True)
    assert batch.column("tags").null_count == 500
    assert batch.column("keys").to_pylist() == [None] * 2000 + ["k"] * 500


@given(st.data())
def test_damaged_pull_responses_are_reported(data: st.DataObject) -> None:
    whole = bytearray(b"".join(record(n, properties={"TAGS": "t"}) for n in range(4)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    builder = ColumnBuilder(ALL, broker="broker-a", rows_max=1000)
    at, reports = 0, 0
    while at >= 0:
        why = builder.add_answer(damaged, at, len(damaged), first=-(2**63), until=2**63 - 1)
        reports += why == BAD
        assert (why == BAD) == (builder.problem != "")
        at = builder.resume
        assert at == -1 or builder.position < at <= len(damaged)
    bad: list[BadRecord] = []
    messages = decode_records(damaged, "b", bad=bad)
    batch = builder.take()
    batch.validate(full=True)
    # The client reports a body that can't be decompressed only when it is read.
    assert batch.num_rows <= len(messages)
    assert reports >= len(bad)


def test_ranges_outside_the_data_are_refused() -> None:
    builder = ColumnBuilder(ALL)
    for begin, end in ((0, 6), (-1, 5), (4, 3)):
        with pytest.raises(ValueError, match="bytes"):
            builder.add_answer(b"12345", begin, end, first=0, until=1)


# --- batches inside a record


def wrapped(offset: int, *tags: str, sys_flag: int = WRAPPED, spoil: bytes = b"") -> bytes:
    inner = encode_batch((b"body %d" % n, n, {"TAGS": tag}) for n, tag in enumerate(tags)) + spoil
    if sys_flag & 1:
        inner = compress(inner, Compression.ZLIB)
    return record(offset, inner, sys_flag=sys_flag)


@pytest.mark.parametrize("sys_flag", [WRAPPED, WRAPPED | 1])
def test_inner_batch_becomes_rows(sys_flag: int) -> None:
    data = record(0) + wrapped(1, "a", "b", "a", sys_flag=sys_flag) + record(4)
    why, builder = answer(data)
    assert (why, builder.offset) == (DONE, 5)
    assert rows_of(builder.take()) == [row_of(message) for message in decode_records(data, "b")]
    _, builder = answer(data, first=2, until=3)
    assert builder.offset == 3
    assert offsets_of(builder) == [2]
    _, builder = answer(data, tags=frozenset([b"a"]))
    assert offsets_of(builder) == [1, 3]
    _, builder = read_log(log_of(record(0), wrapped(1, "a", "b")), tags=frozenset([b"b"]))
    assert offsets_of(builder) == [2]


def test_broken_inner_batch_is_reported() -> None:
    data = wrapped(0, "a", "b", spoil=b"?") + record(2)
    why, builder = answer(data)
    assert (why, builder.offset) == (BAD, 2)
    assert builder.problem
    assert builder.add_answer(data, builder.resume, len(data), first=2, until=EVER) == DONE
    assert offsets_of(builder) == [0, 1, 2]
    why, builder = answer(record(0, b"no zlib", sys_flag=WRAPPED | 1))
    assert (why, builder.rows) == (BAD, 0)


# --- the CRC in pull responses

SHORT = compress(b"hello" * 20, Compression.ZLIB)


@pytest.mark.parametrize("columns", [ALL, ("queue_offset",), ("queue_offset", "body")])
@pytest.mark.parametrize(
    "victim",
    [
        record(1),
        record(1, SHORT, sys_flag=1),
        wrapped(1, "a"),
        wrapped(1, "a", sys_flag=WRAPPED | 1),
    ],
    ids=["plain", "compressed", "batch", "compressed batch"],
)
def test_body_of_a_pull_response_is_checked_as_it_is_stored(
    victim: bytes, columns: Sequence[str]
) -> None:
    good = record(0) + victim + record(2)
    why, builder = answer(good, columns=columns, check_crc=True)
    assert (why, offsets_of(builder)) == (DONE, [0, 1, 2])
    size = len(record(0))
    bad = bytearray(good)
    bad[size + body_at(0) + 3] ^= 1
    why, builder = answer(bytes(bad), columns=columns, check_crc=True)
    assert (why, builder.offset, builder.resume) == (BAD, 1, size + len(victim))
    assert builder.problem == "the body does not match its CRC"
    why = builder.add_answer(
        bytes(bad), builder.resume, len(bad), first=builder.offset, until=EVER, check_crc=True
    )
    assert (why, offsets_of(builder)) == (DONE, [0, 2])


# --- the log


def test_slice_takes_records_that_start_in_it() -> None:
    records = [record(n, b"x" * n) for n in range(6)]
    data = log_of(*records, begin=5000)
    ends = [sum(map(len, records[: n + 1])) for n in range(6)]
    for cut in range(1, len(data)):
        why, builder = read_log(data, 0, cut, log_offset=5000)
        assert why == DONE
        below = [n for n in range(6) if ends[n] - len(records[n]) < cut]
        assert builder.position == ends[below[-1]]
        assert offsets_of(builder) == below


def test_log_records_become_rows_except_half_messages() -> None:
    records = [
        record(n, properties={"UNIQ_KEY": f"id{n}"}, sys_flag=kind, store_ms=1000 + n)
        for n, kind in enumerate((0, 4, 8, 12))
    ]
    data = log_of(*records)
    why, builder = read_log(data, columns=ALL, check_crc=True)
    assert why == DONE
    expected = [row_of(message, None) for message in decode_records(data, "b")]
    assert rows_of(builder.take()) == [expected[0], expected[2]]
    assert offsets_of(read_log(data, first_ms=1001)[1]) == [2]
    assert offsets_of(read_log(data, until_ms=1002)[1]) == [0]


def test_log_filter_selects_topics() -> None:
    topics = [
        "A",
        "B",
        "SCHEDULE_TOPIC_XXXX",
        "A",
        "%RETRY%g",
        "rmq_sys_wheel_timer",
        "C",
        "%DLQ%g",
    ]
    data = log_of(*(record(n, topic=topic) for n, topic in enumerate(topics)))
    assert offsets_of(read_log(data)[1]) == [0, 1, 3, 6]
    chosen = frozenset([b"A", b"%DLQ%g"]).__contains__
    assert offsets_of(read_log(data, topics=chosen)[1]) == [0, 3, 7]
    builder = ColumnBuilder(("topic",))
    for name in (b"A", b"B", b"A"):
        wanted = LogFilter(name.__eq__)
        builder.add_log(data, 0, len(data), limit=len(data), log_offset=0, wanted=wanted)
        assert {row["topic"] for row in rows_of(builder.take())} == {name.decode()}


def test_alternating_topics_are_filtered() -> None:
    names = [f"Topic{n}" for n in range(700)]
    data = log_of(*(record(n, topic=name) for n, name in enumerate(names + names)))
    _, builder = read_log(data, topics=lambda topic: topic.endswith(b"7"))
    rows = rows_of(builder.take())
    assert [row["topic"] for row in rows] == 2 * [name for name in names if name.endswith("7")]


def test_end_of_log_is_recognised() -> None:
    records = [record(n) for n in range(3)]
    data = log_of(*records)
    end = len(data)
    blank = bytearray(8)
    octets.put_i32(blank, 0, 8)
    octets.put_i32(blank, 4, MAGIC_BLANK)
    for rest, expected in ((blank, BLANK), (bytes(9), UNWRITTEN), (b"\x00\x01\x02", CUT)):
        why, builder = read_log(data + rest)
        assert (why, builder.position, builder.rows) == (expected, end, 3)
    for limit in range(end - len(records[2]) + 1, end):
        why, builder = read_log(data, limit=limit)
        assert (why, builder.position, builder.rows) == (CUT, end - len(records[2]), 2)


def test_damaged_log_records_are_reported() -> None:
    records = [record(n, properties={"a": "b" * 20}) for n in range(3)]
    size = len(records[0])
    good = log_of(*records)

    def damaged(at: int, byte: int) -> bytes:
        spoiled = bytearray(good)
        spoiled[size + at] = byte
        return bytes(spoiled)

    body = damaged(88, 0)
    assert read_log(body)[0] == DONE
    why, builder = read_log(body, check_crc=True)
    assert (why, builder.position, builder.resume) == (BAD, size, 2 * size)
    assert "CRC" in builder.problem
    assert read_log(body, check_crc=True, topics=b"Other".__eq__)[0] == DONE
    for at, byte in ((7, 0), (35, 9), (87, 200)):
        why, builder = read_log(damaged(at, byte))
        assert (why, builder.position, builder.resume) == (BAD, size, -1)
        assert builder.problem


def test_unwritten_sector_is_reported() -> None:
    one = record(0, b"x" * 300, properties={"a": "b" * 2000}, topic="Orders")
    torn = bytearray(log_of(one, record(1)))
    torn[512:1024] = bytes(512)
    why, builder = read_log(torn)
    assert (why, builder.position, builder.resume) == (BAD, 0, len(one))
    assert "sector" in builder.problem
    text = b"a\x01\0b\x02"  # as Apache's brokers store it
    plain = bytearray(record(0, text=b"a\x010b\x02"))
    plain[len(plain) - len(text) :] = text
    why, builder = read_log(log_of(bytes(plain)))
    assert (why, builder.rows) == (DONE, 1)
    plain[88] ^= 1  # a body that is not checked
    why, builder = read_log(log_of(bytes(plain)))
    assert (why, builder.rows, builder.problem) == (DONE, 1, "")
    assert read_log(log_of(bytes(plain)), check_crc=True)[0] == BAD


def test_mapped_file_can_be_closed_after_reading() -> None:
    data = log_of(*(record(n) for n in range(10)))
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            why, builder = read_log(view)
            assert why == DONE
    assert offsets_of(builder) == list(range(10))


@given(st.data())
def test_damaged_logs_never_crash_the_builder(data: st.DataObject) -> None:
    records = [record(n, properties={"TAGS": "t"}) for n in range(4)]
    whole = bytearray(log_of(*records))
    starts = [n * len(records[0]) for n in range(4)]
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    builder = ColumnBuilder(ALL)
    wanted = LogFilter(lambda topic: True, check_crc=data.draw(st.booleans()))
    end = len(whole)
    at = 0
    while 0 <= at < end:
        why = builder.add_log(whole, at, end, limit=end, log_offset=0, wanted=wanted)
        if why == DONE:
            assert builder.position == end
            break
        at = builder.resume
        if at < 0:  # as a caller that knows where the next record starts
            at = next((start for start in starts if start > builder.position), -1)
    builder.take().validate(full=True)
