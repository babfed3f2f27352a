"""A push-style consumer at work: what it subscribes to, its queues, and what brokers ask of it.

`consumer.AsyncConsumer` is the face. Queues come and go by the rebalancer; each has a ProcessQueue
and a Puller; messages go to the dispatch, and the settling finishes them or hands them back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer import broker_requests
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.consumer_options import ConsumerOptions
from penstock.client.consumer.diagnosis import Diagnosis
from penstock.client.consumer.dispatch.completion import Settling
from penstock.client.consumer.dispatch.concurrent import ConcurrentDispatch, Dispatch
from penstock.client.consumer.dispatch.handler_calls import Calls, is_handling
from penstock.client.consumer.dispatch.handlers import Handlers, Retry, verdict
from penstock.client.consumer.dispatch.message_iterator import Mailbox
from penstock.client.consumer.dispatch.orderly import OrderlyDispatch, QueueLocks
from penstock.client.consumer.dispatch.send_back import SendBack
from penstock.client.consumer.offset_store import PERSIST_MS, LocalOffsets, Offsets, RemoteOffsets
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.consumer.pull_loop import AGAIN_MS_MAX, Puller, Troubles
from penstock.client.consumer.rebalance import Rebalancer, Share
from penstock.client.consumer.subscription import SQL92, Subscription
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.producer_options import SendOptions
from penstock.client.producer.sending import Sender
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.client.topic_routes import Route
from penstock.client.trace.trace_writer import Tracer, make_tracer
from penstock.clock import pause
from penstock.transport.peer import PeerRequest
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from penstock.wire.bodies.client_bodies import (
    CheckClientRequestBody,
    ConsumerData,
    ProducerData,
    SubscriptionData,
)
from penstock.wire.codes import GROUP_INNER_PRODUCER, RETRY_TOPIC_PREFIX, RequestCode

log = logging.getLogger(__name__)

WATCH_MS = 60_000
"""How often it is looked for handlers that do not come back, at least."""


class ConsumerCore:
    """Member of the session, holder of queues, and what brokers' requests are about."""

    def __init__(self, session: Session, options: ConsumerOptions, handlers: Handlers) -> None:
        self._session = session
        self._options = options
        self._handlers = handlers
        self.group = session.with_namespace(options.group)
        self.start_at = options.start_at
        self.started_ms = 0
        self.works: dict[MessageQueue, ProcessQueue] = {}
        self._pullers: dict[ProcessQueue, asyncio.Task[object]] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._paused: set[str] = set()
        self._version = 0
        self._troubles = Troubles()
        self._beginning: asyncio.Task[None] | None = None
        self._closing = False
        self.offsets: Offsets = (
            LocalOffsets(options.offsets_path)
            if options.broadcast
            else RemoteOffsets(session, self.group)
        )
        self.mailbox: Mailbox | None = None
        self._retries: Subscription | None = None
        if not options.broadcast:
            self._retries = Subscription(RETRY_TOPIC_PREFIX + self.group)
        self._sender: Sender | None = None
        self._tracer: Tracer | None = None
        self._locks: QueueLocks | None = None
        self._settling: Settling | None = None
        self._calls: Calls
        self._dispatch: Dispatch
        self._rebalancer: Rebalancer
        self._diagnosis: Diagnosis | None = None
        self._rates = Rates(session.clock)

    # --- life

    def begin(self) -> asyncio.Task[None]:
        """Begin once, when there is something to consume; the session has begun before."""
        if self._beginning is None:
            self._beginning = asyncio.ensure_future(self._begin())
            self._beginning.add_done_callback(self._begun)
        return self._beginning

    def _begun(self, beginning: asyncio.Task[None]) -> None:
        if beginning.cancelled() or beginning.exception() is not None:
            self._beginning = None  # it may be tried again

    def _begin_beside(self) -> None:
        def log_failure(beginning: asyncio.Task[None]) -> None:
            if not beginning.cancelled() and (error := beginning.exception()) is not None:
                log.error("%s: consuming can't begin: %s", self._options.group, error)

        self.begin().add_done_callback(log_failure)

    async def _begin(self) -> None:
        session, options = self._session, self._options
        self.started_ms = session.clock.now_ms()
        if self._retries is not None:
            self._retries = replace(self._retries, version=self.started_ms)
        if session.options.trace_topic is not None:
            self._tracer = make_tracer(session, options.group, self._send_trace)
        self._make_dispatch()
        self._rebalancer = Rebalancer(
            session,
            self.group,
            self,
            self.offsets,
            broadcast=options.broadcast,
            strategy=options.strategy,
            start_at=options.start_at,
            locks=self._locks,
            rebalance_ms=options.rebalance_ms,
        )
        await self.offsets.load()
        try:
            await session.join(self)
            for subscription in list(self._subscriptions.values()):
                await self._check_filter(subscription)
        except BaseException:
            await session.leave(self)
            raise
        self._rebalancer.start()
        session.spawn(self._keep_persisting())
        if self._locks is not None:
            session.spawn(self._locks.keep_locked())
        if not options.orderly:
            session.spawn(self._keep_watch())
        self._diagnosis = Diagnosis(session, self, self._rebalancer, self._locks)
        session.spawn(self._diagnosis.keep_explaining())

    def _make_dispatch(self) -> None:
        session, options = self._session, self._options
        send_back = None
        if not options.broadcast:
            send_back = SendBack(session, self.group, retries_max=options.retries)
        settling = self._settling = Settling(
            session, options.group, give_back=send_back, retries_max=options.retries
        )
        name = f"penstock-{options.group}"
        self._calls = Calls(
            self._handlers, settling, self._tracer, name=name, threads=options.concurrency
        )
        handle: Callable[[list[ReceivedMessage]], Awaitable[Retry | None]] = self._calls.handle
        self.mailbox = None
        if not self._handlers:
            self.mailbox = Mailbox(session, settling)
            handle = self.mailbox.handle
        if options.orderly:
            if not options.broadcast:
                self._locks = QueueLocks(session, self.group)
            self._dispatch = OrderlyDispatch(
                session,
                self.group,
                self.offsets,
                handle=handle,
                handler_of=self._handlers.find,
                locks=self._locks,
                send_back=send_back,
                handle_batch=options.handle_batch if self.mailbox is None else 1,
                retries_max=options.retries,
                concurrency=options.concurrency,
            )
        elif self.mailbox is not None:
            self._dispatch = self.mailbox
        else:
            self._dispatch = ConcurrentDispatch(
                session,
                self._handlers,
                self._calls,
                settling,
                name=name,
                concurrency=options.concurrency,
                handle_batch=options.handle_batch,
            )

    async def close(self) -> None:
        """Stop pulling, let handlers finish, store progress, unlock, say goodbye."""
        self._closing = True
        beginning = self._beginning
        if beginning is None or not beginning.done():
            await self.abandon()
            return
        if beginning.cancelled() or beginning.exception() is not None:
            return
        for puller in self._pullers.values():
            puller.cancel()
        await asyncio.gather(*self._pullers.values(), return_exceptions=True)
        if self.mailbox is not None:
            await self.mailbox.close(0)
        await self._dispatch.close(self._options.drain_ms)
        await self._calls.close(self._session, 0)
        await self._rebalancer.close()
        if self._tracer is not None:
            await self._tracer.close()
        if self._sender is not None:
            await self._sender.close(self._session.options.timeout_ms)
            await self._session.leave(self._sender)
        await self._session.leave(self)

    async def abandon(self) -> None:
        """What is about to begin does not."""
        beginning = self._beginning
        if beginning is not None and not beginning.done():
            beginning.cancel()
            await asyncio.wait([beginning])

    @property
    def is_handling(self) -> bool:
        """Whether the caller is one of our async handlers, or was started by one."""
        return self._settling is not None and is_handling(self._settling)

    async def _keep_persisting(self) -> None:
        while True:
            await pause(self._session.clock, PERSIST_MS)
            self._note_progress()
            await self.offsets.persist()

    async def _keep_watch(self) -> None:
        timeout_ms = self._options.consume_timeout_ms
        assert self._settling is not None
        while True:
            await pause(self._session.clock, min(timeout_ms, WATCH_MS))
            await self._settling.expire(list(self.works.values()), timeout_ms)

    def _note_progress(self) -> None:
        for queue, work in self.works.items():
            if not work.dropped:
                self.offsets.update(queue, work.progress)

    # --- subscriptions

    def next_version(self) -> int:
        """The version of a subscription: brokers believe in none that is not above the last."""
        self._version = max(self._version + 1, self._session.clock.now_ms())
        return self._version

    def subscribe(self, subscription: Subscription, *, merge: bool) -> None:
        """Want messages of a topic, from now on; `merge`: besides what is wanted already."""
        known = self._subscriptions.get(subscription.topic)
        if known is not None and merge:
            subscription = known.merged(subscription)
        self._subscriptions[subscription.topic] = subscription
        if self._session.started:
            if self._beginning is None:
                self._begin_beside()  # in the next turn: more handlers may be named in this one
            else:
                self._session.spawn(self._announce(self._beginning, subscription))

    @property
    def subscribes(self) -> bool:
        """Whether there is something to consume."""
        return bool(self._subscriptions)

    def unsubscribe(self, topic: str) -> None:
        """Want no more messages of a topic."""
        if self._subscriptions.pop(topic, None) is not None and self._beginning is not None:
            self._session.spawn(self._announce(self._beginning, None))

    async def _announce(
        self, beginning: asyncio.Task[None], subscription: Subscription | None
    ) -> None:
        await asyncio.wait([beginning])
        if self._beginning is not beginning:  # it failed, and whoever waited for it knows
            return
        if subscription is not None:
            await self._session.find_route(subscription.topic)
            await self._check_filter(subscription)
        await self._session.send_heartbeats()
        self._rebalancer.wake()

    async def _check_filter(self, subscription: Subscription) -> None:
        """Ask a broker whether it understands an SQL92 expression; raises BadFilter."""
        route = self._session.cached_route(subscription.topic)
        if subscription.kind != SQL92 or route is None or not route.brokers:
            return
        body = CheckClientRequestBody(
            client_id=self._session.client_id,
            group=self.group,
            subscription_data=subscription.data(),
            namespace=self._session.options.namespace or None,
        )
        await self._session.call(
            self._session.broker(route.brokers[0]),
            RequestCode.CHECK_CLIENT_CONFIG,
            {},
            fastjson.encode(body),
        )

    def subscriptions(self) -> Iterable[SubscriptionData]:
        """As heartbeats tell them."""
        found = [subscription.data() for subscription in self._subscriptions.values()]
        if self._retries is not None:
            found.append(self._retries.data())
        return found

    def _subscription(self, topic: str) -> Subscription | None:
        if self._retries is not None and topic == self._retries.topic:
            return self._retries
        return self._subscriptions.get(topic)

    # --- queues (rebalance.Holder)

    def topics(self) -> Iterable[str]:
        """What is subscribed, and the group's own retry topic."""
        if self._retries is None:
            return tuple(self._subscriptions)
        return (*self._subscriptions, self._retries.topic)

    def take(self, queue: MessageQueue, offset: int) -> None:
        """The queue is ours from now on."""
        if self._closing:
            return
        options, locks = self._options, self._locks
        subscription = self._subscription(queue.topic)
        if subscription is None:  # no longer
            return
        work = ProcessQueue(queue, offset, options.limits(), ordered=options.orderly)
        work.paused = queue.topic in self._paused
        puller = Puller(
            self._session,
            self.group,
            work,
            subscription=lambda: self._subscription(queue.topic) or subscription,
            received=self._dispatch.submit,
            moved=self._moved,
            troubles=self._troubles,
            batch=options.pull_batch,
            may_pull=None if locks is None else lambda work: locks.holds(work.queue),
        )
        self.works[queue] = work
        task = self._pullers[work] = self._session.spawn(puller.run())
        task.add_done_callback(lambda task: self._pulled(work, task))

    def _pulled(self, work: ProcessQueue, puller: asyncio.Task[object]) -> None:
        """A puller has ended; one that failed as nobody thought of stops no queue for ever."""
        del self._pullers[work]
        if not (puller.cancelled() or puller.exception() is None or self._closing):
            self._session.spawn(self._begin_anew(work))

    async def _begin_anew(self, work: ProcessQueue) -> None:
        await pause(self._session.clock, AGAIN_MS_MAX)
        if not work.dropped:
            await self._rebalancer.give_up(work.queue)

    async def drop(self, queue: MessageQueue) -> None:
        """The queue is not ours any more."""
        work = self.works.pop(queue, None)
        if work is None:
            return
        work.drop()
        puller = self._pullers.get(work)
        if puller is not None:
            puller.cancel()
        if self.mailbox is not None:
            await self.mailbox.stop(work)  # what an ordered queue's worker waits for is let go
        await self._dispatch.stop(work)
        self.offsets.update(queue, work.progress)

    def shared(self, share: Share) -> None:
        """Nothing has to be done."""

    def _moved(self, work: ProcessQueue, offset: int) -> None:
        """The broker has other offsets than we asked for: begin anew there."""
        self.offsets.freeze(work.queue, offset)
        self._session.spawn(self._rebalancer.give_up(work.queue))

    def pause(self, topics: Iterable[str]) -> None:
        """Pull nothing more of these topics."""
        self._paused.update(topics)
        for queue, work in self.works.items():
            if queue.topic in self._paused:
                work.pause()

    def resume(self, topics: Iterable[str]) -> None:
        """Pull these again."""
        self._paused.difference_update(topics)
        for queue, work in self.works.items():
            if queue.topic not in self._paused:
                work.resume()

    # --- a member of the session

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        start_at = self._options.start_at
        where = "TIMESTAMP" if isinstance(start_at, datetime) else f"{start_at.upper()}_OFFSET"
        yield ConsumerData(
            group_name=self.group,
            consume_type="CONSUME_PASSIVELY",
            message_model="BROADCASTING" if self._options.broadcast else "CLUSTERING",
            consume_from_where=f"CONSUME_FROM_{where}",
            subscription_data_set=list(self.subscriptions()),
        )

    def route_changed(self, route: Route) -> None:
        if route.topic in self.topics():
            self.members_changed()

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        return broker_requests.answer(self, ask, address)

    # --- what brokers ask for (inbound.Consuming)

    def members_changed(self) -> None:
        self._rebalancer.wake()

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        await broker_requests.reset_queues(self._rebalancer, self.offsets, offsets)

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        self._note_progress()
        return self.offsets.snapshot(topic)

    def running_info(self) -> ConsumerRunningInfo:
        options = self._options
        self._note_progress()
        return broker_requests.running_info(
            self._session,
            subscriptions=self.subscriptions(),
            works=self.works.values(),
            offsets=self.offsets,
            started_ms=self.started_ms,
            orderly=options.orderly,
            concurrency=options.concurrency,
            locks=self._locks,
            rates=self._rates,
            settings={
                "consumerGroup": options.group,
                "messageModel": "BROADCASTING" if options.broadcast else "CLUSTERING",
                "pullBatchSize": str(options.pull_batch),
                "consumeMessageBatchMaxSize": str(options.handle_batch),
                "pullThresholdForQueue": str(options.messages_max),
                "pullThresholdSizeForQueue": str(options.bytes_max // 2**20),
                "consumeConcurrentlyMaxSpan": str(options.span_max),
                "maxReconsumeTimes": str(options.retries),
                "consumeTimeout": str(options.consume_timeout_ms // 60_000),
            },
        )

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        """Call the handler with a message that a tool sends; whatever it says, nothing follows."""

        async def call() -> bool:
            messages = decode_records(
                record,
                broker_name,
                namespace=self._session.options.namespace,
                received_ms=self._session.clock.now_ms(),
            )
            return verdict(await self._calls.call(messages[:1])) is None

        return await broker_requests.try_handler(
            call, self._session.clock, orderly=self._options.orderly
        )

    async def explain(self) -> list[str]:
        """Why nothing comes."""
        if self._diagnosis is None:
            return ["nothing is subscribed" if not self._subscriptions else "it has not begun yet"]
        return await self._diagnosis.explain()

    # --- sending

    async def send(
        self, message: Message, queue: MessageQueue | None, timeout_ms: int
    ) -> SendReceipt:
        """Send a reply."""
        sender = await self._inner_sender()
        return await sender.send(
            message, queue=queue, timeout_ms=timeout_ms, internal=True, traced=False
        )

    async def _send_trace(self, message: Message) -> SendReceipt:
        return await (await self._inner_sender()).send(message, traced=False)

    async def _inner_sender(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self._session, GROUP_INNER_PRODUCER, SendOptions())
            self._sender.start()
            await self._session.join(self._sender)
        return self._sender
