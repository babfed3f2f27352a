"""Rows of DataFrames as messages: columns, types, refusals."""

import datetime as dt
import pickle
from typing import Any

import pyarrow as pa
import pytest

from penstock.arrow.message_schema import FIELDS
from penstock.errors import BadSetting, RowRefused
from penstock.spark.sink.row_messages import DROPPED_PROPERTIES, RowMessage, RowPlan, RowReader

NOW_MS = 1_700_000_000_000
MAP = pa.map_(pa.string(), pa.string())
KINDS = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": MAP,
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def read(
    columns: dict[str, tuple[str, list[Any]]],
    *,
    topic: str | None = None,
    start: int = 0,
    own: dict[str, str] | None = None,
    bytes_max: int = 1_000,
    allow_delays: bool = True,
) -> list[RowMessage]:
    """Messages of columns given as (Spark type, values); `start` rows were read before."""
    plan = RowPlan.of([(name, kind) for name, (kind, _) in columns.items()], topic)
    reader = RowReader(
        pickle.loads(pickle.dumps(plan)), partition=3, properties=own or {},
        message_bytes_max=bytes_max, now_ms=NOW_MS, allow_delays=allow_delays,
    )  # fmt: skip
    reader.rows = start
    arrays = [pa.array(values, KINDS[kind]) for kind, values in columns.values()]
    return reader.read(pa.RecordBatch.from_arrays(arrays, names=list(columns)))


def test_row_becomes_a_message_with_all_parts() -> None:
    rows = read(
        {
            "topic": ("string", ["t1", "t2"]),
            "body": ("binary", [b"\x00\xff", b"b"]),
            "tags": ("string", ["vip", None]),
            "keys": ("array<string>", [["k1", None, "", "k2"], None]),
            "properties": ("map<string,string>", [[("a", "1"), ("b", "2")], None]),
            "queue_key": ("bigint", [42, None]),
            "flag": ("int", [7, None]),
        },
        start=10,
    )
    first, second = rows
    assert (first.row, second.row) == (10, 11)
    assert first.message.topic == "t1"
    assert first.message.body == b"\x00\xff"
    assert first.message.tags == "vip"
    assert list(first.message.keys) == ["k1", "k2"]
    assert first.message.properties == {"a": "1", "b": "2"}
    assert (first.message.flag, first.queue_key) == (7, "42")
    assert second.message.topic == "t2"
    assert second.message.tags is None
    assert list(second.message.keys) == []
    assert second.message.properties == {}
    assert (second.message.flag, second.queue_key) == (0, None)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_body_may_be_text_or_bytes_under_both_names(kind: pa.DataType) -> None:
    for name in ("body", "VALUE"):
        spark = "binary" if "binary" in str(kind) else "string"
        plan = RowPlan.of([(name, spark)], "t")
        reader = RowReader(plan, partition=0, properties={}, message_bytes_max=9, now_ms=NOW_MS)
        values = ["ü", "b"] if spark == "string" else ["ü".encode(), b"b"]
        batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], names=[name])
        assert [row.message.body for row in reader.read(batch)] == ["ü".encode(), b"b"]


def test_keys_as_text_are_unchanged() -> None:
    rows = read({"body": ("string", ["a", "b"]), "keys": ("string", ["k1 k2", ""])}, topic="t")
    assert [list(row.message.keys) for row in rows] == [["k1 k2"], []]


def test_topic_option_overrides_the_column() -> None:
    rows = read({"topic": ("string", ["x", None]), "body": ("string", ["a", "b"])}, topic="t")
    assert [row.message.topic for row in rows] == ["t", "t"]


def test_slices_of_batches_keep_their_properties() -> None:
    plan = RowPlan.of([("body", "string"), ("properties", "map<string,string>")], "t")
    reader = RowReader(plan, partition=0, properties={}, message_bytes_max=9, now_ms=NOW_MS)
    maps = pa.array([[("n", str(n))] * 1 for n in range(6)], MAP)
    batch = pa.RecordBatch.from_arrays(
        [pa.array([str(n) for n in range(6)]), maps], names=["body", "properties"]
    )
    rows = [*reader.read(batch.slice(2, 3)), *reader.read(batch.slice(5))]
    assert [row.message.properties for row in rows] == [{"n": str(n)} for n in (2, 3, 4, 5)]
    assert [row.row for row in rows] == [0, 1, 2, 3]


def test_internal_properties_are_not_sent_again() -> None:
    reserved = sorted(DROPPED_PROPERTIES)
    pairs = [(name, "x") for name in (*reserved, "__RMQ.TRANSIENT.a", "mine")]
    own = {"PENSTOCK_SINK": "s", "PENSTOCK_BATCH": "4"}
    rows = read(
        {
            "body": ("string", ["a", "b", "c"]),
            "properties": ("map<string,string>", [pairs, [("n", None), ("e", "")], None]),
        },
        topic="t",
        own=own,
    )
    assert [row.message.properties for row in rows] == [{"mine": "x", **own}, own, own]


