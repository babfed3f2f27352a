"""Every typed body survives the wire, and damaged bytes raise only BodyError."""

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as inspect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BodyError
from penstock.wire import fastjson
from penstock.wire.bodies import (
    admin_bodies,
    client_bodies,
    cluster_bodies,
    registration_bodies,
    table_bodies,
)
from penstock.wire.bodies.client_bodies import (
    BatchAck,
    Body,
    BrokerData,
    DataVersion,
    HeartbeatData,
    MessageQueue,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicQueueMappingInfo,
    TopicRouteData,
    decode_batch_ack,
)
from penstock.wire.bodies.registration_bodies import (
    RegisterBrokerBody,
    decode_register,
    encode_register,
)
from penstock.wire.bodies.table_bodies import TimerCheckpoint, TopicConfigAndMappingSerializeWrapper

MODULES = (client_bodies, admin_bodies, cluster_bodies, table_bodies, registration_bodies)


def kinds(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for child in kind.__subclasses__():
        yield child
        yield from kinds(child)


KINDS = [kind for kind in kinds() if kind.__module__ in {module.__name__ for module in MODULES}]


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that msgspec describes."""
    match kind:
        case inspect.StrType():
            # No "{": a name that looks like a quoted object is ambiguous in strict form.
            return st.text(st.characters(exclude_characters="{", codec="utf-8"), max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType():
            return st.one_of([values_of(part) for part in kind.types])
        case inspect.ListType():
            return st.lists(values_of(kind.item_type), max_size=2)
        case inspect.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=2).map(tuple)
        case inspect.FrozenSetType():
            return st.frozensets(values_of(kind.item_type), max_size=2)
        case inspect.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=2)
        case inspect.StructType():
            return st.builds(kind.cls, **{part.name: values_of(part.type) for part in kind.fields})
    raise AssertionError(f"no strategy for {kind}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bodies_round_trip(kind: type[Body], data: st.DataObject) -> None:
    value = data.draw(values_of(inspect.type_info(kind)))
    for encode in (fastjson.encode, fastjson.encode_pretty, fastjson.encode_strict):
        assert fastjson.decode(encode(value), kind) == value
    json.loads(fastjson.encode_strict(value))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_empty_body_has_defaults(kind: type[Body]) -> None:
    assert fastjson.decode(b"{}", kind) == kind()
    nulls = dict.fromkeys(kind.__struct_encode_fields__)
    assert fastjson.decode(json.dumps({**nulls, "unknown": [1]}).encode(), kind) == kind()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_damaged_bodies_raise_only_body_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    text = bytearray(fastjson.encode(data.draw(values_of(inspect.type_info(kind)))))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(text[: data.draw(st.integers(0, len(text)))])
    for target in (kind, data.draw(st.sampled_from(KINDS))):
        with contextlib.suppress(BodyError):
            fastjson.decode(damaged, target)


def test_message_queue_is_a_key_and_sorts_like_java() -> None:
    queues = [MessageQueue("b", "a", 1), MessageQueue("a", "b", 0), MessageQueue("a", "a", 2)]
    assert {queues[0]: 1}[MessageQueue("b", "a", 1)] == 1
    assert sorted(queues) == [queues[2], queues[1], queues[0]]


def test_data_versions_are_counted_and_ordered() -> None:
    old = DataVersion(counter=9, timestamp=5)
    new = old.next(4, state_version=0)
    assert new == DataVersion(counter=10, state_version=0, timestamp=4)
    assert new.rank() > old.rank()
    assert DataVersion(state_version=1).rank() > new.rank()


def test_defaults_equal_those_of_java() -> None:
    assert TopicConfig().read_queue_nums == 16
    assert TopicConfig().perm == 6
    text = fastjson.encode(SubscriptionGroupConfig(group_name="g")).decode()
    assert '"groupRetryPolicy":{"type":"CUSTOMIZED"}' in text
    assert '"retryMaxTimes":16' in text
    assert "subscriptionDataSet" not in text


def test_numbers_out_of_javas_range_are_refused() -> None:
    for text in ('{"queueId":2147483648}', '{"queueId":-2147483649}', '{"queueId":1.5}'):
        with pytest.raises(BodyError):
            fastjson.decode(text.encode(), MessageQueue)
    with pytest.raises(BodyError):
        fastjson.decode(b'{"counter":9223372036854775808}', DataVersion)


def test_numbers_may_be_strings_and_unknown_enum_values_are_accepted() -> None:
    text = b'{"consumerDataSet":[{"consumeType":"CONSUME_LATER","unitMode":"true"}],'
    heartbeat = fastjson.decode(text + b'"heartbeatFingerprint":"7"}', HeartbeatData)
    assert heartbeat.consumer_data_set[0].consume_type == "CONSUME_LATER"
    assert heartbeat.consumer_data_set[0].unit_mode
    assert heartbeat.heartbeat_fingerprint == 7


def test_route_for_new_and_old_clients() -> None:
    route = TopicRouteData(
        broker_datas=[BrokerData(cluster="c", broker_name="é", broker_addrs={0: "h:1"})]
    )
    assert b'{0:"h:1"}' in fastjson.encode(route)
    strict = fastjson.encode_strict(route)
    assert json.loads(strict)["brokerDatas"][0]["brokerAddrs"] == {"0": "h:1"}
    assert strict.isascii()


def test_batch_ack_with_short_and_long_names() -> None:
    short = b'{"acks":[{"b":"BQE=","c":"g","it":60,"pt":5,"q":1,"r":"0","rq":2,"so":10,"t":"T"}]}'
    long = (
        b'{"acks":[{"bitSet":"BQE=","consumerGroup":"g","invisibleTime":60,"popTime":5,'
        b'"queueId":1,"retry":"0","reviveQueueId":2,"startOffset":10,"topic":"T"}]}'
    )
    ack = decode_batch_ack(short).acks[0]
    assert decode_batch_ack(long).acks == [ack]
    assert ack.distances() == 1 << 0 | 1 << 2 | 1 << 8
    mixed = short.replace(b'"so"', b'"startOffset"').replace(b'"c"', b'"\\u0063"')
    assert decode_batch_ack(mixed).acks == [ack]
    assert ack == BatchAck(
        consumer_group="g", topic="T", start_offset=10, queue_id=1, revive_queue_id=2, pop_time=5,
        invisible_time=60, bit_set=b"\x05\x01",
    )  # fmt: skip
    for text in (b'{"acks":[1]}', b'{"acks":{}}', b"[]", b'{"acks":[{"b":"?"}]}'):
        with pytest.raises(BodyError):
            decode_batch_ack(text)


def test_timer_checkpoint_is_56_bytes() -> None:
    value = TimerCheckpoint(last_read_time_ms=1, data_version=DataVersion(counter=7, timestamp=9))
    assert value.pack() == struct.pack(">7q", 1, 0, 0, 0, 0, 9, 7)
    assert TimerCheckpoint.unpack(value.pack() + bytes(100)) == value
    with pytest.raises(BodyError):
        TimerCheckpoint.unpack(bytes(55))


# --- registration --------------------------------------------------------------------------------

names = st.text("abcXYZ_-%|", min_size=1, max_size=8)
topics = st.builds(
    TopicConfig,
    topic_name=names,
    read_queue_nums=st.integers(0, 2**31 - 1),
    write_queue_nums=st.integers(0, 2**31 - 1),
    perm=st.integers(0, 15),
    attributes=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
registrations = st.builds(
    lambda found, version, mappings, servers: RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            topic_config_table={topic.topic_name: topic for topic in found},
            data_version=version,
            topic_queue_mapping_info_map={
                name: TopicQueueMappingInfo(topic=name, curr_id_map={0: 1}) for name in mappings
            },
        ),
        filter_server_list=servers,
    ),
    st.lists(topics, max_size=4),
    values_of(inspect.type_info(DataVersion)),
    st.lists(names, max_size=2),
    st.lists(st.text(max_size=5), max_size=2),
)


@given(registrations)
def test_registrations_round_trip_compressed_and_plain(body: RegisterBrokerBody) -> None:
    for compressed in (False, True):
        data = encode_register(body, compressed=compressed)
        assert decode_register(data, compressed=compressed, version=413) == body


@given(registrations, st.data())
def test_damaged_registration_raises_only_body_error(
    body: RegisterBrokerBody, data: st.DataObject
) -> None:
    inflated = bytearray(zlib.decompress(encode_register(body, compressed=True)))
    inflated[data.draw(st.integers(0, len(inflated) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(inflated[: data.draw(st.integers(0, len(inflated)))])
    for packed in (zlib.compress(damaged), damaged, zlib.compress(damaged)[:-3]):
        with contextlib.suppress(BodyError):
            decode_register(packed, compressed=True, version=493)


def test_registration_of_4x_has_no_mappings() -> None:
    body = RegisterBrokerBody(filter_server_list=["x"])
    inflated = zlib.decompress(encode_register(body, compressed=True))
    old = zlib.compress(inflated[:-4])
    assert decode_register(old, compressed=True, version=409) == body
    with pytest.raises(BodyError, match="ends too early"):
        decode_register(old, compressed=True, version=413)


def test_decompressed_size_of_a_registration_is_limited() -> None:
    bomb = zlib.compress(bytes(10_000_000))
    with pytest.raises(BodyError, match="1000"):
        decode_register(bomb, compressed=True, version=493, inflated_bytes_max=1000)
