"""Received messages: the lazy objects compared with the reference decoder."""

import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import received_message
from penstock.client.received_message import BadRecord, decode_records
from penstock.errors import CompressionError, RecordError
from penstock.wire.compression import Compression, compress, with_compression
from penstock.wire.message import decode_message, encode_batch
from tests.unit.client.consumer.consumer_kit import messages, record

HOSTS = ("10.1.2.3:54321", "[2001:db8::1]:54321")
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "a", "Ä", "TAG", "TAGSX", "XTAGS"])
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02\x00"), max_size=12)


@given(
    body=st.binary(max_size=40),
    properties=st.dictionaries(NAMES, VALUES),
    topic=st.sampled_from(["Orders", "T" * 127, "%RETRY%" + "g" * 150]),
    born=st.sampled_from(HOSTS),
    store=st.sampled_from(HOSTS),
    offset=st.integers(0, 2**62),
    flag=st.integers(-(2**31), 2**31 - 1),
)
def test_attributes_equal_those_of_the_reference_decoder(
    body: bytes, properties: dict[str, str], topic: str, born: str, store: str, offset: int,
    flag: int,
) -> None:  # fmt: skip
    data = record(
        offset, body, properties=properties, topic=topic, born_host=born, store_host=store,
        flag=flag,
    )  # fmt: skip
    plain = decode_message(data)
    (message,) = decode_records(data, "broker-a")
    for name in (
        "body", "properties", "tags", "keys", "message_id", "unique_id", "offset_id", "queue_id",
        "queue_offset", "physical_offset", "flag", "sys_flag", "born_ms", "born_host", "store_ms",
        "store_host", "reconsume_times", "prepared_offset", "size",
    ):  # fmt: skip
        assert getattr(message, name) == getattr(plain, name), name
    assert message.stored_topic == message.topic == topic
    assert (message.broker_name, message.queue.queue_id) == ("broker-a", 3)
    assert message.record == data


def test_properties_follow_javas_rules() -> None:
    text = b"TAGS\x01a\x02TAGS\x01\x02\x02\x01x\x02KEYS\x01k1 k2\x02"
    text += b"TAGS\x01b\x02TAGS\x01\x02XTAGS\x01c"
    (message,) = decode_records(record(text=text), "b")
    assert message.tags == "b"
    assert message.keys == ["k1", "k2"]
    assert message.properties == {"TAGS": "b", "KEYS": "k1 k2", "XTAGS": "c"}
    (message,) = decode_records(record(text=b"TAGS\x01first"), "b")
    assert message.tags == "first"
    assert message.unique_id is None
    assert message.keys == []


def test_length_byte_is_not_taken_for_a_separator() -> None:
    # The properties' length has 0x02 as its last byte.
    text = b"TAGS\x01" + b"x" * (0x102 - 5)
    (message,) = decode_records(record(text=text), "b")
    assert message.tags == "x" * (0x102 - 5)


def test_messages_are_filtered_by_tags() -> None:
    data = b"".join(
        record(n, properties={"TAGS": tag} if tag else {})
        for n, tag in enumerate(["a", "b", "", "ab", "a"])
    )
    wanted = decode_records(data, "b", tags=frozenset([b"a"]))
    assert [message.queue_offset for message in wanted] == [0, 4]


def test_names_have_no_namespace() -> None:
    properties = {"RETRY_TOPIC": "acme%Orders"}
    data = record(topic="%RETRY%acme%g", properties=properties, reconsume_times=2)
    (message,) = decode_records(data, "b", namespace="acme")
    assert message.topic == "Orders"
    assert message.stored_topic == "%RETRY%acme%g"
    assert message.queue.topic == "%RETRY%g"
    assert message.reconsume_times == 2
    message.local_retries += 1
    assert message.reconsume_times == 3
    (message,) = decode_records(record(topic="acme%Orders"), "b", namespace="acme")
    assert message.topic == message.queue.topic == "Orders"


@pytest.mark.parametrize("kind", list(Compression))
def test_bodies_are_decompressed(kind: Compression) -> None:
    packed = compress(b"x" * 5000, kind)
    (message,) = decode_records(record(body=packed, sys_flag=with_compression(0, kind)), "b")
    assert message.body == b"x" * 5000
    assert message.body is message.body
    assert message.stored_body == packed


@pytest.mark.slow
def test_decompression_bomb_is_refused() -> None:
    packed = zlib.compress(bytes(received_message.BODY_BYTES_MAX + 1))
    (message,) = decode_records(record(body=packed, sys_flag=1), "b")
    with pytest.raises(CompressionError):
        message.body  # noqa: B018
    (message,) = decode_records(record(body=b"no zlib", sys_flag=1), "b")
    with pytest.raises(CompressionError):
        message.body  # noqa: B018
    assert message.stored_body == b"no zlib"


def test_bad_records_are_skipped_if_their_size_is_plausible() -> None:
    good, later = record(1), record(3)
    middle = bytearray(record(2))
    middle[84:88] = (1 << 20).to_bytes(4, "big")  # the body's length
    magic = bytearray(record(2))
    magic[4:8] = b"xxxx"
    for broken in (middle, magic):
        data = good + bytes(broken) + later
        with pytest.raises(RecordError):
            decode_records(data, "b")
        bad: list[BadRecord] = []
        found = decode_records(data, "b", bad=bad)
        assert [message.queue_offset for message in found] == [1, 3]
        assert [(b.at, b.queue_offset, b.skipped) for b in bad] == [(len(good), 2, True)]


