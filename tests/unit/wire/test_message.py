"""Messages as plain values: what `Record` writes is read, hosts and properties both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RecordError
from penstock.wire.layout import MAGIC_BLANK
from penstock.wire.message import (
    decode_host,
    decode_message,
    decode_messages,
    decode_properties,
    encode_batch,
    encode_host,
    encode_properties,
)
from penstock.wire.message_ids import encode_offset_id
from penstock.wire.record import PROPERTIES_BYTES_MAX

from .records import PLAIN, Message, encoded, hosts, joined, messages
from .test_record import batch_of, properties_as_java_reads_them, properties_texts

NUMBERS = (
    "queue_id", "queue_offset", "physical_offset", "flag", "born_ms", "store_ms", "reconsume_times",
    "prepared_offset", "body",
)  # fmt: skip
property_texts = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=("Cs",)))
dicts = st.dictionaries(property_texts.filter(len), property_texts.filter(len), max_size=5)


@given(message=messages)
def test_a_stored_record_is_decoded(message: Message) -> None:
    data = encoded(message)
    found = decode_message(data)
    assert {name: getattr(found, name) for name in NUMBERS} == {
        name: message[name] for name in NUMBERS
    }
    assert found.size == len(data)
    assert found.topic == message["topic"].decode()
    assert encode_host(found.born_host) == message["born_host"]
    assert encode_host(found.store_host) == message["store_host"]
    text = joined(message["properties"], message["extra"])
    assert found.properties == properties_as_java_reads_them(text.decode())


@given(many=st.lists(messages, max_size=5), before=st.binary(max_size=9))
def test_consecutive_records_are_decoded(many: list[Message], before: bytes) -> None:
    pieces = [encoded(message) for message in many]
    found = decode_messages(b"".join(pieces))
    assert found == [decode_message(piece) for piece in pieces]
    at = len(before)
    for message in found:
        for kind in (bytes, bytearray, memoryview):
            assert decode_message(kind(before + b"".join(pieces)), at) == message
        at += message.size


def test_ids_keys_and_tags_are_read_from_the_properties() -> None:
    found = decode_message(encoded({**PLAIN, "properties": b"KEYS\x01k1  k2\x02TAGS\x01a b\x02"}))
    assert (found.tags, found.keys, found.unique_id) == ("a b", ["k1", "k2"], None)
    offset_id = encode_offset_id(PLAIN["store_host"][:4], 10911, 123456)
    assert found.message_id == found.offset_id == offset_id == "7F00000100002A9F000000000001E240"

    found = decode_message(encoded({**PLAIN, "properties": b"UNIQ_KEY\x01ABC"}))
    assert (found.tags, found.keys, found.unique_id) == (None, [], "ABC")
    assert (found.message_id, found.offset_id) == ("ABC", offset_id)


@given(host=hosts)
def test_the_offset_id_supports_ipv4_and_ipv6_hosts(host: bytes) -> None:
    found = decode_message(encoded({**PLAIN, "store_host": host}))
    assert found.offset_id == host.hex().upper() + "000000000001E240"


def test_invalid_utf8_is_replaced() -> None:
    found = decode_message(encoded({**PLAIN, "topic": b"t\xff", "properties": b"k\xfe\x01v\xc3"}))
    assert (found.topic, found.properties) == ("t\ufffd", {"k\ufffd": "v\ufffd"})


def test_every_truncation_raises_a_record_error() -> None:
    data = encoded(PLAIN)
    for length in range(len(data)):
        with pytest.raises(RecordError, match="no message at byte 0"):
            decode_message(data[:length])
        with pytest.raises(RecordError, match=f"no message at byte {len(data)}"):
            decode_messages(data + (data[:length] or b"\0"))


def test_every_bit_flip_decodes_or_raises_a_record_error() -> None:
    data = encoded(PLAIN)
    refused = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert decode_message(flipped) != decode_message(data)
        except RecordError:
            refused += 1
    assert refused >= 8 * (4 + 4 + 4 + 4 + len(PLAIN["body"]))  # size, magic, CRC, length, body


def test_the_crc_check_can_be_disabled() -> None:
    data = bytearray(encoded(PLAIN))
    data[8:12] = bytes(4)
    for decode in (decode_message, decode_messages):
        with pytest.raises(RecordError, match="CRC"):
            decode(data)
    assert decode_message(data, verify=False).body == PLAIN["body"]
    assert decode_messages(data, verify=False)[0].body_crc == 0


@pytest.mark.parametrize(
    ("data", "at", "problem"),
    [
        (b"", 0, "end before"),
        (b"abc", 0, "end before"),
        (b"abc", 9, "end before"),
        (bytes(200), 3, "no record was written"),
        (b"\xff" * 200, 0, "magic"),
        (b"\x7f" * 7, 0, "end before"),
        (
            (8).to_bytes(4, "big") + MAGIC_BLANK.to_bytes(4, "big", signed=True),
            0,
            "segment is unused",
        ),
    ],
)
def test_the_error_for_an_invalid_record_has_a_reason(data: bytes, at: int, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        decode_message(data, at)


@given(properties=dicts)
def test_properties_round_trip(properties: dict[str, str]) -> None:
    text = encode_properties(properties)
    assert decode_properties(text) == properties
    assert properties_as_java_reads_them(text.decode()) == properties
    assert decode_properties(text.removesuffix(b"\x02")) == properties


@given(text=properties_texts)
def test_properties_are_read_as_java_reads_them(text: str) -> None:
    assert decode_properties(text.encode()) == properties_as_java_reads_them(text)


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a\x02b": "c"}, {"a": "b\x02c"}])
def test_ambiguous_properties_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(RecordError, match="separator"):
        encode_properties(properties)
    with pytest.raises(RecordError, match="separator"):
        encode_batch([(b"", 0, properties)])


def test_a_name_separator_inside_a_value_is_accepted() -> None:
    assert decode_properties(encode_properties({"a": "x\x01y"})) == {"a": "x\x01y"}


def test_the_size_of_properties_is_limited() -> None:
    longest = {"k": "v" * (PROPERTIES_BYTES_MAX - 3)}
    assert len(encode_properties(longest)) == PROPERTIES_BYTES_MAX
    with pytest.raises(RecordError, match="32768 bytes, the limit is 32767"):
        encode_properties({"k": longest["k"] + "v"})


@given(
    many=st.lists(
        st.tuples(st.binary(max_size=20), st.integers(-(1 << 31), (1 << 31) - 1), dicts), max_size=4
    )
)
def test_a_batch_is_decoded(many: list[tuple[bytes, int, dict[str, str]]]) -> None:
    expected = [(flag, body, encode_properties(found)) for body, flag, found in many]
    assert encode_batch(many) == batch_of(*expected)


@given(host=hosts)
def test_hosts_round_trip(host: bytes) -> None:
    text = decode_host(host)
    assert encode_host(text) == host
    assert encode_host(text.replace("[", "").replace("]", "")) == host  # as Java writes IPv6


def test_hosts_are_formatted_as_text() -> None:
    assert decode_host(bytes([10, 1, 2, 3, 0, 0, 42, 159])) == "10.1.2.3:10911"
    v6 = bytes.fromhex("20010db8000000000000000000000001")
    assert decode_host(v6 + (65535).to_bytes(4, "big")) == "[2001:db8::1]:65535"


@pytest.mark.parametrize(
    "text",
    ["", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:x", "host:1", "10.0.0.1:2147483648", "[::1]"],
)
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(RecordError, match="not an address and a port"):
        encode_host(text)


@pytest.mark.parametrize("length", [0, 4, 7, 9, 16, 19, 21])
def test_hosts_of_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(RecordError, match=f"not {length}"):
        decode_host(bytes(length))
