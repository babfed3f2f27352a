"""The options of the sink: defaults, contradictions, refusals."""

import pickle
from typing import Any

import pytest

from penstock.errors import BadSetting
from penstock.spark.sink.sink_options import SINK_OPTIONS, SinkOptions


def of(stream: bool = False, **options: str) -> SinkOptions:
    return SinkOptions.of({"nameserver": "ns:9876", "topic": "t", **options}, stream=stream)


def test_defaults() -> None:
    options = of()
    assert options.connection.nameservers == ("ns:9876",)
    assert (options.topic, options.transactional, options.sink_id) == ("t", False, None)
    assert options.delivery_timeout_ms == 120_000
    assert options.require_durable
    assert options.identify
    assert (options.compression, options.compress_above_bytes) == ("zlib", 4096)
    assert (options.batch_bytes, options.batch_count) == (256 * 1024, 1_000)
    assert options.message_bytes_max == 4 * 1024 * 1024


def test_all_options_in_any_case() -> None:
    options = of(
        DELIVERY="At-Least-Once", sinkid="daily report", batchID="0", deliveryTimeout="30s",
        acks="1", group="g", compression="none", compressAboveBytes="100", batchBytes="1000",
        batchCount="10", inFlightBytes="5000", messageBytesMax="2000", identify="false",
    )  # fmt: skip
    assert (options.sink_id, options.batch_id) == ("daily report", 0)
    assert options.delivery_timeout_ms == 30_000
    assert not options.require_durable
    assert not options.identify
    assert (options.group, options.compression, options.compress_above_bytes) == ("g", None, 100)
    assert (options.batch_bytes, options.batch_count, options.in_flight_bytes) == (1_000, 10, 5_000)
    assert options.message_bytes_max == 2_000
    assert pickle.loads(pickle.dumps(options)) == options


def test_transactional_options() -> None:
    options = of(
        delivery="Transactional", sinkid="s", transactionTimeout="2h", controlBroker="broker-a"
    )
    assert options.transactional
    assert options.transaction_timeout_ms == 7_200_000
    assert options.control_broker == "broker-a"


def test_batch_ids_count_from_0() -> None:
    assert of(sinkId="s", batchId="17").batch_id == 17
    assert of(sinkId="s").batch_id == 0


def test_stream_is_identified_by_its_query() -> None:
    options = of(stream=True, delivery="transactional", checkpointLocation="/c", queryName="q")
    assert options.transactional
    assert options.sink_id is None


@pytest.mark.parametrize(
    ("stream", "given", "why"),
    [
        (False, {"delivery": "transactional"}, "needs the option sinkId"),
        (False, {"delivery": "exactly-once"}, "the option delivery is 'exactly-once'"),
        (False, {"batchId": "1"}, "batchId needs sinkId"),
        (False, {"sinkId": "s", "batchId": "-1"}, "the option batchId is '-1'"),
        (True, {"sinkId": "s", "batchId": "1"}, "batchId is only for batch writes"),
        (False, {"transactionTimeout": "1h"}, "only for delivery=transactional"),
        (False, {"controlBroker": "b"}, "only for delivery=transactional"),
        (True, {"delivery": "transactional", "acks": "1"}, "acks is only for delivery=at-least"),
        (True, {"delivery": "transactional", "identify": "false"}, "identify is only for"),
        (True, {"delivery": "transactional", "batchBytes": "9"}, "batchBytes is only for"),
        (False, {"topik": "t"}, "did you mean topic"),
        (False, {"subscribe": "t"}, "the sink has no option 'subscribe'"),
        (False, {"topic": "a b"}, "the option topic: the topic name 'a b' contains"),
        (False, {"topic": "SCHEDULE_TOPIC_XXXX"}, "the option topic: only brokers write"),
        (False, {"topic": ""}, "the option topic is empty"),
        (False, {"group": "a b"}, "the option group: the group name 'a b' contains"),
        (False, {"sinkId": "a\u0002b"}, "the option sinkId is"),
        (False, {"sinkId": "ä"}, "the option sinkId is"),
        (False, {"sinkId": "x" * 129}, "the option sinkId is"),
        (False, {"batchCount": "1001"}, "the option batchCount: 1001 given, the limit is 1000"),
        (False, {"batchBytes": "2000000"}, "the option batchBytes: 2000000 given"),
        (False, {"messageBytesMax": "99999999"}, "message_bytes_max is 99999999"),
        (False, {"compression": "gzip"}, "the option compression is 'gzip'"),
        (False, {"acks": "2"}, "the option acks is '2'"),
        (False, {"deliveryTimeout": "soon"}, "the option deliveryTimeout is 'soon'"),
        (False, {"accessKey": "a"}, "accessKey and secretKey belong together"),
    ],
)
def test_bad_options_are_refused(stream: bool, given: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSetting) as caught:
        of(stream, **given)
    assert why in str(caught.value)
    assert caught.value.hint


def test_writes_with_the_same_options_share_a_producer() -> None:
    first, second = of(sinkId="s", batchId="1"), of(sinkId="s", batchId="2")
    assert first.producer_key() == second.producer_key()
    assert first.producer_key() != of(compression="lz4").producer_key()


def test_repr_hides_the_secret_key() -> None:
    assert "hush" not in repr(of(accessKey="a", secretKey="hush"))


def test_names_are_unique() -> None:
    assert len({name.lower() for name in SINK_OPTIONS}) == len(SINK_OPTIONS)