def test_a_body_that_does_not_match_its_crc_is_skipped() -> None:
    damaged = bytearray(record(2, b"body"))
    damaged[damaged.index(b"body")] ^= 1
    data = record(1) + bytes(damaged) + record(3)
    bad: list[BadRecord] = []
    found = decode_records(data, "b", bad=bad, check_crc=True)
    assert [message.queue_offset for message in found] == [1, 3]
    assert [(b.queue_offset, b.problem, b.skipped) for b in bad] == [
        (2, "its body does not match its CRC", True)
    ]
    with pytest.raises(RecordError, match="CRC"):
        decode_records(data, "b", check_crc=True)
    assert len(decode_records(data, "b")) == 3


@pytest.mark.parametrize("tail", [b"\0\0", bytes(8), b"\x7f" * 100, record(2)[:-1]])
def test_nothing_is_decoded_after_an_impossible_size(tail: bytes) -> None:
    bad: list[BadRecord] = []
    found = decode_records(record(1) + tail, "b", bad=bad)
    assert [message.queue_offset for message in found] == [1]
    assert not bad[-1].skipped


@given(st.binary(max_size=300), st.integers(0, 150), st.binary(max_size=8))
def test_arbitrary_bytes_are_decoded_or_refused(noise: bytes, at: int, patch: bytes) -> None:
    broken = bytearray(record(properties={"TAGS": "a"}))
    broken[at : at + len(patch)] = patch
    for data in (noise, bytes(broken), bytes(broken) + record(1)):
        for message in decode_records(data, "b", bad=[]):
            assert message.tags is None or message.properties
            assert len(message.stored_body) == message.body_length


def test_batch_stored_as_one_record_is_unwrapped() -> None:
    inner = encode_batch([(b"one", 5, {"TAGS": "a"}), (b"", 0, {}), (b"three", 6, {"TAGS": "b"})])
    sys_flag = with_compression(0xC0, Compression.ZLIB)
    data = record(10, compress(inner, Compression.ZLIB), sys_flag=sys_flag) + record(13)
    found = decode_records(data, "b", topic="Orders", received_ms=5)
    assert [m.queue_offset for m in found] == [10, 11, 12, 13]
    assert [m.body for m in found] == [b"one", b"", b"three", b"hello"]
    assert [m.flag for m in found] == [5, 0, 6, 0]
    assert {(m.born_host, m.topic, m.received_ms, m.sys_flag) for m in found[:3]} == {
        ("10.1.2.3:54321", "Orders", 5, 0)
    }
    only = decode_records(data, "b", tags=frozenset([b"b"]))
    assert [m.body for m in only] == [b"three"]
    bad: list[BadRecord] = []
    decode_records(record(1, inner[:-1], sys_flag=0xC0), "b", bad=bad)
    assert len(bad) == 1
    bad.clear()
    decode_records(record(1, b"no zlib", sys_flag=0xC1), "b", bad=bad)
    assert len(bad) == 1


def test_message_can_be_pickled() -> None:
    (message,) = messages(7, properties={"TAGS": "a"})
    copy = pickle.loads(pickle.dumps(message))
    assert (copy.topic, copy.tags, copy.queue_offset, copy.body) == ("Orders", "a", 7, b"7")
    assert "7" in repr(copy)
    assert "Orders" in repr(copy)


def test_messages_cannot_be_constructed() -> None:
    with pytest.raises(TypeError):
        received_message.ReceivedMessage()


def test_retry_sets_the_delay_level() -> None:
    (message,) = messages(1)
    assert message.retry_level is None
    message.retry(delay_level=4)
    assert message.retry_level == 4


def test_offsets_inside_a_batch_stay_within_64_bits() -> None:
    inner = encode_batch([(b"one", 0, {}), (b"two", 0, {})])
    bad: list[BadRecord] = []
    data = bytearray(record(0, inner, sys_flag=0xC0))
    data[20:28] = (2**63 - 1).to_bytes(8, "big")
    found = decode_records(bytes(data), "b", bad=bad)
    assert [m.body for m in found] == [b"one"]
    assert len(bad) == 1


def test_oversized_inner_batch_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_message, "BODY_BYTES_MAX", 10_000)
    many = encode_batch([(b"", 0, {})]) * 400  # 22 bytes each here, four times that as records
    bad: list[BadRecord] = []
    found = decode_records(record(1, many, sys_flag=0xC0), "b", bad=bad)
    assert 10_000 < sum(message.size for message in found) < 11_000
    assert len(bad) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 160), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3
    ),
    st.sampled_from([0, 0x10, 0x20, 0x30, 0xC0, 0xC1, 0x1]),
    st.sampled_from(["Orders", "%RETRY%" + "g" * 150]),
)
def test_hostile_bytes_are_decoded_as_by_the_reference_decoder(
    patches: list[tuple[int, bytes]], sys_flag: int, topic: str
) -> None:
    made = record(5, properties={"TAGS": "a", "KEYS": "k"}, topic=topic, sys_flag=sys_flag & 0xC1)
    broken = bytearray(made)
    broken[39] |= sys_flag
    for at, patch in patches:
        broken[at : at + len(patch)] = patch
    data = bytes(broken)
    try:
        found = decode_records(data, "b")
    except RecordError:
        return
    for message in found:
        for name in ("topic", "keys", "tags", "born_host", "store_host", "offset_id", "queue"):
            getattr(message, name)
        assert message.size == len(message.record)
        if message.source.data is data and message.size == len(data):
            try:
                plain = decode_message(data)
            except (CompressionError, RecordError):
                continue
            for name in ("properties", "tags", "keys", "queue_offset", "flag", "message_id"):
                assert getattr(message, name) == getattr(plain, name), name
