"""Messages on their way to brokers: attempts, and what is tried again where.

The usual way makes no task: the request is written into the connection's output, and the answer
sets the future. Whatever has to wait (for a route, a connection, a retry) goes on in a task; later
messages of that topic queue up behind it until it has left.

After a failed attempt a message goes to another broker, unless it is bound to its queue; then, and
where there is no other, to the same one after a moment. Tried again are attempts without an answer
and the answers of RETRYABLE_RESPONSES; all attempts share one timeout. What its caller has given up
(by cancelling its future) does not leave any more.
"""

import asyncio
import logging
import os
from asyncio import _get_running_loop
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from penstock.client.client_session import MemberResponse, Session
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.broker_latency import SLOW_MS, BrokerFaults
from penstock.client.producer.fast_path import Launcher
from penstock.client.producer.in_flight import InFlight
from penstock.client.producer.outgoing import (
    BATCH_FIELDS,
    Batch,
    Packer,
    SendOptions,
    check_topic,
)
from penstock.client.producer.publish_info import Selector, TopicLines, choice_of
from penstock.client.producer.send_codec import (
    SEND_BATCH_MESSAGE,
    SEND_REPLY_MESSAGE_V2,
    Flight,
    Line,
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
from penstock.wire.codes import RETRYABLE_RESPONSES, TOPIC_AUTO_CREATE, ResponseCode
from penstock.wire.fields import FLAG_ONEWAY

log = logging.getLogger(__name__)

AGAIN_MS: Final = 50
"""Pause before the same broker is tried again; it grows with each attempt."""


class Sender(Launcher):
    """Sends messages for one client; a member of its session."""

    def __init__(self, session: Session, group: str, options: SendOptions) -> None:
        self.in_flight = InFlight(options.in_flight_max, session.clock)
        Launcher.__init__(
            self,
            session.clock,
            self.in_flight,
            BrokerFaults(options.avoid_faulty, options.avoid_ms, session.clock),
            session.options.timeout_ms,
        )
        self.options = options
        self.group = session.with_namespace(group)
        self.retry_not_stored = options.retry_not_stored
        self._session = session
        self._names: dict[str, str] = {}  # topic → as servers know it
        self._finding: dict[str, asyncio.Task[TopicLines]] = {}
        self._refreshing: set[str] = set()
        self._lines = cast(dict[str, TopicLines], self.topics_known)

    # --- life, as a member of the session

    def start(self) -> None:
        """Begin; the session has begun before."""
        ip = self._session.client_id.partition("@")[0]
        self.packer = Packer(self.options, self._session.options.namespace, ip)
        self.loop = asyncio.get_running_loop()
        self.create_future = self.loop.create_future
        self.faults.probe_through(self._session)
        self.pid = os.getpid()
        self._lines.clear()  # those of an earlier life hold connections that are closed
        self.open = True

    async def close(self, timeout_ms: int) -> None:
        """Take no more, and wait a while for what is under way."""
        self.open = False
        await self.drain(timeout_ms)
        for task in list(self._finding.values()):
            task.cancel()

    async def drain(self, timeout_ms: int) -> None:
        """Wait a while for what is under way."""
        try:
            await finish_within(self.clock, timeout_ms, self.in_flight.flush())
        except TimeoutError:
            log.warning(
                "%s: closed while %d sends were not acknowledged", self.group, self.in_flight.count
            )

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        return ()

    def topics(self) -> Iterable[str]:
        return tuple(self._names.values())

    def route_changed(self, route: Route) -> None:
        for topic, lines in list(self._lines.items()):
            if route.topic == lines.name or (lines.template and route.topic == TOPIC_AUTO_CREATE):
                del self._lines[topic]

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        return False

    # --- sending

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
        internal: bool = False,
        traced: bool = True,
    ) -> SendReceipt:
        """Send and wait for the receipt; waits first while too much is under way."""
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
        selector: Selector | None = None,
        timeout_ms: int | None = None,
        internal: bool = False,
        traced: bool = True,
    ) -> "asyncio.Future[SendReceipt]":
        """Send; the future has the receipt. What is wrong with the message is raised at once.

        `internal` messages carry properties of the client's own machinery.
        """
        choice = None
        if queue is not None or ordering_key is not None or selector is not None:
            choice = choice_of(message, queue, ordering_key, selector)
        future: asyncio.Future[SendReceipt] = self.launch(
            message, choice, ordering_key, timeout_ms, internal, traced
        )
        return future

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Send without an answer: returns when the request is on its way. Tried again is only what
        has not left."""
        check_topic(message.topic)
        flight = self.make_flight(message, ordering_key, timeout_ms, False)
        flight.choice = choice_of(message, queue, ordering_key, selector)
        last_broker = None
        for left in reversed(range(self.options.retries + 1)):
            line = await self._line(flight, last_broker)
            try:
                connection = await self._connection(flight, line)
            except PeerError as error:
                self._report(flight, error)
                if left == 0 or isinstance(error, PeerTimeout):
                    raise
                last_broker = line.broker_name
                continue
            calls = connection.calls
            self.put(calls, flight, line, calls.next_opaque(), FLAG_ONEWAY)
            return

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt]:
        """Send messages in as few requests as possible; their receipts in the same order."""
        outcomes = await self.send_each(
            messages,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )
        receipts = [outcome for outcome in outcomes if isinstance(outcome, SendReceipt)]
        for outcome in outcomes:
            if isinstance(outcome, PenstockError):
                outcome.add_note(f"{len(receipts)} of {len(messages)} messages were acknowledged")
                raise outcome
        return receipts

    async def send_each(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt | PenstockError]:
        """As `send_batch`; gives what became of each message. Raises if nothing was sent: what is
        wrong with one of them."""
        self.check_usable()
        batches: list[Batch] = self.packer.batches(messages, self.clock.now_ms(), ordering_key)
        for batch in batches:
            check_topic(batch.messages[0].topic)
        outcomes: dict[int, SendReceipt | PenstockError] = {}
        flights: list[asyncio.Future[Any]] = []
        try:
            no_room: TooMuchInFlight | None = None
            for batch in batches:
                try:
                    if self.in_flight.full and no_room is None:
                        await self.in_flight.wait(timeout_ms or self._session.options.timeout_ms)
                    flight = self._submit_batch(batch, queue, ordering_key, selector, timeout_ms)
                except TooMuchInFlight as error:
                    flight, no_room = self.create_future(), error
                    flight.set_exception(error)
                flights.append(flight)
            for batch, flight in zip(batches, flights, strict=True):
                try:
                    found = await flight
                except PenstockError as error:
                    found = [error] * len(batch.places)
                found = found if isinstance(found, list) else [found]
                outcomes.update(zip(batch.places, found, strict=True))
        finally:
            for flight in flights:  # of those that nobody awaits any more
                if not flight.cancel() and not flight.cancelled():
                    flight.exception()
        return [outcomes[place] for place in range(len(messages))]

    def _submit_batch(
        self,
        batch: Batch,
        queue: MessageQueue | None,
        ordering_key: str | None,
        selector: Selector | None,
        timeout_ms: int | None,
    ) -> "asyncio.Future[Any]":
        if len(batch.messages) == 1:  # it may be longer than a batch can be
            return self.submit(
                batch.messages[0],
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
            )
        topic = str.__str__(batch.messages[0].topic)  # members of enums are text too
        flight = self.empty_flight(batch, topic, timeout_ms)
        flight.choice = choice_of(batch.messages[0], queue, ordering_key, selector)
        flight.body = batch.body
        flight.properties = batch.properties
        flight.extra = BATCH_FIELDS
        flight.ids = batch.ids
        flight.code = SEND_BATCH_MESSAGE
        flight.traced = self.tracer is not None
        self.depart(flight)
        future: asyncio.Future[Any] = flight.future
        return future

    # --- what can't leave at once

    def check_usable(self) -> None:
        """Raise why nothing can be sent from here, if so."""
        if not self.open or _get_running_loop() is not self.loop or self.pid != os.getpid():
            self.refuse()

    def refuse(self) -> None:
        self._session.check_alive()
        if self.open:
            raise ClientError(
                "the client is called from another thread or event loop than it was started on",
                hint="call it there (asyncio.run_coroutine_threadsafe), or use the blocking client",
            )
        raise ClientClosed("the client is not started, or closed")

    def depart_later(self, flight: Flight) -> None:
        topic = flight.topic
        if topic not in self.topics_known:
            check_topic(topic)
        flight.wave = self.in_flight.enter(len(flight.body))
        flight.late = True
        self.waiting[topic] = self.waiting.get(topic, 0) + 1
        self._session.spawn(self._first_attempt(flight))

    async def _first_attempt(self, flight: Flight) -> None:
        try:
            await self._attempt(flight, None)
        finally:
            left = self.waiting[flight.topic] - 1
            if left:
                self.waiting[flight.topic] = left
            else:
                del self.waiting[flight.topic]

    async def _attempt(self, flight: Flight, last_broker: str | None) -> None:
        """Get a message on its way, to another broker than the last one if it may choose."""
        try:
            line = flight.line or await self._line(flight, last_broker)
            count = len(flight.attempts or ())
            if count and (line.broker_name == last_broker or count > self.options.retries):
                await pause(self.clock, AGAIN_MS * count)
            if self._is_over(flight):
                return
            connection = await self._connection(flight, line)
            if self._is_over(flight):
                return
            if connection.transport is None:
                raise PeerLost("the connection ended", address=line.peer.address)
            self.write(connection.calls, flight, line)
        except PenstockError as error:
            self.crashed(flight, error)
        except asyncio.CancelledError:
            self._end(flight, ClientClosed("the client was closed before the message had left"))
            raise
        except Exception as error:  # of the application's selector
            self._end(flight, error)

    def _is_over(self, flight: Flight) -> bool:
        """Whether nobody waits for it any more, or no time is left to try it again."""
        if flight.future.done():
            self._end(flight, None)
        elif flight.attempts and self.clock.monotonic_ms() >= flight.deadline_ms:
            self._give_up(flight)
        else:
            return False
        return True

    async def _line(self, flight: Flight, last_broker: str | None) -> Line:
        lines = self._lines.get(flight.topic) or await self._find_lines(flight)
        if flight.choice is None:
            return lines.next(self.faults, last_broker)
        line: Line = flight.choice(lines)
        return line

    async def _find_lines(self, flight: Flight) -> TopicLines:
        """One look at a time for a topic's queues, shared by all its messages."""
        topic = flight.topic
        task = self._finding.get(topic)
        if task is None:
            name = (
                topic
                if flight.code == SEND_REPLY_MESSAGE_V2
                else self._session.with_namespace(topic)
            )
            task = self._finding[topic] = asyncio.ensure_future(self._lines_of(topic, name))
            task.add_done_callback(lambda done: self._found_lines(topic, done))
        left_ms = flight.deadline_ms - self.clock.monotonic_ms()
        try:
            return await finish_within(self.clock, max(left_ms, 0), asyncio.shield(task))
        except TimeoutError:
            raise NoNameServer(
                f"no route of {topic} within {flight.timeout_ms} ms from the NameServers "
                + self._session.nameservers.text()
            ) from None
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if task.cancelled() and not (me is not None and me.cancelling()):
                raise ClientClosed("the client was closed before the message had left") from None
            raise

    def _found_lines(self, topic: str, done: "asyncio.Task[TopicLines]") -> None:
        del self._finding[topic]
        if not done.cancelled():
            done.exception()  # those who waited have it

    async def _lines_of(self, topic: str, name: str) -> TopicLines:
        """The queues by the topic's route, else by that of the template; raises NoRoute."""
        session = self._session
        route = session.cached_route(name) or await session.find_route(name)
        if route is None:
            route = session.cached_route(TOPIC_AUTO_CREATE)
            route = route or await session.find_route(TOPIC_AUTO_CREATE)
        if route is None:
            raise await session.nameservers.no_route(name)
        lines = self._lines[topic] = TopicLines(session, self.group, name, route)
        self._names[topic] = name
        return lines

    async def _connection(self, flight: Flight, line: Line) -> PeerConnection:
        flight.line = line
        if line.peer is None:
            raise PeerUnreachable(f"no route names the broker {line.broker_name!r}")
        flight.sent_ms = self.clock.monotonic_ms()
        left_ms = flight.deadline_ms - flight.sent_ms
        connection: PeerConnection = await line.peer.writable(max(left_ms, 0))
        return connection

    def put_signed(self, flight: Flight, line: Line, opaque: int, command_flag: int) -> None:
        frame = line.peer.encode(
            flight.code, flight.fields(line), flight.body, opaque=opaque, flag=command_flag
        )
        line.peer.connection.write(frame)

    # --- how attempts end

    def not_stored(self, flight: Flight, result: Any, status: SendStatus) -> bool:
        flight.fallback = result
        name = "" if flight.line is None else flight.line.broker_name
        error = SendFailed(f"{name} answers {status.name}")
        return self._try_again(flight, error, retryable=flight.choice is None)

    def crashed(self, flight: Flight, error: PenstockError) -> None:
        """An attempt has failed: again, or this was the end of it."""
        self._report(flight, error)
        retryable = _is_retryable(error)
        if self._try_again(flight, error, retryable=retryable):
            return
        if retryable or flight.fallback is not None:
            self._give_up(flight)
        else:
            self._end(flight, error)

    def _give_up(self, flight: Flight) -> None:
        """No further attempt: what is stored less safely is better than an error."""
        if flight.fallback is not None:
            self._end(flight, flight.fallback)
        else:
            self._end(flight, _failure(flight, self.clock.monotonic_ms()))

    def _try_again(self, flight: Flight, error: PenstockError, *, retryable: bool) -> bool:
        flight.attempts = [*(flight.attempts or ()), error]
        if (
            not retryable
            or not self.open
            or not self._may_count(flight.attempts)
            or flight.future.done()  # given up by its caller
            or self.clock.monotonic_ms() >= flight.deadline_ms
        ):
            return False
        last = None if flight.line is None else flight.line.broker_name
        flight.line = None
        log.debug(
            "%s: attempt %d failed, trying again: %s", flight.topic, len(flight.attempts), error
        )
        self._session.spawn(self._attempt(flight, last))
        return True

    def _may_count(self, attempts: list[PenstockError]) -> bool:
        """Whether one more is allowed. A broker that was too busy has not stored the message and
        asks for patience: that does not count, as long as there is time."""
        counted = sum(error.answer_code != ResponseCode.SYSTEM_BUSY for error in attempts)
        return counted <= self.options.retries and self.options.retries > 0

    def _end(self, flight: Flight, result: Any) -> None:
        """It is over: a receipt after all, or an error."""
        self.in_flight.leave(flight.wave, len(flight.body))
        if flight.future.done():
            return
        if isinstance(result, BaseException):
            flight.future.set_exception(result)
        else:
            flight.future.set_result(result)

    def _report(self, flight: Flight, error: PenstockError) -> None:
        """Tell whoever keeps count of brokers' faults; look for a new route if one is gone."""
        line = flight.line
        if line is None or not self.open or not _is_retryable(error):
            return
        latency_ms = self.clock.monotonic_ms() - flight.sent_ms
        unreachable = isinstance(error, PeerUnreachable | PeerLost)
        self.faults.report(line.broker_name, latency_ms, failed=True, unreachable=unreachable)
        self.troubled.add(line.broker_name)
        if unreachable and flight.topic not in self._refreshing:
            self._refreshing.add(flight.topic)
            self._session.spawn(self._refresh(flight.topic))

    def recovered(self, flight: Flight, latency_ms: int) -> None:
        if flight.line is not None:
            name = flight.line.broker_name
            self.faults.report(name, latency_ms)
            if latency_ms >= SLOW_MS:
                self.troubled.add(name)
            else:
                self.troubled.discard(name)

    async def _refresh(self, topic: str) -> None:
        try:
            await self._session.find_route(self._names[topic])
        except PenstockError as error:
            log.info("no new route of %s: %s", topic, error)
        finally:
            self._refreshing.discard(topic)

    def trace(self, flight: Flight, result: Any) -> None:
        batch = isinstance(flight.message, Batch)
        messages = flight.message.messages if batch else [flight.message]
        address = flight.line.peer.address if flight.line is not None else ""
        for message, receipt in zip(messages, result if batch else [result], strict=True):
            self.tracer.sent(
                message,
                receipt,
                address=address,
                began_ms=flight.began_ms,
                body_bytes=len(message.content),
                trace_on=flight.trace_on,
            )


def _is_retryable(error: PenstockError) -> bool:
    return isinstance(error, PeerError) or error.answer_code in RETRYABLE_RESPONSES


def _failure(flight: Flight, monotonic_ms: int) -> SendFailed:
    attempts = tuple(flight.attempts or ())
    took_ms = monotonic_ms - flight.deadline_ms + flight.timeout_ms
    causes = "; ".join(error.message for error in attempts)
    count = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
    failure = SendFailed(
        f"{flight.topic}: no acknowledgement after {count} in {took_ms} ms: {causes}",
        attempts=attempts,
    )
    failure.__cause__ = attempts[-1]
    return failure
