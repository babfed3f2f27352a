"""Request and reply: a producer sends a message and waits for what its consumer replies.

A request carries CORRELATION_ID, REPLY_TO_CLIENT (the client id of this session) and TTL. The
consumer sends its reply as a message to `<cluster>_REPLY_TOPIC` by a code of its own
(SEND_REPLY_MESSAGE_V2: `is_reply(message)` tells); the broker pushes it to the client that asked
(PUSH_REPLY_MESSAGE_TO_CLIENT). For that the client must have sent that broker a heartbeat, so a
request is preceded by one to each broker of the cluster that has none yet.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.clock import finish_within
from penstock.errors import ClientClosed, MessageIllegal, NoReply, PenstockError, RecordError
from penstock.transport.peer import PeerRequest, Response
from penstock.wire.codes import (
    MSG_TYPE_REPLY,
    PROPERTY_ARRIVE_TIME,
    PROPERTY_CLUSTER,
    PROPERTY_CORRELATION_ID,
    PROPERTY_MSG_TYPE,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    REPLY_TOPIC_SUFFIX,
    TOPIC_AUTO_CREATE,
    RequestCode,
    ResponseCode,
)
from penstock.wire.frame import FRAME_BYTES_MAX
from penstock.wire.message import decode_properties, encode_host, encode_properties
from penstock.wire.record import OK, Record

log = logging.getLogger(__name__)

BEAT_AGAIN_MS: Final = 1_000
"""A broker that does not take our heartbeat is not bothered with every request."""

_NOWHERE: Final = bytes(8)

SendOne: TypeAlias = Callable[[Message, MessageQueue | None, int], Awaitable[SendReceipt]]
"""(message, queue or None, timeout_ms) → receipt, with the producer's retries."""


class Requests:
    """Requests of one producer that wait for their replies."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: dict[str, asyncio.Future[ReceivedMessage]] = {}
        self._again_ms = 0

    async def request(
        self, message: Message, send: SendOne, *, queue: MessageQueue | None = None, timeout_ms: int
    ) -> ReceivedMessage:
        """Send and wait for the reply, both within `timeout_ms`; raises NoReply, or as a send."""
        clock = self._session.clock
        deadline_ms = clock.monotonic_ms() + timeout_ms
        correlation_id = str(uuid.uuid4())
        asking = replace(
            message,
            properties={
                **message.properties,
                PROPERTY_CORRELATION_ID: correlation_id,
                PROPERTY_REPLY_TO_CLIENT: self._session.client_id,
                PROPERTY_TTL: str(timeout_ms),
            },
        )
        reply: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = reply
        try:
            await finish_within(clock, timeout_ms, self._be_known(message.topic))
            left_ms = max(deadline_ms - clock.monotonic_ms(), 1)
            try:
                await send(asking, queue, left_ms)
            except PenstockError:
                if not _is_there(reply):
                    raise  # else only the answer to the send was lost
            left_ms = max(deadline_ms - clock.monotonic_ms(), 0)
            return await finish_within(clock, left_ms, reply)
        except TimeoutError:
            if _is_there(reply):
                return reply.result()
            raise NoReply(
                f"{message.topic!r}: nobody replied to the request within {timeout_ms} ms"
            ) from None
        finally:
            del self._waiting[correlation_id]

    def handle_request(self, ask: PeerRequest) -> Response | None:
        """Take a reply that a broker pushes (326); None if the request is something else."""
        if ask.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return None
        try:
            reply = self._decode(ask)
        except (RecordError, ValueError) as error:
            log.warning("a reply can't be read: %s", error)
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"the reply can't be read: {error}")
        correlation_id = reply.properties.get(PROPERTY_CORRELATION_ID, "")
        waiting = self._waiting.get(correlation_id)
        if waiting is None or waiting.done():
            log.info("a reply to %r came too late: nobody waits for it", correlation_id)
        else:
            waiting.set_result(reply)
        return Response(ResponseCode.SUCCESS)

    def close(self) -> None:
        """Fail what still waits: ClientClosed."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(ClientClosed("the producer was closed before the reply came"))

    async def _be_known(self, topic: str) -> None:
        """See to it that whichever broker gets the reply knows this client."""
        session = self._session
        name = session.with_namespace(topic)
        route = session.cached_route(name) or await session.find_route(name)
        if route is None:  # the first message creates it, at one of these brokers
            template = session.cached_route(TOPIC_AUTO_CREATE)
            route = template or await session.find_route(TOPIC_AUTO_CREATE)
        if route is None:
            raise await session.nameservers.no_route(name)
        brokers = set(route.brokers)
        for cluster in {broker.cluster or "" for broker in route.data.broker_datas}:
            reply_topic = cluster + REPLY_TOPIC_SUFFIX
            replies = session.cached_route(reply_topic) or await session.find_route(reply_topic)
            if replies is not None:
                brokers.update(replies.brokers)
        now_ms = session.clock.monotonic_ms()
        if now_ms < self._again_ms or all(map(session.is_registered_at, brokers)):
            return
        self._again_ms = now_ms + BEAT_AGAIN_MS
        await session.send_heartbeats()

    def _decode(self, ask: PeerRequest) -> ReceivedMessage:
        """The reply as if it had been pulled."""
        ext, now_ms = ask.ext, self._session.clock.now_ms()
        properties = decode_properties(ext.get("properties", "").encode())
        properties[PROPERTY_ARRIVE_TIME] = str(now_ms)
        record = Record(FRAME_BYTES_MAX)
        record.fill(ext.get("topic", "").encode(), ask.body, encode_properties(properties))
        record.queue_id = _number(ext, "queueId")
        record.flag = _number(ext, "flag")
        record.sys_flag = _number(ext, "sysFlag")
        record.born_ms = _number(ext, "bornTimestamp")
        record.reconsume_times = _number(ext, "reconsumeTimes")
        record.born_host = _host(ext.get("bornHost"))
        record.store_host = _host(ext.get("storeHost"))
        if record.prepare() != OK:
            raise RecordError(f"a reply of {len(ask.body)} bytes breaks a limit of messages")
        target = bytearray(record.size)
        record.put(memoryview(target), 0, 0, 0, _number(ext, "storeTimestamp"))
        [reply] = decode_records(
            bytes(target), "", namespace=self._session.options.namespace, received_ms=now_ms
        )
        return reply


