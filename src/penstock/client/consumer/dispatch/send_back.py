"""Sends failed messages back to a broker (CONSUMER_SEND_MSG_BACK) for a later redelivery.

The broker that stores the message copies it to the group's retry topic; the broker decides about
the delay and when the message becomes a dead letter. If that fails (the broker is down, the record
is deleted), the client sends a copy to the retry topic of any broker, as RocketMQ's clients do.
"""

import logging

from penstock.client.client_session import Session
from penstock.client.received_message import ReceivedMessage
from penstock.errors import NoQueue, PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    GROUP_INNER_PRODUCER,
    PROPERTY_DELAY,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    RETRY_TOPIC_PREFIX,
    SYS_COMPRESSED,
    SYS_COMPRESSION_MASK,
    TOPIC_AUTO_CREATE,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message import encode_properties

log = logging.getLogger(__name__)

CALL_MS = 5_000
BROKERS_MAX = 3
"""Most brokers that are tried for a copy."""
FIRST_LEVEL = 3
"""Delay level of the first retry (10 s); each further retry has the next level."""
RETRIES_MAX = 2**31 - 1

_STORED = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)
_NOT_COPIED = frozenset(
    (
        PROPERTY_TRANSACTION_PREPARED,
        PROPERTY_RECONSUME_TIME,
        PROPERTY_MAX_RECONSUME_TIMES,
        PROPERTY_TIMER_DELAY_MS,
        PROPERTY_TIMER_DELAY_SEC,
        PROPERTY_TIMER_DELIVER_MS,
    )
)


class SendBack:
    """Sends failed messages of a group back.

    `retries_max` is the number of redeliveries before a message becomes a dead letter.
    """

    def __init__(self, session: Session, group: str, *, retries_max: int) -> None:
        self._session = session
        self._group = group
        self._retries_max = RETRIES_MAX if retries_max < 0 else retries_max

    async def __call__(self, message: ReceivedMessage, delay_level: int = 0) -> None:
        """Send a message back; raises PenstockError if no broker takes it.

        `delay_level` 0: the broker decides about the delay; below 0: a dead letter at once.
        """
        try:
            await self._send_back(message, delay_level)
        except PenstockError as error:
            log.warning(
                "%s: broker %s does not accept message %s for a retry; sending a copy: %s",
                self._group,
                message.broker_name,
                message.message_id,
                error,
            )
            await self.resend(message)

    async def resend(self, message: ReceivedMessage) -> None:
        """Send a copy to the retry topic; after enough retries the broker makes it a dead letter.

        For a group that has locked queues the copy becomes a dead letter at once.
        """
        topic = RETRY_TOPIC_PREFIX + self._group
        route = await self._session.route(topic)
        queues: dict[str, MessageQueue] = {}
        for queue in route.write_queues:
            queues.setdefault(queue.broker_name, queue)
        failure: PenstockError = NoQueue(f"topic {topic} has no writable queue")
        own = message.broker_name
        for queue in sorted(queues.values(), key=lambda q: q.broker_name != own)[:BROKERS_MAX]:
            try:
                await self._session.call(
                    self._session.master(queue.broker_name),
                    RequestCode.SEND_MESSAGE_V2,
                    self._copy_fields(message, queue),
                    message.stored_body,
                    timeout_ms=CALL_MS,
                    good=_STORED,
                )
            except PenstockError as error:
                failure = error
            else:
                return
        raise failure

    async def _send_back(self, message: ReceivedMessage, delay_level: int) -> None:
        fields = {
            "offset": str(message.physical_offset),
            "group": self._group,
            "delayLevel": str(delay_level),
            "originMsgId": message.message_id,
            "originTopic": sent_topic(message),
            "unitMode": "false",
            "maxReconsumeTimes": str(self._retries_max),
            "bname": message.broker_name,
        }
        peer = self._session.master(message.broker_name)
        await self._session.call(
            peer, RequestCode.CONSUMER_SEND_MSG_BACK, fields, timeout_ms=CALL_MS
        )

    def _copy_fields(self, message: ReceivedMessage, queue: MessageQueue) -> dict[str, str]:
        times = message.reconsume_times
        properties = {k: v for k, v in message.properties.items() if k not in _NOT_COPIED}
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.message_id)
        properties[PROPERTY_RETRY_TOPIC] = sent_topic(message)
        properties[PROPERTY_DELAY] = str(FIRST_LEVEL + times)
        return {
            "a": GROUP_INNER_PRODUCER,
            "b": queue.topic,
            "c": TOPIC_AUTO_CREATE,
            "d": "4",
            "e": str(queue.queue_id),
            "f": str(message.sys_flag & (SYS_COMPRESSED | SYS_COMPRESSION_MASK)),
            "g": str(self._session.clock.now_ms()),
            "h": str(message.flag),
            "i": encode_properties(properties).decode(),
            "j": str(times + 1),
            "k": "false",
            "l": str(self._retries_max),
            "m": "false",
            "n": queue.broker_name,
        }


def sent_topic(message: ReceivedMessage) -> str:
    """The topic that a message was sent to, with the namespace."""
    stored = message.stored_topic
    if stored.startswith(RETRY_TOPIC_PREFIX):
        return message.properties.get(PROPERTY_RETRY_TOPIC, stored)
    return stored
