"""Attributes of messages by OpenTelemetry's messaging conventions, and the context in messages.

Names of attributes are written out here: the package of the conventions marks all of messaging as
incubating, and moves such names between its releases.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from penstock.client.messages import Message
from penstock.client.received_message import ReceivedMessage
from penstock.transport.peer import split_address
from penstock.wire.codes import (
    PROPERTY_DELAY,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRACE_CONTEXT,
    PROPERTY_TRANSACTION_PREPARED,
    SYS_TRANSACTION_MASK,
)

Attributes = dict[str, AttributeValue]

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
CLIENT_ID: Final = "messaging.client.id"
GROUP: Final = "messaging.consumer.group.name"
BATCH_COUNT: Final = "messaging.batch.message_count"
MESSAGE_ID: Final = "messaging.message.id"
BODY_BYTES: Final = "messaging.message.body.size"
NAMESPACE: Final = "messaging.rocketmq.namespace"
MODEL: Final = "messaging.rocketmq.consumption_model"
TAG: Final = "messaging.rocketmq.message.tag"
KEYS: Final = "messaging.rocketmq.message.keys"
TYPE: Final = "messaging.rocketmq.message.type"
MESSAGE_GROUP: Final = "messaging.rocketmq.message.group"
DELAY_LEVEL: Final = "messaging.rocketmq.message.delay_time_level"
DELIVERY_MS: Final = "messaging.rocketmq.message.delivery_timestamp"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

TRACEPARENT: Final = "traceparent"


def sent_attributes(message: Message, ordering_key: str | None) -> Attributes:
    """Attributes of a message to send; its id is not known yet."""
    found: Attributes = {BODY_BYTES: len(message.content), TYPE: _sent_type(message, ordering_key)}
    if message.tags:
        found[TAG] = message.tags
    if message.keys:
        found[KEYS] = list(message.keys)
    if ordering_key is not None:
        found[MESSAGE_GROUP] = ordering_key
    if message.delay_level:
        found[DELAY_LEVEL] = message.delay_level
    elif message.deliver_at is not None:
        found[DELIVERY_MS] = round(message.deliver_at.timestamp() * 1000)
    return found


def received_attributes(message: ReceivedMessage) -> Attributes:
    """Attributes of a received message."""
    properties = message.properties
    found: Attributes = {
        DESTINATION: message.topic,
        PARTITION: str(message.queue_id),
        MESSAGE_ID: message.message_id,
        BODY_BYTES: len(message.body),
        TYPE: _received_type(message),
    }
    if message.tags:
        found[TAG] = message.tags
    if message.keys:
        found[KEYS] = message.keys
    ordering_key = properties.get(PROPERTY_SHARDING_KEY)
    if ordering_key:
        found[MESSAGE_GROUP] = ordering_key
    return found


def server_attributes(address: str | None) -> Attributes:
    """Address and port of a broker; nothing if the address is unknown."""
    if not address:
        return {}
    host, port = split_address(address)
    return {SERVER_ADDRESS: host, SERVER_PORT: port}


def with_context(message: Message, context: Context) -> Message:
    """The message with the context in its properties; one that has a context keeps it."""
    if TRACEPARENT in message.properties:
        return message
    carrier = dict(message.properties)
    propagate.inject(carrier, context)
    return replace(message, properties=carrier)


def extract(properties: Mapping[str, str]) -> Context:
    """The context in the properties of a message; empty if there is none.

    RocketMQ's gRPC clients have their own property for the value of `traceparent`.
    """
    if TRACEPARENT not in properties and PROPERTY_TRACE_CONTEXT in properties:
        properties = {**properties, TRACEPARENT: properties[PROPERTY_TRACE_CONTEXT]}
    return propagate.extract(properties, Context())


def links_of(properties: Iterable[Mapping[str, str]]) -> list[trace.Link]:
    """Links to the contexts in messages, each once."""
    contexts = (trace.get_current_span(extract(each)).get_span_context() for each in properties)
    found = {(each.trace_id, each.span_id): each for each in contexts if each.is_valid}
    return [trace.Link(each) for each in found.values()]


def common_topic(messages: Sequence[Message | ReceivedMessage]) -> str | None:
    """The topic of messages; None if they have several."""
    topics = {message.topic for message in messages}
    return topics.pop() if len(topics) == 1 else None


def _sent_type(message: Message, ordering_key: str | None) -> str:
    if message.properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
        return "transaction"
    if message.delay_level or message.delay is not None or message.deliver_at is not None:
        return "delay"
    return "normal" if ordering_key is None else "fifo"


def _received_type(message: ReceivedMessage) -> str:
    properties = message.properties
    if message.sys_flag & SYS_TRANSACTION_MASK:
        return "transaction"
    if PROPERTY_DELAY in properties or PROPERTY_TIMER_DELIVER_MS in properties:
        return "delay"
    return "fifo" if PROPERTY_SHARDING_KEY in properties else "normal"