def reply_message(request: ReceivedMessage, body: bytes | str, **fields: Any) -> Message:
    """The message that replies to a request; raises MessageIllegal if it asks for no reply.

    `fields` are Message's own: tags, keys, properties, flag…
    """
    requested = request.properties
    cluster, client = requested.get(PROPERTY_CLUSTER), requested.get(PROPERTY_REPLY_TO_CLIENT)
    correlation_id = requested.get(PROPERTY_CORRELATION_ID)
    if not cluster or not client or not correlation_id:
        raise MessageIllegal(
            f"message {request.message_id} of {request.topic!r} asks for no reply",
            hint="reply only to messages that were sent by request()",
        )
    properties = {
        **fields.pop("properties", {}),
        PROPERTY_MSG_TYPE: MSG_TYPE_REPLY,
        PROPERTY_CORRELATION_ID: correlation_id,
        PROPERTY_REPLY_TO_CLIENT: client,
    }
    if PROPERTY_TTL in requested:
        properties[PROPERTY_TTL] = requested[PROPERTY_TTL]
    return Message(cluster + REPLY_TOPIC_SUFFIX, body, properties=properties, **fields)


async def send_reply(
    session: Session,
    request: ReceivedMessage,
    message: Message,
    send: SendOne,
    *,
    timeout_ms: int,
) -> SendReceipt:
    """Send what `reply_message` made: by the broker that brought the request first, then others.

    `send` is the producer's (or the consumer's internal producer's): it must take
    SEND_REPLY_MESSAGE_V2 for messages with `is_reply`, and leave the topic's name as it is.
    """
    deadline_ms = session.clock.monotonic_ms() + timeout_ms
    route = await session.route(message.topic)
    near = [queue for queue in route.write_queues if queue.broker_name == request.broker_name]
    if near:
        try:
            return await send(message, near[0], timeout_ms)
        except PenstockError as error:
            left_ms = deadline_ms - session.clock.monotonic_ms()
            if left_ms <= 0 or len(near) == len(route.write_queues):
                raise
            log.info(
                "reply to %s: %s does not hand it on: %s",
                request.message_id,
                request.broker_name,
                error,
            )
            return await send(message, None, left_ms)
    return await send(message, None, timeout_ms)


def is_reply(message: Message) -> bool:
    """Whether a message has to be sent by SEND_REPLY_MESSAGE_V2 (325) instead of 310."""
    return bool(message.properties) and message.properties.get(PROPERTY_MSG_TYPE) == MSG_TYPE_REPLY


def _is_there(reply: "asyncio.Future[ReceivedMessage]") -> bool:
    """Whether a reply has come. An error there is none, and need not be seen by anybody else."""
    return reply.done() and not reply.cancelled() and reply.exception() is None


def _number(ext: Mapping[str, str], name: str) -> int:
    value = int(ext.get(name) or "0")
    limit = 63 if name.endswith("Timestamp") else 31
    if not -(1 << limit) <= value < 1 << limit:
        raise RecordError(f"{name} of a reply is {value}")
    return value


def _host(text: str | None) -> bytes:
    """The bytes of `ip:port`; Java may write `name/ip:port`."""
    try:
        return encode_host((text or "").rpartition("/")[2])
    except RecordError:
        return _NOWHERE
