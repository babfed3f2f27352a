"""Messages as JSON: a row of a list, or all that is known about one."""

from penstock.client.diagnosis.exported_message import UNREADABLE
from penstock.client.received_message import ReceivedMessage
from penstock.console.messages.decoders import decode_body, summary
from penstock.errors import CompressionError
from penstock.wire.codes import PROPERTY_TRANSACTION_PREPARED, RESERVED_PROPERTIES


def message_row(message: ReceivedMessage) -> dict[str, object]:
    """A message in a list."""
    queue = message.queue
    return {
        "id": message.message_id,
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "offset": message.queue_offset,
        "store_ms": message.store_ms,
        "born_ms": message.born_ms,
        "tags": message.tags,
        "keys": message.keys,
        "bytes": message.body_length,
        "reconsume_times": message.reconsume_times,
        "summary": _summary(message),
    }


def message_detail(message: ReceivedMessage) -> dict[str, object]:
    """A message with its body and properties."""
    properties = message.properties
    return {
        **message_row(message),
        "offset_id": message.offset_id,
        "unique_id": message.unique_id,
        "transaction_id": message.transaction_id
        if properties.get(PROPERTY_TRANSACTION_PREPARED) == "true"
        else None,
        "sent_to": message.topic,
        "born_host": message.born_host,
        "store_host": message.store_host,
        "physical_offset": message.physical_offset,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "body": _body(message),
        "properties": {
            name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES
        },
        "system_properties": {
            name: value for name, value in properties.items() if name in RESERVED_PROPERTIES
        },
    }


def contains(message: ReceivedMessage, text: bytes) -> bool:
    """Whether the body contains a text; one that can't be decompressed does not."""
    try:
        return text in message.body
    except CompressionError:
        return False


def _summary(message: ReceivedMessage) -> str:
    try:
        return summary(message.body)
    except CompressionError:
        return UNREADABLE


def _body(message: ReceivedMessage) -> dict[str, object]:
    try:
        return decode_body(message.body)
    except CompressionError:
        return {**decode_body(message.stored_body), "problem": UNREADABLE}
