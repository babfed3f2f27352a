"""Sends messages: attempts, retries and the choice of the broker.

The fast path (`fast_path`) creates no task: the request is written into the connection's output,
and the response completes the future. A send that has to wait (for a route, a connection, a retry)
continues in a task; later messages of the same topic are deferred until its request is written.

After a failed attempt a message goes to another broker. If it is bound to a queue, or if there is
no other broker, it goes to the same one after a pause. Attempts without a response and responses in
RETRYABLE_RESPONSES are retried; all attempts share one timeout. A broker that answered
NO_PERMISSION gets no further attempt. A message whose future was cancelled is not sent any more.
"""

import asyncio
import logging
import os
from asyncio import _get_running_loop
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from penstock.client.client_session import MemberResponse, Session
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.broker_latency import SLOW_MS, BrokerFaults
from penstock.client.producer.compression_queue import CompressionQueue
from penstock.client.producer.fast_path import FastPath, connection_of
from penstock.client.producer.in_flight import InFlightLimit
from penstock.client.producer.outgoing import BATCH_FIELDS, MessageBatch, Packer, check_topic
from penstock.client.producer.producer_options import SendOptions
from penstock.client.producer.publish_info import (
    QueueSelector,
    TopicPublishInfo,
    target_selector,
)
from penstock.client.producer.send_codec import (
    SEND_BATCH_MESSAGE,
    SEND_REPLY_MESSAGE_V2,
    PendingSend,
    SendResult,
    SendTarget,
)
from penstock.client.producer.send_failures import (
    is_denied,
    is_retryable,
    outcomes,
    send_failure,
)
from penstock.client.topic_routes import Route
from penstock.clock import finish_within, pause
from penstock.errors import (
    ClientClosed,
    ClientError,
    NoNameServer,
    PeerError,
    PeerLost,
    PeerTimeout,
    PeerUnreachable,
    PenstockError,
    SendFailed,
    TooMuchInFlight,
)
from penstock.transport.peer import PeerConnection, PeerRequest
from penstock.wire.bodies.client_bodies import ConsumerData, ProducerData
from penstock.wire.codes import TOPIC_AUTO_CREATE, ResponseCode
from penstock.wire.fields import FLAG_ONEWAY

if TYPE_CHECKING:
    from penstock.client.trace.trace_writer import Tracer

log = logging.getLogger(__name__)

MASTER_MS: Final = 2_500
"""How long a send waits if no broker of the topic has a master."""
MASTER_POLL_MS: Final = 50
RETRY_MS: Final = 50
"""Pause before a retry on the same broker; it grows with each attempt."""


