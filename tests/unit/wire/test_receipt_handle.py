"""Receipts, the offsets of pop answers, retry topics and the records of the revive log.

The texts marked as Java's come from ExtraInfoUtil, PopCheckPoint, AckMsg and BatchAckMsg of
RocketMQ 5.4.0, written by fastjson2 as its broker writes them.
"""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BodyError, HeaderError
from penstock.wire import fastjson
from penstock.wire.bodies.pop_bodies import (
    AckMsg,
    BatchAckMsg,
    PopCheckPoint,
    decode_ack,
    decode_acks,
    decode_check_point,
)
from penstock.wire.receipt_handle import (
    OrderCounts,
    QueueKey,
    Receipt,
    RetryKind,
    format_message_offsets,
    format_order_counts,
    format_start_offsets,
    kind_of,
    parse_message_offsets,
    parse_order_counts,
    parse_receipt,
    parse_start_offsets,
    plain_topic,
    retry_topic,
    split_retry_topic,
)

JAVA_RECEIPT = "100 1700000000000 60000 3 2 b 2 105"
NORMAL_0 = QueueKey(RetryKind.NORMAL, 0)

longs = st.integers(min_value=0, max_value=2**63 - 1)
ints = st.integers(min_value=0, max_value=2**31 - 1)
kinds = st.sampled_from(RetryKind)
names = st.text(alphabet="abcXYZ019_-%|", min_size=1, max_size=20)
keys = st.builds(QueueKey, kinds, ints)


def test_a_receipt_handle_of_java_is_parsed() -> None:
    receipt = parse_receipt(JAVA_RECEIPT)
    assert receipt == Receipt(100, 1_700_000_000_000, 60_000, 3, RetryKind.V2, "b", 2, 105)
    assert receipt.format() == JAVA_RECEIPT
    assert receipt.visible_ms == 1_700_000_060_000
    assert not receipt.ordered
    assert parse_receipt("5 1 2 999 0 b 0 5").ordered


def test_a_receipt_handle_without_a_message_offset_is_parsed() -> None:
    receipt = parse_receipt("5 1 2 3 0 b 0")
    assert receipt.queue_offset is None
    assert receipt.format() == "5 1 2 3 0 b 0"


@given(st.builds(Receipt, longs, longs, longs, ints, kinds, names, ints, longs | st.none()))
def test_receipt_handles_round_trip(receipt: Receipt) -> None:
    assert parse_receipt(receipt.format()) == receipt


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 2 3 4 0 b",
        "-1 2 3 4 0 b 0 0",
        "x 2 3 4 0 b 0 0",
        "1 2 3 4 7 b 0 0",
        "1  2 3 4 0 b 0",
        "1 2 3 4 0 b 0 9223372036854775808",
        "1 2 3 2147483648 0 b 0 0",
        "1 2 3 4 0 b 2147483648 0",
        "1 2 3 4 0 b \u00b2 0",
        "1 2 3 4 0 b 0 " + "9" * 10_000,
    ],
)
def test_invalid_receipt_handles_are_refused(text: str) -> None:
    with pytest.raises(HeaderError):
        parse_receipt(text)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_receipt, parse_start_offsets, parse_message_offsets, parse_order_counts):
        with suppress(HeaderError):
            parse(text)


def test_offsets_are_written_as_by_java() -> None:
    starts = {NORMAL_0: 5, QueueKey(RetryKind.V1, 0): 6}
    assert format_start_offsets(starts) == "0 0 5;1 0 6"
    assert parse_start_offsets("0 0 5;1 0 6") == starts
    offsets = {NORMAL_0: [5, 7], QueueKey(RetryKind.V2, 1): [9]}
    assert format_message_offsets(offsets) == "0 0 5,7;2 1 9"
    assert parse_message_offsets("0 0 5,7;2 1 9") == offsets
    key = QueueKey(RetryKind.NORMAL, 3)
    text = "0 qo3%7 1;0 qo3%9 1;0 3 0"
    assert format_order_counts(key, 0, [(7, 1), (9, 1)]) == text
    assert parse_order_counts(text) == OrderCounts({key: 0}, {(key, 7): 1, (key, 9): 1})
    assert parse_start_offsets("") == {}


@given(st.dictionaries(keys, longs), st.dictionaries(keys, st.lists(longs, min_size=1)))
def test_offsets_round_trip(starts: dict[QueueKey, int], lists: dict[QueueKey, list[int]]) -> None:
    assert parse_start_offsets(format_start_offsets(starts)) == starts
    assert parse_message_offsets(format_message_offsets(lists)) == lists


