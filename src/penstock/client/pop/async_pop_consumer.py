"""`AsyncPopConsumer`, the POP consumer: messages are invisible for a while and are acknowledged.

Queues are not assigned and there is no rebalancing: any member of the group can pop any message.
`receive`, `ack` and `extend` are for applications with their own loop; `on` and `run` call handlers
(`pop_handlers`).
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from penstock.client.client_options import takes_options
from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer.dispatch.handlers import Function, Handlers
from penstock.client.consumer.subscription import Subscription
from penstock.client.handler_failures import HandlerFailures
from penstock.client.lifetime import Lifetime
from penstock.client.pop.ack_client import PopAckClient
from penstock.client.pop.pop_diagnosis import PopDiagnosis
from penstock.client.pop.pop_handlers import PopHandlerRunner
from penstock.client.pop.pop_options import PopConsumerOptions, check_invisible_ms
from penstock.client.pop.pop_source import PopLimits, PopSource
from penstock.client.pop.popped_messages import MESSAGES_MAX, PopTarget, receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.client.telemetry.span_creation import make_spans
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import InvalidParameter, PenstockError, TopicNotExist
from penstock.transport.peer import PeerRequest
from penstock.wire.bodies.client_bodies import ConsumerData, ProducerData

HandlerT = TypeVar("HandlerT", bound=Function)

log = logging.getLogger(__name__)

EMPTY_MS = 100
"""Shortest time of an empty round: a busy broker responds at once instead of waiting."""


class AsyncPopConsumer(Lifetime):
    """Receives messages by POP. The options are described at `PopConsumerOptions`."""

    @takes_options(PopConsumerOptions)
    def __init__(self, options: PopConsumerOptions) -> None:
        self.group = options.group
        self._options = options
        self._session = Session(options)
        self._group = self._session.with_namespace(options.group)
        self._acks = PopAckClient(self._session, self._group)
        self._source = PopSource(
            self._session,
            self._group,
            self._acks,
            fifo=options.fifo,
            from_first=options.start_at == "first",
        )
        self._handlers = Handlers()
        self._failures = HandlerFailures(self._session.clock)
        self._diagnosis = PopDiagnosis(
            self._session,
            self._group,
            self._source,
            self._failures,
            from_first=options.start_at == "first",
        )
        self._runner: PopHandlerRunner | None = None
        self._spans = make_spans(self._session, group=options.group, broadcast=False)
        self.carries_context = self._spans is not None
        self._turn = 0
        self._buffered: deque[ReceivedMessage] = deque()  # popped and not returned yet

    # --- lifecycle

    async def start(self) -> None:
        """Start the session and register the group at the brokers."""
        if not self._session.started:
            await self._session.start()
            await self._session.join(self)

    async def close(self) -> None:
        """Close; messages that are not acknowledged are redelivered to the group."""
        if not self._session.started:
            return
        if self._runner is not None:
            await self._runner.stop()
        await self._source.close()
        await self._session.leave(self)
        await self._session.close()

    # --- messages

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Subscribe to a topic: all messages, some tags, or by an SQL92 expression."""
        self._subscribe(topic, tags, sql)

    async def receive(
        self,
        count_max: int = MESSAGES_MAX,
        *,
        wait_ms: int | None = None,
        invisible_ms: int | None = None,
    ) -> list[ReceivedMessage]:
        """Messages, invisible to others for `invisible_ms`; none if there are none for `wait_ms`.

        At most 32 messages are returned: the limit of brokers.
        """
        if count_max <= 0:
            raise InvalidParameter(f"count_max is {count_max}", hint="give 1 or more")
        clock = self._session.clock
        if wait_ms is None:
            wait_ms = self._options.wait_ms
        end_ms = clock.monotonic_ms() + wait_ms
        if invisible_ms is None:
            invisible_ms = self._options.invisible_ms
        check_invisible_ms(invisible_ms)
        count_max = min(count_max, MESSAGES_MAX)
        asked_ns = 0 if self._spans is None else self._spans.now_ns()
        while True:
            self._session.check_alive()
            started_ms = clock.monotonic_ms()
            self._buffered.extend(
                await self._round(PopLimits(count_max, invisible_ms, max(end_ms - started_ms, 0)))
            )
            messages = self._take(count_max)
            if messages and self._spans is not None:
                self._spans.received(messages, asked_ns)
            now_ms = clock.monotonic_ms()
            if messages or now_ms >= end_ms:
                return messages
            if now_ms - started_ms < EMPTY_MS:
                await pause(clock, min(EMPTY_MS, end_ms - now_ms))

    async def ack(self, message: ReceivedMessage) -> None:
        """Acknowledge a message: it is not redelivered. A second call does nothing."""
        if self._spans is None:
            await self._acks.ack(receipt_of(message))
            return
        with self._spans.acking(message):
            await self._acks.ack(receipt_of(message))

    async def extend(self, message: ReceivedMessage, invisible_ms: int) -> None:
        """Change the invisible time, counted from now; 1 ms returns the message to the group."""
        await self._acks.extend(receipt_of(message), check_invisible_ms(invisible_ms))

    async def explain(self) -> list[str]:
        """Why no messages are received, by topic, and the failures of handlers."""
        self._session.check_alive()
        return await self._diagnosis.explain()

    # --- handlers

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Decorate a handler of a topic, async or not, for `run`.

        A message is acknowledged when its handler returns. It is redelivered later if the handler
        raises, or returns False or `Retry(delay_level)`.
        """

        def add(function: HandlerT) -> HandlerT:
            self._handlers.add(topic, tags, function)
            self._subscribe(topic, tags, sql, merge=True)
            return function

        return add

    async def run(self) -> None:
        """Run the handlers until the consumer is closed or this call is cancelled."""
        if not self._handlers:
            raise InvalidParameter(
                "there is no handler", hint="decorate one with @consumer.on(topic)"
            )
        await self.start()
        if self._runner is not None:
            raise InvalidParameter("the consumer is already running", hint="call run() once")
        self._runner = PopHandlerRunner(
            self._session,
            self._group,
            self._source,
            self._acks,
            self._handlers,
            self._options,
            self._failures,
            self._spans,
        )
        try:
            await self._runner.run()
        finally:
            self._runner = None

    # --- popping

    def _take(self, count_max: int) -> list[ReceivedMessage]:
        """Buffered messages whose invisible time is not over."""
        now_ms = self._session.clock.monotonic_ms()
        messages: list[ReceivedMessage] = []
        while self._buffered and len(messages) < count_max:
            message = self._buffered.popleft()
            if receipt_of(message).visible_ms > now_ms:
                messages.append(message)
        return messages

    async def _round(self, request: PopLimits) -> list[ReceivedMessage]:
        """Pop from all targets until one has messages; wait if none has."""
        if self._buffered:
            return []
        targets = await self._source.targets()
        if not targets:
            raise InvalidParameter("there is no subscription", hint="call subscribe(topic) first")
        self._turn += 1
        first = self._turn % len(targets)
        targets = targets[first:] + targets[:first]
        if len(targets) == 1:
            return await self._pop_from(targets, request)
        at_once = PopLimits(request.count_max, request.invisible_ms)
        found = await self._pop_from(targets, at_once)
        if found or not request.wait_ms:
            return found
        target = await self._source.wait_for_any(targets, request.wait_ms)
        return [] if target is None else await self._pop_from([target], at_once)

    async def _pop_from(
        self, targets: Sequence[PopTarget], request: PopLimits
    ) -> list[ReceivedMessage]:
        """The messages of the first target that has some; raises an error that cannot be retried,
        or if no target responds."""
        failure: PenstockError | None = None
        failures = 0
        for target in targets:
            try:
                found = await self._source.pop(target, request)
            except PenstockError as error:
                if not (error.retry or isinstance(error, TopicNotExist)):
                    raise
                failure, failures = error, failures + 1
                log.info(
                    "pop of topic %s at broker %s failed: %s",
                    target.topic,
                    target.broker_name,
                    error,
                )
                await self._session.find_route(target.topic)  # the topic may have moved
            else:
                if found:
                    return found
        if failure is not None and failures == len(targets):
            raise failure
        return []

    # --- SessionMember

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        return (
            ConsumerData(
                group_name=self._group,
                consume_type="CONSUME_POP",
                message_model="CLUSTERING",
                consume_from_where="CONSUME_FROM_LAST_OFFSET",
                subscription_data_set=[s.data() for s in self._source.subscriptions.values()],
            ),
        )

    def topics(self) -> Iterable[str]:
        return list(self._source.subscriptions)

    def route_changed(self, route: Route) -> None:
        if self._runner is not None:
            self._runner.wake()

    def handle_request(self, request: PeerRequest, address: str) -> MemberResponse | bool:
        return False

    def _subscribe(self, topic: str, tags: str, sql: str | None, *, merge: bool = False) -> None:
        session, subscriptions = self._session, self._source.subscriptions
        name = session.with_namespace(topic)
        wanted = Subscription.of(name, tags, sql, version=session.clock.now_ms())
        if merge and name in subscriptions:
            wanted = subscriptions[name].merged(wanted)
        subscriptions[name] = wanted
        if session.started:
            session.spawn(self._apply_subscription(name))

    async def _apply_subscription(self, topic: str) -> None:
        await self._session.find_route(topic)
        await self._session.send_heartbeats()
        if self._runner is not None:
            self._runner.wake()
