"""The producer: an application's way to send messages."""

import asyncio
import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from penstock.client.client_options import ClientKeywords, ClientOptions
from penstock.client.client_session import MemberResponse, Session
from penstock.client.lifetime import Lifetime
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.accumulator import Accumulator, Batching
from penstock.client.producer.outgoing import MESSAGE_BYTES_MAX, SendOptions, check_topic
from penstock.client.producer.publish_info import Selector
from penstock.client.producer.request_client import Requests, reply_message, send_reply
from penstock.client.producer.sending import Sender
from penstock.client.received_message import ReceivedMessage
from penstock.client.topic_routes import Route
from penstock.client.trace.trace_writer import Tracer, make_tracer
from penstock.errors import BadSetting, InvalidParameter, NoRoute, PenstockError
from penstock.transport.peer import PeerRequest
from penstock.wire.bodies.client_bodies import ConsumerData, ProducerData
from penstock.wire.codes import RequestCode, group_fault

GROUP_DEFAULT = "penstock"
REQUEST_MS = 3_000


class AsyncProducer(Lifetime):
    """Sends messages. Made, started and used on one event loop, in one process.

    `retries` are further attempts, on another broker where there is one; all attempts share
    `timeout_ms`. `retry_not_stored` tries again too where a broker has the message and is less
    sure of it than it should be (FLUSH_DISK_TIMEOUT and the like). `avoid_faulty` keeps away from
    brokers that failed or were slow, for `avoid_ms` or, without it, as long as RocketMQ does.
    Bodies from `compress_above_bytes` on are compressed. `batching` sends what is submitted within
    a few milliseconds together. At most `in_flight_max` messages wait for their acknowledgement:
    `send` then waits, `submit` raises TooMuchInFlight.
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        group: str = GROUP_DEFAULT,
        retries: int = 2,
        retry_not_stored: bool = False,
        compression: str | None = "zlib",
        compress_above_bytes: int = 4096,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        avoid_faulty: bool = True,
        avoid_ms: int | None = None,
        batching: Batching | bool = False,
        in_flight_max: int = 10_000,
        **client: Unpack[ClientKeywords],
    ) -> None:
        fault = group_fault(group)
        if fault is not None:
            raise BadSetting(fault, hint="choose another group name")
        options = SendOptions(
            retries=retries,
            retry_not_stored=retry_not_stored,
            compression=compression,
            compress_above_bytes=compress_above_bytes,
            message_bytes_max=message_bytes_max,
            avoid_faulty=avoid_faulty,
            avoid_ms=avoid_ms,
            in_flight_max=in_flight_max,
        )
        self.group = group
        self._session = Session(ClientOptions.of(nameservers, client))
        self._sender = Sender(self._session, group, options)
        self._requests = Requests(self._session)
        self._batching = Batching() if batching is True else batching or None
        self._accumulator: Accumulator | None = None
        self._tracer: Tracer | None = None

    # --- life

    async def start(self) -> None:
        """Begin; `async with` does it. Nothing is asked of a server before the first send."""
        if self._session.started:
            return
        await self._session.start()
        self._sender.start()
        self._tracer = make_tracer(self._session, self.group, self._send_trace)
        self._sender.tracer = self._tracer
        if self._batching is not None:
            self._accumulator = Accumulator(
                self._send_together,
                self._batching,
                self._session.clock,
                self._sender.options.in_flight_max,
            )
        await self._session.join(self)

    async def close(self) -> None:
        """Send what waits, wait (a bounded time) for what is under way, say goodbye."""
        if not self._session.started:
            return
        if self._accumulator is not None:
            await self._accumulator.close()
        self._requests.close()
        timeout_ms = self._session.options.timeout_ms
        if self._tracer is not None:  # its traces leave by the sender, after what they are about
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
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> SendReceipt:
        """Send and wait until a broker has it.

        It goes to the next of the topic's queues, to `queue`, to the one that messages with the
        same `ordering_key` go to, or to the one that `selector(queues, message)` returns.
        """
        if self._accumulator is not None and _may_wait(message, ordering_key, selector, timeout_ms):
            held = self._accumulator.held
            self._sender.check_usable()
            if held.full:
                await held.wait(self._session.options.timeout_ms)
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
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> "asyncio.Future[SendReceipt]":
        """As `send`, without waiting: the future has the receipt or the error."""
        if self._accumulator is not None and _may_wait(message, ordering_key, selector, timeout_ms):
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
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Send and hope: returns when the message is on its way, and nobody tells more."""
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
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt]:
        """Send many at once, in as few requests as topics and sizes allow; one receipt for each.

        Bodies are not compressed. If a request fails, the others may have been stored: the error
        says how many messages were acknowledged.
        """
        return await self._sender.send_batch(
            list(messages),
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )

    async def flush(self) -> None:
        """Return when everything submitted before has its receipt or its error."""
        if self._accumulator is not None:
            await self._accumulator.flush()
        await self._sender.in_flight.flush()

    async def recall(self, topic: str, handle: str) -> str:
        """Call back a message that waits for its time, by its receipt's `recall_handle`.

        Gives the id of the message. Raises a refusal if it is too late or the handle is wrong.
        """
        check_topic(topic)
        self._session.check_alive()
        name = self._session.with_namespace(topic)
        broker, key = _parts_of(handle)
        if self._session.address_of(broker) is None:
            await self._session.route(name)
        if self._session.address_of(broker) is None:
            raise NoRoute(f"no address is known of the broker {broker!r}, which has the message")
        peer = self._session.broker(broker)
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
        """Send a message and wait for a consumer's reply to it; raises NoReply."""
        self._session.check_alive()
        return await self._requests.request(
            message, self._send_one, queue=queue, timeout_ms=timeout_ms
        )

    async def reply(
        self, request: ReceivedMessage, body: bytes | str, **fields: Any
    ) -> SendReceipt:
        """Answer a request; `fields` are those of Message."""
        message = reply_message(request, body, **fields)
        timeout_ms = self._session.options.timeout_ms
        return await send_reply(
            self._session, request, message, self._send_one, timeout_ms=timeout_ms
        )

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that can be written to; raises NoRoute."""
        check_topic(topic)
        route = await self._session.route(self._session.with_namespace(topic))
        return tuple(
            MessageQueue(topic, queue.broker_name, queue.queue_id) for queue in route.write_queues
        )

    # --- a member of the session

    def producers(self) -> Iterable[ProducerData]:
        return (ProducerData(group_name=self._sender.group),)

    def consumers(self) -> Iterable[ConsumerData]:
        return ()

    def topics(self) -> Iterable[str]:
        return self._sender.topics()

    def route_changed(self, route: Route) -> None:
        self._sender.route_changed(route)

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        if ask.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return self._requests.handle_request(ask)
        return False

    # --- ways in for the parts of the client

    async def _send_one(
        self, message: Message, queue: MessageQueue | None, timeout_ms: int
    ) -> SendReceipt:
        return await self._sender.send(message, queue=queue, timeout_ms=timeout_ms, internal=True)

    async def _send_together(
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


def _may_wait(
    message: Message, ordering_key: str | None, selector: Selector | None, timeout_ms: int | None
) -> bool:
    """Whether a message may be sent together with others, a little later."""
    return ordering_key is None and selector is None and timeout_ms is None


def _parts_of(handle: str) -> tuple[str, str]:
    """Broker and message id of a recall handle: base64url("v1 topic broker time id")."""
    try:
        data = handle.encode("ascii")
        text = base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4)).decode()
    except (ValueError, binascii.Error):
        text = ""
    words = text.split(" ")
    if len(words) < 5 or words[0] != "v1":
        raise InvalidParameter(
            f"{handle[:40]!r} is no recall handle", hint="give the recall_handle of a receipt"
        )
    return words[2], words[4]