def test_a_queue_occurs_once() -> None:
    with pytest.raises(HeaderError, match="twice"):
        parse_start_offsets("0 0 5;0 0 6")
    with pytest.raises(HeaderError, match="twice"):
        parse_order_counts("0 qo0%5 1;0 qo0%5 2")


def test_retry_topics_have_two_spellings() -> None:
    assert retry_topic("T", "g") == "%RETRY%g_T"
    assert retry_topic("T", "g", RetryKind.V2) == "%RETRY%g+T"
    assert retry_topic("T", "g", RetryKind.NORMAL) == "T"
    assert [kind_of(topic) for topic in ("T", "a+b", "%RETRY%g_T", "%RETRY%g+T", "%RETRY%g")] == [
        "0", "0", "1", "2", "1",
    ]  # fmt: skip
    assert plain_topic("%RETRY%g_T", "g") == plain_topic("%RETRY%g+T", "g") == "T"
    assert plain_topic("%RETRY%g", "g") == "%RETRY%g"
    assert plain_topic("%RETRY%other_T", "g") == "%RETRY%other_T"
    assert split_retry_topic("%RETRY%g+T") == ("g", "T")
    assert split_retry_topic("%RETRY%g_T") is None
    assert split_retry_topic("%RETRY%g+a+b") is None


@given(names, names, kinds)
def test_retry_topics_round_trip(topic: str, group: str, kind: RetryKind) -> None:
    spelled = retry_topic(topic, group, kind)
    if not topic.startswith("%RETRY%"):
        assert plain_topic(spelled, group) == topic
        assert kind_of(spelled) is kind
    if kind is RetryKind.V2:
        assert split_retry_topic(spelled) == (group, topic)


# --- the revive log ------------------------------------------------------------------------------

JAVA_CHECK_POINT = (
    b'{"bm":0,"bn":"b","c":"g","d":[0,1,5],"it":60000,"n":3,"pt":1700000000000,"q":2,'
    b'"reviveTime":1700000060000,"ro":7,"rp":"2","so":100,"t":"T"}'
)
JAVA_ACK = b'{"ao":105,"bn":"b","c":"g","pt":1700000000000,"q":2,"so":100,"t":"T"}'
JAVA_ACKS = (
    b'{"ao":0,"aol":[100,105],"bn":"b","c":"g","pt":1700000000000,"q":2,"so":100,"t":"T"}'
)  # fmt: skip


def test_a_checkpoint_of_java_is_decoded() -> None:
    point = decode_check_point(JAVA_CHECK_POINT)
    assert point == PopCheckPoint(
        start_offset=100, pop_time=1_700_000_000_000, invisible_time=60_000, num=3, queue_id=2,
        topic="T", consumer_group="g", revive_offset=7, offset_diffs=(0, 1, 5), broker_name="b",
        re_put_times="2",
    )  # fmt: skip
    assert point.revive_ms == 1_700_000_060_000
    assert list(point.offsets()) == [100, 101, 105]
    assert [point.index_of(offset) for offset in (100, 105, 102, 99)] == [0, 2, -1, -1]
    assert point.tries() == 2
    # Its revive time follows from the others, and Java does not read it.
    derived = b'"reviveTime":1700000060000,'
    assert fastjson.encode(point) == JAVA_CHECK_POINT.replace(derived, b"")


def test_a_checkpoint_without_distances_is_decoded() -> None:
    point = decode_check_point(b'{"so":5,"n":3,"rp":"x"}')
    assert list(point.offsets()) == [5, 6, 7]
    assert point.index_of(7) == 2
    assert point.tries() == 127


def test_acks_of_java_are_decoded() -> None:
    ack = decode_ack(JAVA_ACK)
    assert ack == AckMsg(
        ack_offset=105, start_offset=100, consumer_group="g", topic="T", queue_id=2,
        pop_time=1_700_000_000_000, broker_name="b",
    )  # fmt: skip
    assert fastjson.encode(ack) == JAVA_ACK
    acks = decode_acks(JAVA_ACKS)
    assert isinstance(acks, BatchAckMsg)
    assert acks.ack_offsets == (100, 105)
    assert fastjson.encode(acks) == JAVA_ACKS
    assert decode_ack(b'{"ackOffset":7,"startOffset":5,"consumerGroup":"g"}').ack_offset == 7
    assert decode_acks(b'{"ackOffsetList":[7],"startOffset":5}').ack_offsets == (7,)


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b'{"so":-1}', b'{"so":"x"}', b'{"q":1e99}'])
def test_invalid_checkpoints_and_acks_are_refused(data: bytes) -> None:
    for decode in (decode_check_point, decode_ack, decode_acks):
        with pytest.raises(BodyError):
            decode(data)
