"""The options of the sink: topic, delivery guarantee, and how rows are sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.arrow.connection_options import CONNECTION_OPTIONS, ConnectionOptions, OptionReader
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.producer.outgoing import BATCH_BYTES_MAX, BATCH_COUNT_MAX, check_topic
from penstock.client.producer.producer_options import SendOptions
from penstock.errors import BadSetting, PenstockError
from penstock.wire.codes import group_fault

SINK_OPTIONS: Final = (
    "topic",
    "createTopics",
    "delivery",
    "sinkId",
    "batchId",
    "controlBroker",
    "transactionTimeout",
    "deliveryTimeout",
    "acks",
    "group",
    "compression",
    "compressAboveBytes",
    "batchBytes",
    "batchCount",
    "inFlightBytes",
    "messageBytesMax",
    "identify",
)
_SPARK_OPTIONS: Final = ("checkpointLocation", "queryName", "outputMode")
"""Options of a stream that Spark itself adds."""
_TRANSACTIONAL_ONLY: Final = ("transactionTimeout", "controlBroker")
_AT_LEAST_ONCE_ONLY: Final = ("acks", "identify", "batchBytes", "batchCount", "inFlightBytes")

GROUP: Final = "penstock-spark-sink"
BATCH_BYTES: Final = 256 * 1024
IN_FLIGHT_BYTES: Final = 16 * 1024 * 1024
DELIVERY_MS: Final = 120_000
"""The default of Kafka's producers: a broker restarts within it."""
NEW_TOPIC_MS: Final = 5_000
"""How long a topic may be missing that this process has not sent to before.

A broker that starts registers its topics within moments; a misspelt topic never appears.
"""
TRANSACTION_MS: Final = 24 * 3_600_000
MESSAGES_IN_FLIGHT_MAX: Final = 100_000
"""The producer's own limit; the sink stays below it."""
_SINK_ID_CHARS_MAX: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """How a DataFrame is written; pickled for tasks on other machines."""

    connection: ConnectionOptions
    topic: str | None
    """The topic of all rows; None: each row has a column `topic`."""
    create_topics: bool
    """Whether rows for a topic that does not exist let a broker create it."""
    transactional: bool
    sink_id: str | None
    """The permanent identity of this sink; None: the id of the streaming query."""
    batch_id: int
    """The number of a batch write within its sinkId; streams have Spark's batch ids."""
    control_broker: str | None
    """The control broker of a sink whose first batch is not batch 0."""
    transaction_timeout_ms: int
    delivery_timeout_ms: int
    """How long a send is retried, whatever fails."""
    require_durable: bool
    """Whether a message that is stored, but not durably, counts as failed."""
    group: str
    compression: str | None
    compress_above_bytes: int
    batch_bytes: int
    batch_count: int
    in_flight_bytes: int
    message_bytes_max: int
    identify: bool
    """Whether messages have properties with their sink, batch and partition."""

    @classmethod
    def of(cls, options: Mapping[str, str], *, stream: bool) -> "SinkOptions":
        """From Spark's options; raises BadSetting."""
        given = OptionReader(
            options, (*CONNECTION_OPTIONS, *SINK_OPTIONS, *_SPARK_OPTIONS), what="sink"
        )
        delivery = given.choice(
            "delivery", ("at-least-once", "transactional"), default="at-least-once"
        )
        transactional = delivery == "transactional"
        _check_identity(given, transactional=transactional, stream=stream)
        compression = given.choice("compression", ("zlib", "lz4", "zstd", "none"), default="zlib")
        found = cls(
            connection=ConnectionOptions.of(given),
            topic=given.text("topic"),
            create_topics=given.boolean("createTopics", default=False),
            transactional=transactional,
            sink_id=given.text("sinkId"),
            batch_id=_batch_id(given),
            control_broker=given.text("controlBroker"),
            transaction_timeout_ms=given.duration_ms("transactionTimeout", default=TRANSACTION_MS),
            delivery_timeout_ms=given.duration_ms("deliveryTimeout", default=DELIVERY_MS),
            require_durable=given.choice("acks", ("all", "1"), default="all") == "all",
            group=given.text("group") or GROUP,
            compression=None if compression == "none" else compression,
            compress_above_bytes=given.count("compressAboveBytes") or 4096,
            batch_bytes=_at_most(given, "batchBytes", BATCH_BYTES_MAX, default=BATCH_BYTES),
            batch_count=_at_most(given, "batchCount", BATCH_COUNT_MAX, default=BATCH_COUNT_MAX),
            in_flight_bytes=given.count("inFlightBytes") or IN_FLIGHT_BYTES,
            message_bytes_max=given.count("messageBytesMax") or SendOptions().message_bytes_max,
            identify=given.boolean("identify", default=True),
        )
        _check_values(found)
        return found

    def producer(self) -> AsyncProducer:
        """A producer for these options, not started yet."""
        return AsyncProducer(
            self.connection.nameservers,
            group=self.group,
            compression=self.compression,
            compress_above_bytes=self.compress_above_bytes,
            message_bytes_max=self.message_bytes_max,
            in_flight_max=MESSAGES_IN_FLIGHT_MAX,
            create_topics=self.create_topics,
            **self.connection.client_keywords(),
        )

    def producer_key(self) -> object:
        """Two writes with the same key can share a producer."""
        return (
            self.connection,
            self.group,
            self.compression,
            self.compress_above_bytes,
            self.message_bytes_max,
            self.create_topics,
        )


def _check_identity(given: OptionReader, *, transactional: bool, stream: bool) -> None:
    if transactional:
        given.refuse(_AT_LEAST_ONCE_ONLY, "is only for delivery=at-least-once")
    else:
        given.refuse(_TRANSACTIONAL_ONLY, "is only for delivery=transactional")
    if stream:
        given.refuse(("batchId",), "is only for batch writes: streams count their batches")
    elif transactional and "sinkId" not in given:
        raise BadSetting(
            "a batch write with delivery=transactional needs the option sinkId, which identifies a"
            " repeated run",
            hint="set a unique sinkId, and batchId if one sinkId writes several batches",
        )
    elif "batchId" in given and "sinkId" not in given:
        raise BadSetting("the option batchId needs sinkId", hint="set both or neither")


def _batch_id(given: OptionReader) -> int:
    """The only number that may be 0: foreachBatch counts from 0."""
    text = given.text("batchId")
    return 0 if text in (None, "0") else given.count("batchId") or 0


def _at_most(given: OptionReader, name: str, limit: int, *, default: int) -> int:
    value = given.count(name) or default
    if value > limit:
        raise BadSetting.over(
            f"the option {name}", figure=value, limit=limit, unit="given", hint="set a lower value"
        )
    return value


def _check_values(found: SinkOptions) -> None:
    fault = group_fault(found.group)
    if fault is not None:
        raise BadSetting(f"the option group: {fault}", hint="choose another name")
    if found.topic is not None:
        try:
            check_topic(found.topic)
        except PenstockError as error:
            raise BadSetting(f"the option topic: {error}", hint=error.hint) from None
    sink_id = found.sink_id
    if sink_id is not None and (
        len(sink_id) > _SINK_ID_CHARS_MAX or not sink_id.isprintable() or not sink_id.isascii()
    ):
        raise BadSetting(
            f"the option sinkId is {sink_id[:40]!r}",
            hint=f"use at most {_SINK_ID_CHARS_MAX} printable ASCII characters",
        )
    SendOptions(message_bytes_max=found.message_bytes_max)  # raises if it exceeds a frame
