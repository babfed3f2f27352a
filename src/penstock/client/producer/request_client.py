"""Request-reply: a producer sends a message and waits for the consumer's reply.

A request carries CORRELATION_ID, REPLY_TO_CLIENT (the client id of this session) and TTL. The
consumer sends its reply as a message to `<cluster>_REPLY_TOPIC` with its own request code
(SEND_REPLY_MESSAGE_V2; see `is_reply`). The broker pushes it to the requesting client
(PUSH_REPLY_MESSAGE_TO_CLIENT), which must be registered there by a heartbeat; so the client first
sends a heartbeat to each broker of the cluster that has none yet.
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
from penstock.wire.java_numbers import parse_int, parse_long
from penstock.wire.message import decode_properties, encode_host, encode_properties
from penstock.wire.record import OK, Record

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_MS: Final = 1_000
"""At most one round of heartbeats in this time, if a broker does not acknowledge them."""

_UNKNOWN_HOST: Final = bytes(8)

SendOne: TypeAlias = Callable[[Message, MessageQueue | None, int], Awaitable[SendReceipt]]
"""Sends (message, queue or None, timeout_ms) with the producer's retries; returns the receipt."""


class RequestClient:
    """Pending requests of one producer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: dict[str, asyncio.Future[ReceivedMessage]] = {}  # by correlation id
        self._next_heartbeat_ms = 0

    async def request(
        self, message: Message, send: SendOne, *, queue: MessageQueue | None = None, timeout_ms: int
    ) -> ReceivedMessage:
        """Send a request and wait for the reply, both within `timeout_ms`; raises NoReply."""
        clock = self._session.clock
        deadline_ms = clock.monotonic_ms() + timeout_ms
        correlation_id = str(uuid.uuid4())
        request = replace(
            message,
            properties={
                **message.properties,
                PROPERTY_CORRELATION_ID: correlation_id,
                PROPERTY_REPLY_TO_CLIENT: self._session.client_id,
                PROPERTY_TTL: str(timeout_ms),
            },
        )
        reply: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._pending[correlation_id] = reply
        try:
            await finish_within(clock, timeout_ms, self._register(message.topic))
            left_ms = max(deadline_ms - clock.monotonic_ms(), 1)
            try:
                await send(request, queue, left_ms)
            except PenstockError:
                if not _has_result(reply):
                    raise  # otherwise only the response to the send was lost
            left_ms = max(deadline_ms - clock.monotonic_ms(), 0)
            return await finish_within(clock, left_ms, reply)
        except TimeoutError:
            if _has_result(reply):
                return reply.result()
            raise NoReply(
                f"no reply to the request to topic {message.topic!r} within {timeout_ms} ms"
            ) from None
        finally:
            del self._pending[correlation_id]

    def handle_request(self, request: PeerRequest) -> Response | None:
        """Accept a reply that a broker pushes (326); None if the request is something else."""
        if request.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return None
        try:
            reply = self._decode(request)
        except (RecordError, ValueError) as error:
            log.warning("cannot decode a reply: %s", error)
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"cannot decode the reply: {error}")
        correlation_id = reply.properties.get(PROPERTY_CORRELATION_ID, "")
        pending = self._pending.get(correlation_id)
        if pending is None or pending.done():
            log.info("no request is pending for the reply with correlation id %s", correlation_id)
        else:
            pending.set_result(reply)
        return Response(ResponseCode.SUCCESS)

    def close(self) -> None:
        """Fail all pending requests with ClientClosed."""
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(ClientClosed("the producer was closed before the reply came"))

    async def _register(self, topic: str) -> None:
        """Send heartbeats so that every broker that may get the reply knows this client."""
        session = self._session
        name = session.with_namespace(topic)
        route = session.cached_route(name) or await session.find_route(name)
        if route is None:  # the first message creates the topic on one of these brokers
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
        if now_ms < self._next_heartbeat_ms or all(map(session.is_registered_at, brokers)):
            return
        self._next_heartbeat_ms = now_ms + HEARTBEAT_INTERVAL_MS
        await session.send_heartbeats()

    def _decode(self, request: PeerRequest) -> ReceivedMessage:
        """The reply as a received message."""
        ext, now_ms = request.ext, self._session.clock.now_ms()
        properties = decode_properties(ext.get("properties", "").encode())
        properties[PROPERTY_ARRIVE_TIME] = str(now_ms)
        record = Record(FRAME_BYTES_MAX)
        record.fill(ext.get("topic", "").encode(), request.body, encode_properties(properties))
        record.queue_id = _number(ext, "queueId")
        record.flag = _number(ext, "flag")
        record.sys_flag = _number(ext, "sysFlag")
        record.born_ms = _number(ext, "bornTimestamp")
        record.reconsume_times = _number(ext, "reconsumeTimes")
        record.born_host = _host(ext.get("bornHost"))
        record.store_host = _host(ext.get("storeHost"))
        if record.prepare() != OK:
            raise RecordError(f"a reply of {len(request.body)} bytes exceeds a limit of records")
        target = bytearray(record.size)
        record.put(memoryview(target), 0, 0, 0, _number(ext, "storeTimestamp"))
        [reply] = decode_records(
            bytes(target), "", namespace=self._session.options.namespace, received_ms=now_ms
        )
        return reply


def reply_message(request: ReceivedMessage, body: bytes | str, **fields: Any) -> Message:
    """The reply to a request; raises MessageIllegal if the message is not a request.

    `fields` are fields of Message: tags, keys, properties, flag…
    """
    requested = request.properties
    cluster, client = requested.get(PROPERTY_CLUSTER), requested.get(PROPERTY_REPLY_TO_CLIENT)
    correlation_id = requested.get(PROPERTY_CORRELATION_ID)
    if not cluster or not client or not correlation_id:
        raise MessageIllegal(
            f"message {request.message_id} of topic {request.topic!r} is not a request",
            hint="reply only to messages that were sent with request()",
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
    """Send a reply made by `reply_message`: first to the request's broker, then to others.

    `send` has to use SEND_REPLY_MESSAGE_V2 for messages with `is_reply`, and must not add a
    namespace to their topic.
    """
    deadline_ms = session.clock.monotonic_ms() + timeout_ms
    route = await session.route(message.topic)
    queues = [queue for queue in route.write_queues if queue.broker_name == request.broker_name]
    if queues:
        try:
            return await send(message, queues[0], timeout_ms)
        except PenstockError as error:
            left_ms = deadline_ms - session.clock.monotonic_ms()
            if left_ms <= 0 or len(queues) == len(route.write_queues):
                raise
            log.info(
                "broker %s did not accept the reply to %s, trying another: %s",
                request.broker_name,
                request.message_id,
                error,
            )
            return await send(message, None, left_ms)
    return await send(message, None, timeout_ms)


def is_reply(message: Message) -> bool:
    """Whether a message is a reply, which is sent with SEND_REPLY_MESSAGE_V2 (325)."""
    return bool(message.properties) and message.properties.get(PROPERTY_MSG_TYPE) == MSG_TYPE_REPLY


def _has_result(reply: "asyncio.Future[ReceivedMessage]") -> bool:
    """Whether a reply has come; marks an error of the future as retrieved."""
    return reply.done() and not reply.cancelled() and reply.exception() is None


def _number(ext: Mapping[str, str], name: str) -> int:
    parse = parse_long if name.endswith("Timestamp") else parse_int
    text = ext.get(name) or "0"
    value = parse(text)
    if value is None:
        raise RecordError(f"{name} of a reply is {text[:40]!r}, not a number in range")
    return value


def _host(text: str | None) -> bytes:
    """The encoded `ip:port`; Java may write `name/ip:port`."""
    try:
        return encode_host((text or "").rpartition("/")[2])
    except RecordError:
        return _UNKNOWN_HOST