class Sender(FastPath):
    """Sends the messages of one client. Member of its session."""

    def __init__(self, session: Session, group: str, options: SendOptions) -> None:
        self.in_flight = InFlightLimit(options.in_flight_max, session.clock)
        FastPath.__init__(
            self,
            session.clock,
            self.in_flight,
            BrokerFaults(options.avoid_faulty, options.avoid_ms, session.clock, session),
            session.options.timeout_ms,
        )
        self.options = options
        self.group = session.with_namespace(group)
        self.retry_not_stored = options.retry_not_stored
        self._session = session
        self._names: dict[str, str] = {}  # topic → name with namespace
        self._route_queries: dict[str, asyncio.Task[TopicPublishInfo]] = {}
        self._refreshing: set[str] = set()  # topics whose route is being refreshed
        self._compression = CompressionQueue(self, session.spawn)

    # --- lifecycle

    def start(self, tracer: "Tracer | None" = None) -> None:
        """Accept messages; the session has been started before."""
        self.packer = self.make_packer()
        self.loop = asyncio.get_running_loop()
        self.create_future = self.loop.create_future
        self.tracer = tracer
        self.pid = os.getpid()
        self.publish_infos.clear()  # after a restart: they refer to closed connections
        self.open = True

    def make_packer(self) -> Packer:
        """An encoder for one thread."""
        ip = self._session.client_id.partition("@")[0]
        return Packer(self.options, self._session.options.namespace, ip)

    async def close(self, timeout_ms: int) -> None:
        """Accept no more messages, and wait up to `timeout_ms` for those in flight."""
        self.open = False
        await self.drain(timeout_ms)
        for task in list(self._route_queries.values()):
            task.cancel()

    async def drain(self, timeout_ms: int) -> None:
        """Wait up to `timeout_ms` for messages in flight."""
        try:
            await finish_within(self.clock, timeout_ms, self.in_flight.flush())
        except TimeoutError:
            log.warning(
                "%s: %d sends were not acknowledged in time", self.group, self.in_flight.count
            )

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        return ()

    def topics(self) -> Iterable[str]:
        return tuple(self._names.values())

    def route_changed(self, route: Route) -> None:
        for topic, info in list(self.publish_infos.items()):
            if route.topic == info.name or (
                info.from_template and route.topic == TOPIC_AUTO_CREATE
            ):
                del self.publish_infos[topic]

    def handle_request(self, request: PeerRequest, address: str) -> MemberResponse | bool:
        return False

    # --- sending

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
        internal: bool = False,
        traced: bool = True,
    ) -> SendReceipt:
        """Send a message and wait for its receipt; waits first while too much is in flight."""
        if self.in_flight.full:
            timeout_ms = await self.in_flight.wait(timeout_ms or self._session.options.timeout_ms)
        return await self.submit(
            message,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
            internal=internal,
            traced=traced,
        )

    def submit(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
        internal: bool = False,
        traced: bool = True,
    ) -> "asyncio.Future[SendReceipt]":
        """Send a message; returns the future of its receipt. A bad message raises at once.

        `internal` messages may carry reserved properties.
        """
        select = None
        if queue is not None or ordering_key is not None or selector is not None:
            select = target_selector(message, queue, ordering_key, selector)
        future = self.start_send(message, select, ordering_key, timeout_ms, internal, traced)
        return cast("asyncio.Future[SendReceipt]", future)

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Send without a response: returns when the request is written. Only a request that could
        not be written is retried."""
        check_topic(message.topic)
        pending = self.make_pending(message, ordering_key, timeout_ms, False)
        pending.select = target_selector(message, queue, ordering_key, selector)
        if pending.uncompressed and self.packer is not None:
            body = pending.body
            pending.body, pending.sys_flag = await asyncio.to_thread(self.packer.compressed, body)
        last_broker = None
        for left in reversed(range(self.options.retries + 1)):
            target = await self._next_target(pending, last_broker)
            try:
                connection = await self._connection(pending, target)
            except PeerError as error:
                self._report_failure(pending, error)
                if left == 0 or isinstance(error, PeerTimeout):
                    raise
                last_broker = target.broker_name
                continue
            calls = connection.calls
            self.write_frame(calls, pending, target, calls.next_opaque(), FLAG_ONEWAY)
            return

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt]:
        """Send messages in as few requests as possible; returns their receipts in order."""
        results = await self.send_each(
            messages,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )
        receipts = [result for result in results if isinstance(result, SendReceipt)]
        for result in results:
            if isinstance(result, PenstockError):
                result.add_note(f"{len(receipts)} of {len(messages)} messages were acknowledged")
                raise result
        return receipts

    async def send_each(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt | PenstockError]:
        """As `send_batch`, but returns a receipt or an error per message.

        A bad message raises before anything is sent.
        """
        self.check_usable()
        packer = self.packer
        assert packer is not None
        batches = packer.batches(messages, self.clock.now_ms(), ordering_key)
        for batch in batches:
            check_topic(batch.messages[0].topic)
        futures: list[asyncio.Future[SendResult]] = []
        try:
            refused: TooMuchInFlight | None = None
            for batch in batches:
                try:
                    if self.in_flight.full and refused is None:
                        await self.in_flight.wait(timeout_ms or self._session.options.timeout_ms)
                    future = self._submit_batch(batch, queue, ordering_key, selector, timeout_ms)
                except TooMuchInFlight as error:
                    refused = error
                    future = asyncio.get_running_loop().create_future()
                    future.set_exception(error)
                futures.append(future)
            return await outcomes(batches, futures, len(messages))
        finally:
            for future in futures:  # after a failure: their results are no longer awaited
                if not future.cancel() and not future.cancelled():
                    future.exception()

    def _submit_batch(
        self,
        batch: MessageBatch,
        queue: MessageQueue | None,
        ordering_key: str | None,
        selector: QueueSelector | None,
        timeout_ms: int | None,
    ) -> "asyncio.Future[SendResult]":
        select = target_selector(batch.messages[0], queue, ordering_key, selector)
        if len(batch.messages) == 1:  # it may be longer than the limit of a batch
            message = batch.messages[0]
            return self.start_send(message, select, ordering_key, timeout_ms, False, True)
        topic = str.__str__(batch.messages[0].topic)  # a string enum's member as plain str
        pending = self.new_pending(batch, topic, timeout_ms)
        pending.select = select
        pending.body = batch.body
        pending.properties = batch.properties
        pending.extra_fields = BATCH_FIELDS
        pending.batch_ids = batch.ids
        pending.code = SEND_BATCH_MESSAGE
        pending.traced = self.tracer is not None
        self.write_or_defer(pending)
        return pending.future

    # --- deferred sends

    def check_usable(self) -> None:
        """Raise if nothing can be sent from here: closed, another event loop or process."""
        if not self.open or _get_running_loop() is not self.loop or self.pid != os.getpid():
            self.raise_unusable()

    def raise_unusable(self) -> None:
        self._session.check_alive()
        if self.open:
            raise ClientError(
                "the client is used on another event loop or thread than it was started on",
                hint="use asyncio.run_coroutine_threadsafe, or the synchronous client",
            )
        raise ClientClosed("the client is not started or already closed")

    def defer(self, pending: PendingSend) -> None:
        topic = pending.topic
        if topic not in self.publish_infos:
            check_topic(topic)
        pending.flush_group = self.in_flight.add(len(pending.body))
        pending.deferred = True
        self.deferred_counts[topic] = self.deferred_counts.get(topic, 0) + 1
        if pending.uncompressed or self._compression.holds(topic):
            self._compression.add(pending)
        else:
            self._session.spawn(self._first_attempt(pending))

    def compressed(self, pending: PendingSend, body: bytes, sys_flag: int) -> None:
        self.in_flight.byte_count += len(body) - len(pending.body)
        pending.body = body
        pending.sys_flag |= sys_flag
        self._session.spawn(self._first_attempt(pending))

    def dropped(self, pending: PendingSend) -> None:
        self._finish(pending, ClientClosed("the client was closed before the message was sent"))
        self._end_deferral(pending)

    async def _first_attempt(self, pending: PendingSend) -> None:
        # The time in which the application has blocked the loop, or bodies were compressed, does
        # not count.
        pending.deadline_ms = self.clock.monotonic_ms() + pending.timeout_ms
        try:
            await self._attempt(pending, None)
        finally:
            self._end_deferral(pending)

    def _end_deferral(self, pending: PendingSend) -> None:
        count = self.deferred_counts[pending.topic] - 1
        if count:
            self.deferred_counts[pending.topic] = count
        else:
            del self.deferred_counts[pending.topic]

    async def _attempt(self, pending: PendingSend, last_broker: str | None) -> None:
        """Write the request, to another broker than the last one if the queue is not given."""
        try:
            target = pending.target or await self._next_target(pending, last_broker)
            if is_denied(pending, target):
                self._give_up(pending)
                return
            count = len(pending.failures or ())
            if count and (target.broker_name == last_broker or count > self.options.retries):
                left_ms = pending.deadline_ms - self.clock.monotonic_ms()
                await pause(self.clock, min(RETRY_MS * count, max(left_ms, 0)))
            if self._is_finished(pending):
                return
            connection = await self._connection(pending, target)
            if self._is_finished(pending):
                return
            if connection.transport is None:
                assert target.peer is not None
                raise PeerLost("the connection was closed", address=target.peer.address)
            self.write_request(connection.calls, pending, target)
        except PenstockError as error:
            self.send_failed(pending, error)
        except asyncio.CancelledError:
            self._finish(pending, ClientClosed("the client was closed before the message was sent"))
            raise
        except Exception as error:  # raised by the application's selector
            self._finish(pending, error)

    def _is_finished(self, pending: PendingSend) -> bool:
        """Whether the future is cancelled, or no time is left for a retry."""
        if pending.future.done():
            self._finish(pending, None)
        elif pending.failures and self.clock.monotonic_ms() >= pending.deadline_ms:
            self._give_up(pending)
        else:
            return False
        return True

    async def _next_target(self, pending: PendingSend, last_broker: str | None) -> SendTarget:
        info = self.publish_infos.get(pending.topic) or await self._find_publish_info(pending)
        if pending.select is not None:
            return pending.select(info)
        target = info.next(self.faults, last_broker)
        for _ in range(info.count):
            if not is_denied(pending, target):
                break
            target = info.next(self.faults, last_broker)
        return target

    async def _find_publish_info(self, pending: PendingSend) -> TopicPublishInfo:
        """Query the route of a topic; one query at a time is shared by all its messages."""
        topic = pending.topic
        query = self._route_queries.get(topic)
        if query is None:
            name = topic
            if pending.code != SEND_REPLY_MESSAGE_V2:
                name = self._session.with_namespace(topic)
            query = asyncio.ensure_future(self._query_publish_info(topic, name))
            self._route_queries[topic] = query
            query.add_done_callback(lambda done: self._route_query_done(topic, done))
        left_ms = pending.deadline_ms - self.clock.monotonic_ms()
        try:
            return await finish_within(self.clock, max(left_ms, 0), asyncio.shield(query))
        except TimeoutError:
            raise NoNameServer(
                f"no route of topic {topic} within {pending.timeout_ms} ms from the NameServers "
                + self._session.nameservers.text()
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if query.cancelled() and not (task is not None and task.cancelling()):
                raise ClientClosed("the client was closed before the message was sent") from None
            raise

    def _route_query_done(self, topic: str, done: "asyncio.Task[TopicPublishInfo]") -> None:
        del self._route_queries[topic]
        if not done.cancelled():
            done.exception()  # mark as retrieved: the waiters have raised it

    async def _query_publish_info(self, topic: str, name: str) -> TopicPublishInfo:
        """From the topic's route, else from the template topic's; raises NoRoute."""
        session = self._session
        route = session.cached_route(name) or await session.find_route(name)
        if route is not None and route.lacks_master:
            route = await self._await_master(name, route)
        if route is None and self.options.create_topics:
            route = session.cached_route(TOPIC_AUTO_CREATE)
            route = route or await session.find_route(TOPIC_AUTO_CREATE)
        if route is None:
            raise await session.nameservers.no_route(name)
        info = self.publish_infos[topic] = TopicPublishInfo(session, self.group, name, route)
        self._names[topic] = name
        return info

    async def _await_master(self, name: str, route: Route) -> Route | None:
        """Wait for the next master of a topic's brokers: a failed one may be replaced soon."""
        until_ms = self.clock.monotonic_ms() + MASTER_MS
        found: Route | None = route
        while found is not None and found.lacks_master and self.clock.monotonic_ms() < until_ms:
            await pause(self.clock, MASTER_POLL_MS)
            found = await self._session.find_route(name)
        return found

    async def _connection(self, pending: PendingSend, target: SendTarget) -> PeerConnection:
        pending.target = target
        if target.peer is None:
            raise PeerUnreachable(f"no master of broker {target.broker_name!r} is known")
        pending.sent_ms = self.clock.monotonic_ms()
        left_ms = pending.deadline_ms - pending.sent_ms
        return await target.peer.writable(max(left_ms, 0))

    def write_signed(
        self, pending: PendingSend, target: SendTarget, opaque: int, command_flag: int
    ) -> None:
        assert target.peer is not None
        frame = target.peer.encode(
            pending.code, pending.fields(target), pending.body, opaque=opaque, flag=command_flag
        )
        connection_of(target).write(frame)

    # --- results of attempts

    def retry_if_not_stored(
        self, pending: PendingSend, result: SendResult, status: SendStatus
    ) -> bool:
        pending.fallback = result
        name = "" if pending.target is None else pending.target.broker_name
        error = SendFailed(f"{name} answers {status.name}")
        return self._retry(pending, error, retryable=pending.select is None)

    def send_failed(self, pending: PendingSend, error: PenstockError) -> None:
        """Retry a failed attempt, or finish the send with the error."""
        self._report_failure(pending, error)
        retryable = is_retryable(error)
        if self._retry(pending, error, retryable=retryable):
            return
        if retryable or pending.fallback is not None:
            self._give_up(pending)
        else:
            self._finish(pending, error)

    def _give_up(self, pending: PendingSend) -> None:
        """Finish after the last attempt: with a receipt that is not SEND_OK, else an error."""
        if pending.fallback is not None:
            self._finish(pending, pending.fallback)
        else:
            self._finish(pending, send_failure(pending, self.clock.monotonic_ms()))

    def _retry(self, pending: PendingSend, error: PenstockError, *, retryable: bool) -> bool:
        pending.failures = [*(pending.failures or ()), error]
        if (
            not retryable
            or not self.open
            or not self._may_retry(pending.failures)
            or pending.future.done()  # cancelled by the caller
            or self.clock.monotonic_ms() >= pending.deadline_ms
        ):
            return False
        last = None if pending.target is None else pending.target.broker_name
        pending.target = None
        log.debug(
            "topic %s: attempt %d failed, retrying: %s", pending.topic, len(pending.failures), error
        )
        self._session.spawn(self._attempt(pending, last))
        return True

    def _may_retry(self, failures: list[PenstockError]) -> bool:
        """Whether `retries` allows one more attempt. Those that have stored nothing, but that a
        later one may follow, do not count: the broker was busy, or could not be reached, as while
        another replica is elected in its place."""
        counted = sum(
            error.answer_code != ResponseCode.SYSTEM_BUSY and type(error) is not PeerUnreachable
            for error in failures
        )
        return counted <= self.options.retries and self.options.retries > 0

    def _finish(self, pending: PendingSend, result: SendResult | BaseException | None) -> None:
        """Complete the future with a receipt or an error; None if it is done already."""
        assert pending.flush_group is not None
        self.in_flight.remove(pending.flush_group, len(pending.body))
        if result is None or pending.future.done():
            return
        if isinstance(result, BaseException):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)

    def _report_failure(self, pending: PendingSend, error: PenstockError) -> None:
        """Report a faulty broker, and refresh the route if it is unreachable."""
        target = pending.target
        if target is None or not self.open or not is_retryable(error):
            return
        latency_ms = self.clock.monotonic_ms() - pending.sent_ms
        unreachable = isinstance(error, PeerUnreachable | PeerLost)
        self.faults.report(target.broker_name, latency_ms, failed=True, unreachable=unreachable)
        self.faulty_brokers.add(target.broker_name)
        if unreachable and pending.topic not in self._refreshing:
            self._refreshing.add(pending.topic)
            self._session.spawn(self._refresh_route(pending.topic))

    def report_latency(self, pending: PendingSend, latency_ms: int) -> None:
        if pending.target is not None:
            name = pending.target.broker_name
            self.faults.report(name, latency_ms)
            if latency_ms >= SLOW_MS:
                self.faulty_brokers.add(name)
            else:
                self.faulty_brokers.discard(name)

    async def _refresh_route(self, topic: str) -> None:
        try:
            await self._session.find_route(self._names[topic])
        except PenstockError as error:
            log.info("cannot refresh the route of topic %s: %s", topic, error)
        finally:
            self._refreshing.discard(topic)

    def trace(self, pending: PendingSend, result: SendResult) -> None:
        message, tracer = pending.message, self.tracer
        assert tracer is not None
        messages = message.messages if isinstance(message, MessageBatch) else [message]
        receipts = result if isinstance(result, list) else [result]
        peer = None if pending.target is None else pending.target.peer
        for one, receipt in zip(messages, receipts, strict=True):
            tracer.sent(
                one,
                receipt,
                address="" if peer is None else peer.address,
                born_ms=pending.born_ms,
                body_bytes=len(one.content),
                trace_on=pending.trace_on,
            )
