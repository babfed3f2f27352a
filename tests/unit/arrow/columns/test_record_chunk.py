"""Compares rows of plain records that are added in chunks with rows added one by one.

A single record takes the slow path, because the fast path needs bytes after a record.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.arrow.columns.column_builder import (
    BAD,
    CUT,
    DONE,
    FULL,
    ColumnBuilder,
    LogFilter,
    is_user_topic,
)
from penstock.arrow.columns.record_chunk import ROWS
from penstock.arrow.message_schema import DEFAULT_COLUMNS, FIELDS, stored_columns
from penstock.wire import octets
from penstock.wire.compression import Compression, compress
from tests.unit.arrow.columns.test_column_builder import ALL, EVER, log_of, rows_of, wrapped
from tests.unit.client.consumer.consumer_kit import record

LONG = "a" * 8, "z" * 8  # names that differ only between their ends
BODIES = st.sampled_from([b"", b"x", b"y" * 31, b"x" * 32, b"y" * 33, b"x" * 512, b"y" * 700])
NAMES = st.sampled_from(
    [
        "TAGS", "KEYS", "UNIQ_KEY", "WAIT", "TAGSX", "UNIQ_KEYS", "DELAY", "DELAYED", "TIMER_DE",
        "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "__transactionId__", "__transa", "Ä",
        LONG[0] + LONG[1], LONG[0] + "b" + LONG[1], LONG[0] + "c" + LONG[1],
    ]
)  # fmt: skip
VALUES = st.sampled_from(["a", "b", "5", "1700000000000", "v" * 32, "w" * 33, "ö", "1\x015"])
PROPERTIES = st.dictionaries(NAMES, VALUES, max_size=7)
TEXTS = st.sampled_from(
    [
        b"", b"TAGS\x01a\x02TAGS\x01b\x02", b"TAGS\x01a\x02KEYS\x01k", b"\x01a\x02KEYS\x01k\x02",
        b"TAGS\x01\x02KEYS\x01k\x02", b"\x02KEYS\x01k\x02\x02", b"no mark", b"\xff\x01a\x02",
        b"aaaaaaaabzzzzzzzz\x011\x02aaaaaaaabzzzzzzzz\x012\x02",
        b"".join(b"n%d\x01v\x02" % n for n in range(32)),
        b"".join(b"n%d\x01v\x02" % n for n in range(33)),
        b"".join(b"n%d\x01v\x02" % n for n in range(31)) + b"n31\x01v",
    ]
)  # fmt: skip
KINDS = st.one_of(
    st.fixed_dictionaries(
        {"body": BODIES, "properties": PROPERTIES},
        optional={
            "topic": st.sampled_from(["Orders", "Others", "Bestellungen-Ä", "T" * 200]),
            "born_host": st.just("[2001:db8::1]:54321"),
            "store_host": st.just("[2001:db8::2]:10911"),
            "sys_flag": st.sampled_from([4, 8, 12]),
            "reconsume_times": st.just(-3),
        },
    ),
    st.fixed_dictionaries({"body": BODIES, "text": TEXTS}),
    st.just({"body": compress(b"packed " * 20, Compression.ZLIB), "sys_flag": 1}),
)
RECORDS = st.lists(st.tuples(KINDS, st.integers(1, 9)), max_size=12).map(
    lambda kinds: [kind for kind, times in kinds for _ in range(times)]
)

Step = Callable[[ColumnBuilder, int], int]


def plain(offset: int, **fields: Any) -> bytes:
    properties = {"UNIQ_KEY": f"{offset:032X}", "WAIT": "true", "TAGS": "a", "KEYS": f"{offset}"}
    return record(offset, **{"properties": properties, "body": b"x" * 128, **fields})


def batches_of(builder: ColumnBuilder, step: Step, end: int) -> list[pa.RecordBatch]:
    """All rows, in batches as the builder fills them."""
    taken, at = [], 0
    while at < end:
        why = step(builder, at)
        assert why in (DONE, FULL), builder.problem
        at = builder.position
        if why == FULL:
            taken.append(builder.take())
    taken.append(builder.take())
    return taken


def comparable(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows, with timestamps as integers: some are beyond Python's datetime."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    return rows_of(pa.RecordBatch.from_arrays(columns, names=batch.schema.names))


def both_ways(
    columns: Sequence[str],
    records: Sequence[bytes],
    *,
    log: LogFilter | None = None,
    tags: frozenset[bytes] | None = None,
    topic: str | None = None,
    **limits: int,
) -> list[pa.RecordBatch]:
    """The batches; checks that adding all records at once or one by one gives the same."""
    data = log_of(*records) if log else b"".join(records)
    ends = [0]
    for one in records:
        ends.append(ends[-1] + len(one))
    following = dict(pairwise(ends))

    def add(builder: ColumnBuilder, at: int, end: int) -> int:
        if log is not None:
            return builder.add_log(data, at, end, limit=end, log_offset=0, wanted=log)
        first = builder.offset
        return builder.add_answer(data, at, end, first=first, until=EVER, tags=tags)

    def build(step: Step) -> list[pa.RecordBatch]:
        builder = ColumnBuilder(columns, broker="broker-a", topic=topic, **limits)
        return batches_of(builder, step, len(data))

    at_once = build(lambda builder, at: add(builder, at, len(data)))
    one_by_one = build(lambda builder, at: add(builder, at, following[at]))
    assert list(map(comparable, at_once)) == list(map(comparable, one_by_one))
    for batch, other in zip(at_once, one_by_one, strict=True):
        assert [column.null_count for column in batch] == [column.null_count for column in other]
    return at_once


@given(
    kinds=RECORDS,
    columns=st.one_of(
        st.sampled_from([ALL, DEFAULT_COLUMNS]),
        st.sets(st.sampled_from(ALL), min_size=1).map(tuple),
    ),
    tags=st.sampled_from([None, frozenset([b"a"]), frozenset([b"b", b"v" * 32, b""])]),
    topic=st.sampled_from([None, "Mine"]),
    rows_max=st.integers(1, 40),
    bytes_max=st.integers(1, 20_000),
    in_log=st.booleans(),
)
@example([{"properties": {}}] * 3, DEFAULT_COLUMNS, None, None, 9, 9999, False)
def test_chunked_rows_equal_single_rows(
    kinds: list[dict[str, Any]],
    columns: tuple[str, ...],
    tags: frozenset[bytes] | None,
    topic: str | None,
    rows_max: int,
    bytes_max: int,
    in_log: bool,
) -> None:
    records = [record(number, **kind) for number, kind in enumerate(kinds)]
    log = LogFilter(is_user_topic, tags=tags, check_crc=True) if in_log else None
    both_ways(
        columns, records, log=log, tags=tags, topic=topic, rows_max=rows_max, bytes_max=bytes_max
    )


@pytest.mark.parametrize("columns", [ALL, DEFAULT_COLUMNS])
def test_batch_spans_several_chunks(columns: tuple[str, ...]) -> None:
    records = [plain(n) for n in range(3 * ROWS + 5)]
    for at in (0, 1, ROWS - 1, ROWS, 2 * ROWS + 1):
        records[at] = plain(at, properties={"WAIT": "true"})
    records[ROWS + 7] = plain(ROWS + 7, properties={"DELAY": "3", "TAGS": "late"})
    (batch,) = both_ways(columns, records)
    assert batch.num_rows == len(records)
    assert batch.column("tags").null_count == 5
    assert batch.column("delay_level").null_count == len(records) - 1


def test_more_properties_than_a_chunk_holds() -> None:
    many = {f"name{n}": "v" for n in range(31)}
    (batch,) = both_ways(
        ("properties", "tags"), [record(n, properties=many) for n in range(2 * ROWS)]
    )
    assert batch.column("properties").to_pylist() == [list(many.items())] * (2 * ROWS)


@pytest.mark.parametrize(("rows_max", "full"), [(100, 7), (ROWS, 2), (ROWS + 1, 2), (300, 2)])
def test_batch_limit_inside_a_chunk(rows_max: int, full: int) -> None:
    records = [plain(n) for n in range(700)]
    log = LogFilter(is_user_topic)
    batches = both_ways(DEFAULT_COLUMNS, records, log=log, rows_max=rows_max)
    sizes = [batch.num_rows for batch in batches if batch.num_rows]
    assert sizes[:full] == [rows_max] * full
    assert sum(sizes) == 700
    by_bytes = both_ways(DEFAULT_COLUMNS, records, log=log, bytes_max=30_000)
    assert len({batch.num_rows for batch in by_bytes[:-1]}) <= 2


def test_bad_record_inside_a_chunk_is_reported() -> None:
    records = [plain(n) for n in range(40)]
    good = log_of(*records)
    begin, size = sum(map(len, records[:20])), len(records[20])
    for at, byte, resume in ((100, 0, begin + size), (7, 0, -1), (35, 9, -1), (87, 200, -1)):
        log = bytearray(good)
        log[begin + at] = byte
        builder = ColumnBuilder(DEFAULT_COLUMNS)
        wanted = LogFilter(is_user_topic, check_crc=True)
        why = builder.add_log(log, 0, len(log), limit=len(log), log_offset=0, wanted=wanted)
        assert (why, builder.position, builder.resume) == (BAD, begin, resume)
        assert [row["queue_offset"] for row in rows_of(builder.take())] == list(range(20))
        why = builder.add_log(
            log, begin + size, len(log), limit=len(log), log_offset=0, wanted=wanted
        )
        assert (why, builder.rows) == (DONE, 19)


def test_damaged_body_inside_a_chunk_of_a_pull_response_is_reported() -> None:
    records = [plain(n) for n in range(40)]
    begin, size = sum(map(len, records[:20])), len(records[20])
    data = bytearray(b"".join(records))
    data[begin + 100] ^= 1
    builder = ColumnBuilder(DEFAULT_COLUMNS)
    for at, why, rows in ((0, BAD, range(20)), (begin + size, DONE, range(21, 40))):
        added = builder.add_answer(data, at, len(data), first=0, until=EVER, check_crc=True)
        found = [row["queue_offset"] for row in rows_of(builder.take())]
        assert (added, found) == (why, list(rows))


def test_log_truncated_at_any_byte() -> None:
    records = [plain(n) for n in range(8)]
    data = log_of(*records)
    ends = [sum(map(len, records[: n + 1])) for n in range(8)]
    builder = ColumnBuilder(("queue_offset", "body", "properties"))
    for limit in range(len(data) + 1):
        whole = [end for end in ends if end <= limit]
        why = builder.add_log(
            data, 0, limit, limit=limit, log_offset=0, wanted=LogFilter(is_user_topic)
        )
        at_end = limit == max(whole, default=0)
        assert (why, builder.position) == (DONE if at_end else CUT, max(whole, default=0))
        assert builder.take().num_rows == len(whole)


def test_mixed_topics_are_filtered() -> None:
    topics = ["Orders", "Orders", "Bestellungen-Ä", "%RETRY%g", "Others"]
    records = [plain(n, topic=topics[n * n % 5]) for n in range(600)]
    for wanted in (is_user_topic, b"Others".__eq__, lambda topic: True):
        (batch,) = both_ways(ALL, records, log=LogFilter(wanted))
        rows = [n for n in range(600) if wanted(topics[n * n % 5].encode())]
        assert batch.column("queue_offset").to_pylist() == rows
        assert batch.column("topic").to_pylist() == [topics[n * n % 5] for n in rows]


def test_names_of_skipped_records_do_not_leak_into_rows() -> None:
    kinds = [
        {"TAGS": "a", "one": "1"}, {"TAGS": "b", "two": "2"}, {"TAGS": "a", "two": "2"},
        {"TAGS": "a"}, {"TAGS": "b"}, {"TAGS": "a", "one": "1"},
    ]  # fmt: skip
    for turn in range(len(kinds)):
        turned = kinds[turn:] + kinds[:turn]
        records = [record(n, properties=kind) for n, kind in enumerate(turned)]
        records += [plain(n) for n in range(6, 9)]
        (batch,) = both_ways(("properties",), records, tags=frozenset([b"a"]))
        wanted = [list(kind.items()) for kind in turned if kind["TAGS"] == "a"]
        assert batch.column("properties").to_pylist()[:4] == wanted


def test_names_that_are_a_prefix_of_other_names() -> None:
    more, fewer = b"TAGS\x01a\x02one\x011\x02", b"TAGS\x01a\x02"
    unwanted = more.replace(b"\x01a", b"\x01b")
    for texts in ((more, fewer, fewer), (fewer, more, more), (unwanted, fewer, more, more)):
        records = [record(n, text=text) for n, text in enumerate(texts)]
        both_ways(("properties",), records, tags=frozenset([b"a"]))


def test_names_of_a_record_that_left_the_fast_path_are_forgotten() -> None:
    texts = [b"x\x011\x02z\x012\x02", b"z\x011\x02no mark\x02", b"z\x011\x02z\x012\x02", b""]
    records = [record(n, text=text) for n, text in enumerate(texts)]
    (batch,) = both_ways(("properties",), records)
    assert batch.column("properties").to_pylist()[2] == [("z", "2")]


def test_long_names_that_differ_in_the_middle_are_distinct() -> None:
    names = [LONG[0] + middle + LONG[1] for middle in "bcbbc"]
    records = [record(n, properties={name: "v"}) for n, name in enumerate(names)]
    (batch,) = both_ways(("properties",), [*records, plain(5)])
    assert batch.column("properties").to_pylist()[:5] == [[(name, "v")] for name in names]


def test_unwritten_sector_inside_a_chunk_is_reported() -> None:
    one = record(0, b"x" * 300, properties={"a": "b" * 2000})
    log = bytearray(log_of(one, plain(1), plain(2)))
    log[512:1024] = bytes(512)
    for columns in (DEFAULT_COLUMNS, ("queue_offset",)):
        builder = ColumnBuilder(columns)
        why = builder.add_log(
            log, 0, len(log), limit=len(log), log_offset=0, wanted=LogFilter(is_user_topic)
        )
        assert (why, builder.position, builder.resume) == (BAD, 0, len(one))


def test_inner_batch_between_plain_records() -> None:
    records = [plain(0), plain(1), wrapped(2, "a", "b"), plain(4), plain(5), plain(6)]
    (batch,) = both_ways(stored_columns(list(FIELDS)), records)
    assert batch.column("queue_offset").to_pylist() == list(range(7))
    assert octets.is_ascii(batch.column("topic")[2].as_py().encode(), 0, 6)


def test_repeated_and_unwanted_offsets_are_skipped() -> None:
    data = b"".join(plain(n) for n in (1, 2, 3, 3, 2, 5, 6, 7, 8))
    builder = ColumnBuilder(("queue_offset", "topic"))
    why = builder.add_answer(data, 0, len(data), first=2, until=7)
    assert (why, builder.offset) == (DONE, 7)
    assert builder.take().column("queue_offset").to_pylist() == [2, 3, 5, 6]


@pytest.mark.slow
def test_nothing_after_the_end_is_read() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.unit.arrow.columns.read_past_end"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "nothing after" in done.stdout, done.stderr[-2000:]