def test_sink_properties_override_those_of_rows() -> None:
    own = {"PENSTOCK_SINK": "s"}
    rows = read({"body": ("string", ["a"])}, topic="t", own=own)
    assert rows[0].message.properties == own


# --- time ----------------------------------------------------------------------------------------


def moment(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def test_each_row_may_have_another_kind_of_delay() -> None:
    rows = read(
        {
            "body": ("string", ["a", "b", "c", "d", "e"]),
            "delay_level": ("int", [3, 0, None, None, None]),
            "delay_ms": ("bigint", [None, 1_500, None, 0, None]),
            "deliver_timestamp": (
                "timestamp",
                [None, None, moment(NOW_MS + 5), moment(NOW_MS - 5), None],
            ),
        },
        topic="t",
    )
    messages = [row.message for row in rows]
    assert messages[0].delay_level == 3
    assert messages[1].delay == dt.timedelta(milliseconds=1_500)
    assert messages[2].deliver_at == moment(NOW_MS + 5)
    for message in messages[3:]:
        assert (message.delay_level, message.delay, message.deliver_at) == (0, None, None)


def test_two_delays_and_delays_in_transactions_are_refused() -> None:
    columns: dict[str, tuple[str, list[Any]]] = {
        "body": ("string", ["a", "b"]),
        "delay_level": ("int", [None, 2]),
        "delay_ms": ("bigint", [None, 5]),
    }
    with pytest.raises(RowRefused, match=r"row 1 of partition 3: .*more than one delay"):
        read(columns, topic="t")
    columns["delay_ms"] = ("bigint", [None, None])
    with pytest.raises(RowRefused, match=r"row 1 of partition 3: .*transactional"):
        read(columns, topic="t", allow_delays=False)
    columns["delay_level"] = ("int", [0, None])
    assert len(read(columns, topic="t", allow_delays=False)) == 2


def test_delay_out_of_range_is_refused() -> None:
    columns: dict[str, tuple[str, list[Any]]] = {
        "body": ("string", ["a"]),
        "delay_ms": ("bigint", [2**62]),
    }
    with pytest.raises(RowRefused, match="too long"):
        read(columns, topic="t")


# --- rows that can't be messages -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "why"),
    [
        ("body", ["a", "b", None], "row 7 of partition 3: its body is null"),
        ("body", ["a", "", None], "row 7 of partition 3: its body is null"),
        ("body", ["a", "", "b"], "row 6 of partition 3: its body is empty"),
        ("body", ["a", "b" * 11, "c" * 12], "row 6 of partition 3: its body has 11 bytes, the"),
        ("topic", ["t", "t", None], "row 7 of partition 3: its topic is null"),
        ("topic", ["t", "a b", "t"], "row 6 of partition 3: the topic name 'a b' contains"),
        ("topic", ["t", "t", "SCHEDULE_TOPIC_XXXX"], "row 7 of partition 3: only brokers write"),
    ],
)
def test_refused_row_is_named(column: str, values: list[Any], why: str) -> None:
    columns: dict[str, tuple[str, list[Any]]] = {
        "topic": ("string", ["t"] * 3),
        "body": ("string", ["b"] * 3),
    }
    columns[column] = ("string", values)
    with pytest.raises(RowRefused) as caught:
        read(columns, start=5, bytes_max=10)
    assert str(caught.value).startswith(why)
    assert caught.value.hint
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- columns -------------------------------------------------------------------------------------


def test_all_columns_of_the_source_can_be_written() -> None:
    RowPlan.of([(name, kind) for name, (_, kind, _) in FIELDS.items()], None)


@pytest.mark.parametrize(
    ("columns", "topic", "why"),
    [
        ([("topic", "string")], None, "no column holds the body"),
        ([("body", "binary")], None, "no topic is named"),
        ([("body", "binary"), ("value", "string")], "t", "two columns hold the body"),
        ([("Body", "binary"), ("body", "binary")], "t", "two columns hold the body"),
        ([("body", "binary"), ("price", "double")], "t", "does not know the column 'price'"),
        ([("body", "struct<a:int>")], "t", "'body' is of type struct<a:int>"),
        ([("body", "binary"), ("keys", "array<int>")], "t", "'keys' is of type array<int>"),
        (
            [("body", "binary"), ("deliver_timestamp", "timestamp_ntz")],
            "t",
            "of type timestamp_ntz",
        ),
    ],
)
def test_bad_columns_are_refused_when_the_write_is_planned(
    columns: list[tuple[str, str]], topic: str | None, why: str
) -> None:
    with pytest.raises(BadSetting) as caught:
        RowPlan.of(columns, topic)
    assert why in str(caught.value)


def test_unknown_column_is_refused_with_a_list_of_columns() -> None:
    with pytest.raises(BadSetting) as caught:
        RowPlan.of([("body", "binary"), ("price", "double")], "t")
    for name in ("queue_key", "properties", "deliver_timestamp", "message_id"):
        assert name in caught.value.hint


def test_empty_batch_has_no_rows() -> None:
    assert read({"body": ("string", [])}, topic="t") == []
