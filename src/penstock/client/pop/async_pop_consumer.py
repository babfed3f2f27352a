"""Consuming by POP: messages are lent for a while, and come back unless they are acknowledged.

There are no queues to share out and nothing to rebalance: brokers lend to whoever of the group asks
next. `receive`, `ack` and `extend` are for programs with a rhythm of their own; `on` and `run` call
a handler for each message and do the rest (pop_push.py).
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from penstock.client.client_options import takes_options
from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer.dispatch.handlers import Function, Handlers
from penstock.client.consumer.subscription import Subscription
from penstock.client.lifetime import Lifetime
from penstock.client.pop.invisible_time import Loans, loan_of
from penstock.client.pop.pop_handlers import PopPush
from penstock.client.pop.pop_options import PopConsumerOptions, check_invisible_ms
from penstock.client.pop.pop_source import PopSource, Wish
from penstock.client.pop.popped_messages import MESSAGES_MAX, Place
from penstock.client.received_message import ReceivedMessage
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import InvalidParameter, PenstockError, TopicNotExist
from penstock.transport.peer import PeerRequest
from penstock.wire.bodies.client_bodies import ConsumerData, ProducerData

HandlerT = TypeVar("HandlerT", bound=Function)

log = logging.getLogger(__name__)

QUICK_MS = 100
"""A round of questions that brought nothing takes at least so long: a broker that is too busy to
let us wait answers at once."""


class AsyncPopConsumer(Lifetime):
    """Receives messages that are lent to its group.

    With `fifo` the messages of a queue are lent in order, and no more of it before those are
    acknowledged. `start_at` is where a new group begins. `wait_ms` and `invisible_ms` are for
    `receive` calls that do not say it; for the other options see `PushOptions`.
    """

    @takes_options(PopConsumerOptions)
    def __init__(self, options: PopConsumerOptions) -> None:
        self.group = options.group
        self._options = options
        self._session = Session(options)
        self._group = self._session.with_namespace(options.group)
        self._loans = Loans(self._session, self._group)
        self._source = PopSource(
            self._session,
            self._group,
            self._loans,
            fifo=options.fifo,
            from_first=options.start_at == "first",
        )
        self._handlers = Handlers()
        self._push: PopPush | None = None
        self._turn = 0
        self._spare: deque[ReceivedMessage] = deque()

    # --- life

    async def start(self) -> None:
        """Find the brokers, and tell them of the group."""
        if not self._session.started:
            await self._session.start()
            await self._session.join(self)

    async def close(self) -> None:
        """End; what was received and not acknowledged comes back to the group."""
        if not self._session.started:
            return
        if self._push is not None:
            await self._push.stop()
        await self._source.close()
        await self._session.leave(self)
        await self._session.close()

    # --- messages

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Receive messages of a topic, before or after `start`: all, some tags, or by a filter."""
        self._subscribe(topic, tags, sql)

    async def receive(
        self,
        count_max: int = MESSAGES_MAX,
        *,
        wait_ms: int | None = None,
        invisible_ms: int | None = None,
    ) -> list[ReceivedMessage]:
        """Messages that are lent to us for `invisible_ms`; none if there are none for `wait_ms`.

        At most 32 come at a time: brokers lend no more.
        """
        if count_max <= 0:
            raise InvalidParameter(f"count_max is {count_max}: at least 1 message is received")
        clock = self._session.clock
        if wait_ms is None:
            wait_ms = self._options.wait_ms
        end_ms = clock.monotonic_ms() + wait_ms
        if invisible_ms is None:
            invisible_ms = self._options.invisible_ms
        check_invisible_ms(invisible_ms)
        count_max = min(count_max, MESSAGES_MAX)
        while True:
            self._session.check_alive()
            began_ms = clock.monotonic_ms()
            self._spare.extend(
                await self._round(Wish(count_max, invisible_ms, max(end_ms - began_ms, 0)))
            )
            messages = self._take(count_max)
            now_ms = clock.monotonic_ms()
            if messages or now_ms >= end_ms:
                return messages
            if now_ms - began_ms < QUICK_MS:
                await pause(clock, min(QUICK_MS, end_ms - now_ms))

    async def ack(self, message: ReceivedMessage) -> None:
        """The message is done: it does not come back. A second time says nothing more."""
        await self._loans.ack(loan_of(message))

    async def extend(self, message: ReceivedMessage, invisible_ms: int) -> None:
        """Keep the message for so long from now on; soon (1 ms) hands it back to the group."""
        await self._loans.extend(loan_of(message), check_invisible_ms(invisible_ms))

    # --- handlers

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Decorate a function, async or not, that `run` calls with each message of a topic.

        The message is done when it returns. It comes again later when it raises, or returns False
        or `Retry(delay_level)`.
        """

        def add(function: HandlerT) -> HandlerT:
            self._handlers.add(topic, tags, function)
            self._subscribe(topic, tags, sql, merge=True)
            return function

        return add

    async def run(self) -> None:
        """Call the handlers with messages until the consumer is closed, or this is cancelled."""
        if not self._handlers:
            raise InvalidParameter(
                "there is no handler to run", hint="decorate one with @on(topic)"
            )
        await self.start()
        if self._push is not None:
            raise InvalidParameter("the consumer runs already", hint="call run() once")
        self._push = PopPush(
            self._session,
            self._group,
            self._source,
            self._loans,
            self._handlers,
            self._options,
        )
        try:
            await self._push.run()
        finally:
            self._push = None

    # --- asking

    def _take(self, count_max: int) -> list[ReceivedMessage]:
        """Of what is here and still lent to us."""
        now_ms = self._session.clock.monotonic_ms()
        messages: list[ReceivedMessage] = []
        while self._spare and len(messages) < count_max:
            message = self._spare.popleft()
            if loan_of(message).ends_ms > now_ms:
                messages.append(message)
        return messages

    async def _round(self, wish: Wish) -> list[ReceivedMessage]:
        """Ask everywhere, and wait where nothing is found; stops at the first with messages."""
        if self._spare:
            return []
        places = await self._source.places()
        if not places:
            raise InvalidParameter("nothing is subscribed", hint="call subscribe(topic) first")
        self._turn += 1
        first = self._turn % len(places)
        places = places[first:] + places[:first]
        if len(places) == 1:
            return await self._pop_from(places, wish)
        at_once = Wish(wish.count_max, wish.invisible_ms)
        found = await self._pop_from(places, at_once)
        if found or not wish.wait_ms:
            return found
        place = await self._source.await_any(places, wish.wait_ms)
        return [] if place is None else await self._pop_from([place], at_once)

    async def _pop_from(self, places: Sequence[Place], wish: Wish) -> list[ReceivedMessage]:
        """What the first place with messages lends; raises where asking again does not help, and
        where no place answers."""
        failure: PenstockError | None = None
        failures = 0
        for place in places:
            try:
                found = await self._source.pop(place, wish)
            except PenstockError as error:
                if not (error.retry or isinstance(error, TopicNotExist)):
                    raise
                failure, failures = error, failures + 1
                log.info("%s lends nothing of %s: %s", place.broker_name, place.topic, error)
                await self._session.find_route(place.topic)  # it may have moved
            else:
                if found:
                    return found
        if failure is not None and failures == len(places):
            raise failure
        return []

    # --- what the session asks for

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
        if self._push is not None:
            self._push.wake()

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        return False

    def _subscribe(self, topic: str, tags: str, sql: str | None, *, merge: bool = False) -> None:
        session, subscriptions = self._session, self._source.subscriptions
        name = session.with_namespace(topic)
        wanted = Subscription.of(name, tags, sql, version=session.clock.now_ms())
        if merge and name in subscriptions:
            wanted = subscriptions[name].merged(wanted)
        subscriptions[name] = wanted
        if session.started:
            session.spawn(self._announce(name))

    async def _announce(self, topic: str) -> None:
        await self._session.find_route(topic)
        await self._session.send_heartbeats()
        if self._push is not None:
            self._push.wake()
