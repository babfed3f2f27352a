"""Stored messages are sent again: to their topic, or to one group through its retry topic."""

from collections.abc import Iterable, Mapping
from typing import Literal

from penstock.client.admin.admin_groups import GroupAdmin
from penstock.client.messages import SendReceipt, SendStatus
from penstock.client.received_message import ReceivedMessage
from penstock.errors import HeaderError, InvalidParameter, PenstockError
from penstock.plurals import count_text
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    GROUP_INNER_PRODUCER,
    PROPERTY_BUYER_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_INSTANCE_ID,
    PROPERTY_KEYS,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    RESERVED_PROPERTIES,
    RETRY_TOPIC_PREFIX,
    SYS_COMPRESSED,
    SYS_COMPRESSION_MASK,
    TOPIC_AUTO_CREATE,
    RequestCode,
    is_internal_topic,
)
from penstock.wire.java_numbers import parse_nonnegative
from penstock.wire.message import encode_properties

_KEPT = {
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_INSTANCE_ID,
    PROPERTY_BUYER_ID,
}
"""RocketMQ's own properties that are kept when a message is sent again."""


class ResendAdmin(GroupAdmin):
    """The part of `AsyncAdmin` that sends stored messages again."""

    async def resend_message(
        self, message: ReceivedMessage, *, group: str | None = None
    ) -> SendReceipt:
        """Send a stored message again, to its topic or only to one group.

        The copy keeps body, id, keys, tags and the application's properties, and is retried as
        often as a new message. A dead letter goes to its original topic. POP consumers have other
        retry topics: send to the topic for them. Raises InvalidParameter for a message that has no
        topic to go to.
        """
        topic, properties = self._copy(message, group)
        return await self._send_copy(message, topic, properties)

    async def resend_dead_letters(
        self,
        group: str,
        messages: Iterable[ReceivedMessage],
        *,
        to: Literal["group", "topic"] = "group",
    ) -> list[SendReceipt]:
        """Send dead letters again, as `resend_message` does: to their group or to their topic.

        The dead letter topic does not change.
        """
        letters = list(messages)
        for message in letters:
            if not message.stored_topic.startswith(DLQ_TOPIC_PREFIX):
                raise InvalidParameter(
                    f"the message {message.message_id} of {message.stored_topic}"
                    " is not a dead letter",
                    hint="pass messages that dead_letters() returned",
                )
        copies = [(m, *self._copy(m, group if to == "group" else None)) for m in letters]
        receipts: list[SendReceipt] = []
        for message, topic, properties in copies:
            try:
                receipts.append(await self._send_copy(message, topic, properties))
            except PenstockError as error:
                before = (
                    f"{len(receipts)} of {count_text(len(copies), 'message')} were sent, then: "
                )
                raise type(error)(before + error.message, hint=error.hint) from None
        return receipts

    def _copy(self, message: ReceivedMessage, group: str | None) -> tuple[str, dict[str, str]]:
        """Topic and properties of the copy; raises InvalidParameter."""
        origin = origin_topic(message)
        if origin is None:
            raise InvalidParameter(
                f"the message {message.message_id} of {message.stored_topic} can't be sent again: "
                + (
                    "its broker has not delivered it to its topic yet"
                    if is_internal_topic(message.stored_topic)
                    else "it does not name its original topic"
                ),
                hint="choose messages of a topic or of a dead letter topic",
            )
        properties = {
            name: value
            for name, value in message.properties.items()
            if name in _KEPT or name not in RESERVED_PROPERTIES
        }
        if group is None:
            return origin, properties
        properties[PROPERTY_RETRY_TOPIC] = origin
        return self.session.with_namespace(RETRY_TOPIC_PREFIX + group), properties

    async def _send_copy(
        self, message: ReceivedMessage, topic: str, properties: Mapping[str, str]
    ) -> SendReceipt:
        """Send to the broker of the original, which selects the queue."""
        broker = await self.broker(message.broker_name)
        fields = {
            "a": GROUP_INNER_PRODUCER,
            "b": topic,
            "c": TOPIC_AUTO_CREATE,
            "d": "4",
            "e": "-1",
            "f": str(message.sys_flag & (SYS_COMPRESSED | SYS_COMPRESSION_MASK)),
            "g": str(message.born_ms),
            "h": str(message.flag),
            "i": encode_properties(properties).decode("utf-8", "replace"),
            "j": "0",
            "k": "false",
            "m": "false",
            "n": broker.name,
        }
        answer = await self.ask(
            broker.address,
            RequestCode.SEND_MESSAGE_V2,
            fields,
            message.stored_body,
            good=list(SendStatus),
        )
        queue_id = parse_nonnegative(answer.ext.get("queueId", ""))
        queue_offset = parse_nonnegative(answer.ext.get("queueOffset", ""))
        if queue_id is None or queue_offset is None:
            raise HeaderError(
                f"{broker.address} stored a message, but its response has no queue ID and offset"
            )
        return SendReceipt(
            SendStatus(answer.code),
            message.message_id,
            answer.ext.get("msgId", ""),
            MessageQueue(self.session.without_namespace(topic), broker.name, queue_id),
            queue_offset,
        )


def origin_topic(message: ReceivedMessage) -> str | None:
    """The topic (with namespace) that a stored message was sent to; None if it is not known."""
    stored = message.stored_topic
    if stored.startswith((DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX)):
        properties = message.properties
        return properties.get(PROPERTY_DLQ_ORIGIN_TOPIC) or properties.get(PROPERTY_RETRY_TOPIC)
    return None if is_internal_topic(stored) else stored
