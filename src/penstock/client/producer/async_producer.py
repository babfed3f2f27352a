"""`AsyncProducer`: sends messages."""

import asyncio
import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.client.client_options import takes_options
from penstock.client.client_session import MemberResponse, Session
from penstock.client.lifetime import Lifetime
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.accumulator import Accumulator, Batching
from penstock.client.producer.outgoing import check_topic
from penstock.client.producer.producer_options import ProducerOptions
from penstock.client.producer.publish_info import QueueSelector
from penstock.client.producer.request_client import RequestClient, reply_message, send_reply
from penstock.client.producer.sending import Sender
from penstock.client.producer.span_sender import SpanSender
from penstock.client.received_message import ReceivedMessage
from penstock.client.telemetry.span_creation import make_spans
from penstock.client.topic_routes import Route
from penstock.client.trace.trace_writer import Tracer, make_tracer
from penstock.errors import InvalidParameter, PenstockError
from penstock.transport.peer import PeerRequest
from penstock.wire.bodies.client_bodies import ConsumerData, ProducerData
from penstock.wire.codes import RequestCode

REQUEST_MS = 3_000
"""Default timeout of `request`."""


class AsyncProducer(Lifetime):
    """Sends messages. The options are described at `ProducerOptions`.

    Create, start and use it on one event loop, in one process. With `in_flight_max` messages in
    flight `send` waits and `submit` raises TooMuchInFlight.
    """

    @takes_options(ProducerOptions)
    def __init__(self, options: ProducerOptions) -> None:
        self._configure(options)

    def _configure(self, options: ProducerOptions) -> None:
        self.options = options
        self.group = options.group
        self._session = Session(options)
        self._spans = make_spans(self._session)
        self._sender = Sender(self._session, options.group, options)
        if self._spans is not None:
            self.carries_context = True
            self._sender = SpanSender(self._session, options.group, options, self._spans)
        self._requests = RequestClient(self._session)
        batching = options.batching
        self._batching = Batching() if batching is True else batching or None
        self._accumulator: Accumulator | None = None
        self._tracer: Tracer | None = None

    @property
    def direct_sender(self) -> Sender | None:
        """The sender of a started producer, if another thread may make the first attempt of a send:
        nothing else takes part in it."""
        plain = self._accumulator is None and self._tracer is None and self._spans is None
        return self._sender if plain and not self.options.retry_not_stored else None

    # --- lifecycle

    async def start(self) -> None:
        """Start; `async with` does it. No request is sent to a server before the first send."""
        if self._session.started:
            return
        await self._session.start()
        self._tracer = make_tracer(self._session, self.group, self._send_trace)
        self._sender.start(self._tracer)
        if self._batching is not None:
            self._accumulator = Accumulator(
                self._send_together,
                self._batching,
                self._session.clock,
                self.options.in_flight_max,
                prepare=None if self._spans is None else self._spans.create,
            )
        await self._session.join(self)

    async def close(self) -> None:
        """Flush, wait for messages in flight (up to `timeout_ms`), and unregister."""
        if not self._session.started:
            return
        if self._accumulator is not None:
            await self._accumulator.close()
        self._requests.close()
        timeout_ms = self._session.options.timeout_ms
        if self._tracer is not None:  # traces are sent by the same sender, after their messages
            await self._sender.drain(timeout_ms)
            await self._tracer.close()
        await self._sender.close(timeout_ms)
        await self._session.leave(self)
        await self._session.close()

    # --- sending

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> SendReceipt:
        """Send a message and wait for the acknowledgement.

        It goes to the next queue of the topic in turn, to `queue`, to the queue of its
        `ordering_key`, or to the queue that `selector(queues, message)` returns.
        """
        if self._accumulator is not None and _may_batch(ordering_key, selector, timeout_ms):
            in_flight = self._accumulator.in_flight
            self._sender.check_usable()
            if in_flight.full:
                await in_flight.wait(self.options.timeout_ms)
            return await self._accumulator.add(message, queue)
        return await self._sender.send(
            message,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )

    def submit(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> "asyncio.Future[SendReceipt]":
        """Send a message without waiting; returns the future of the receipt."""
        if self._accumulator is not None and _may_batch(ordering_key, selector, timeout_ms):
            self._sender.check_usable()
            return self._accumulator.add(message, queue)
        return self._sender.submit(
            message,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Send a message without an acknowledgement; returns when the request is written."""
        await self._sender.send_oneway(
            message,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt]:
        """Send messages in as few requests as possible; returns one receipt per message.

        Bodies are not compressed. If a request fails, messages of other requests may be stored; the
        error tells how many were acknowledged.
        """
        return await self._sender.send_batch(
            list(messages),
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )

    async def flush(self) -> None:
        """Return when every message submitted before is acknowledged or has failed."""
        if self._accumulator is not None:
            await self._accumulator.flush()
        await self._sender.in_flight.flush()

    async def recall(self, topic: str, handle: str) -> str:
        """Cancel a timer message by the `recall_handle` of its receipt; returns the message id.

        Raises if the message is already delivered or the handle is not valid.
        """
        check_topic(topic)
        self._session.check_alive()
        name = self._session.with_namespace(topic)
        broker, key = _parse_recall_handle(handle)
        if self._session.master_address(broker) is None:
            await self._session.find_route(name)
        peer = self._session.master(broker)
        ext = {
            "topic": name,
            "recallHandle": handle,
            "producerGroup": self._sender.group,
            "bname": broker,
        }
        try:
            answer = await self._session.call(peer, RequestCode.RECALL_MESSAGE, ext)
        except PenstockError:
            self._trace_recall(topic, key, success=False)
            raise
        message_id = answer.ext.get("msgId", key)
        self._trace_recall(topic, message_id, success=True)
        return message_id

    async def request(
        self, message: Message, *, queue: MessageQueue | None = None, timeout_ms: int = REQUEST_MS
    ) -> ReceivedMessage:
        """Send a message and wait for a consumer's reply; raises NoReply."""
        self._session.check_alive()
        return await self._requests.request(
            message, self._send_one, queue=queue, timeout_ms=timeout_ms
        )

    async def reply(
        self, request: ReceivedMessage, body: bytes | str, **fields: Any
    ) -> SendReceipt:
        """Reply to a request; `fields` are those of Message."""
        message = reply_message(request, body, **fields)
        timeout_ms = self._session.options.timeout_ms
        return await send_reply(
            self._session, request, message, self._send_one, timeout_ms=timeout_ms
        )

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The writable queues of a topic; raises NoRoute."""
        check_topic(topic)
        route = await self._session.route(self._session.with_namespace(topic))
        return tuple(
            MessageQueue(topic, queue.broker_name, queue.queue_id) for queue in route.write_queues
        )

    # --- SessionMember

    def producers(self) -> Iterable[ProducerData]:
        return (ProducerData(group_name=self._sender.group),)

    def consumers(self) -> Iterable[ConsumerData]:
        return ()

    def topics(self) -> Iterable[str]:
        return self._sender.topics()

    def route_changed(self, route: Route) -> None:
        self._sender.route_changed(route)

    def handle_request(self, request: PeerRequest, address: str) -> MemberResponse | bool:
        if request.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return self._requests.handle_request(request)
        return False

    # --- send functions for request-reply, batching and traces

    async def _send_one(
        self, message: Message, queue: MessageQueue | None, timeout_ms: int
    ) -> SendReceipt:
        return await self._sender.send(message, queue=queue, timeout_ms=timeout_ms, internal=True)

    async def _send_together(
        self, messages: Sequence[Message], queue: MessageQueue | None
    ) -> Sequence[SendReceipt | PenstockError]:
        if self._spans is None:
            return await self._send_request(messages, queue)
        with self._spans.batch_context(messages):
            return await self._send_request(messages, queue)

    async def _send_request(
        self, messages: Sequence[Message], queue: MessageQueue | None
    ) -> Sequence[SendReceipt | PenstockError]:
        if len(messages) == 1:
            return [await self._sender.send(messages[0], queue=queue)]
        return await self._sender.send_each(messages, queue=queue)

    async def _send_trace(self, message: Message) -> SendReceipt:
        return await self._sender.send(message, traced=False)

    def _trace_recall(self, topic: str, message_id: str, *, success: bool) -> None:
        if self._tracer is not None:
            self._tracer.recalled(topic=topic, message_id=message_id, success=success)


def _may_batch(
    ordering_key: str | None, selector: QueueSelector | None, timeout_ms: int | None
) -> bool:
    """Whether automatic batching applies to a send with these arguments."""
    return ordering_key is None and selector is None and timeout_ms is None


def _parse_recall_handle(handle: str) -> tuple[str, str]:
    """Broker and message id of a recall handle: base64url("v1 topic broker time id")."""
    try:
        data = handle.encode("ascii")
        text = base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4)).decode()
    except (ValueError, binascii.Error):
        text = ""
    words = text.split(" ")
    if len(words) < 5 or words[0] != "v1":
        raise InvalidParameter(
            f"{handle[:40]!r} is not a recall handle", hint="give the recall_handle of a receipt"
        )
    return words[2], words[4]
