"""The core of a push consumer: subscriptions, queues and requests of brokers.

`AsyncConsumer` is the public class. The rebalancer assigns and releases queues; each has a process
queue and a pull loop. Messages go to the dispatch, and the completion finishes them or sends them
back.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer import broker_requests
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.consumer_options import ConsumerOptions
from penstock.client.consumer.consumer_parts import ConsumerParts, make_parts
from penstock.client.consumer.dispatch.handler_calls import is_handling
from penstock.client.consumer.dispatch.handlers import Handlers, retry_from_result
from penstock.client.consumer.dispatch.message_iterator import IteratorDispatch
from penstock.client.consumer.offset_store import PERSIST_MS, OffsetStore, make_offset_store
from penstock.client.consumer.process_queue import ProcessQueue, process_queue_of
from penstock.client.consumer.pull_loop import RETRY_MS_MAX, Puller, PullFailures
from penstock.client.consumer.rebalance import Allocation
from penstock.client.consumer.subscription import SQL92, Subscription
from penstock.client.handler_failures import show_error
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.producer_options import SendOptions
from penstock.client.producer.sending import Sender
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.client.topic_routes import Route
from penstock.client.trace.trace_writer import Tracer, make_tracer
from penstock.clock import pause
from penstock.errors import PenstockError
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

STUCK_CHECK_MS = 60_000
"""Longest interval of checks for stuck handlers."""


class ConsumerCore:
    """Session member, rebalance listener and target of brokers' requests."""

    def __init__(self, session: Session, options: ConsumerOptions, handlers: Handlers) -> None:
        self._session = session
        self._options = options
        self._handlers = handlers
        self.group = session.with_namespace(options.group)
        self.start_at = options.start_at
        self.started_ms = 0
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self._pull_tasks: dict[ProcessQueue, asyncio.Task[object]] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._paused: set[str] = set()
        self._version = 0
        self._pull_failures = PullFailures()
        self._starting: asyncio.Task[None] | None = None
        self._closing = False
        self.offsets: OffsetStore = make_offset_store(
            session, self.group, broadcast=options.broadcast, offsets_path=options.offsets_path
        )
        self._retry_subscription: Subscription | None = None
        if not options.broadcast:
            self._retry_subscription = Subscription(RETRY_TOPIC_PREFIX + self.group)
        self._sender: Sender | None = None
        self._tracer: Tracer | None = None
        self._parts: ConsumerParts | None = None  # from the start on
        self._rates = Rates(session.clock)

    # --- lifecycle

    def start(self) -> asyncio.Task[None]:
        """Start once, when there is a subscription; the session has been started before."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(self._start_done)
        return self._starting

    def _start_done(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() or starting.exception() is not None:
            self._starting = None  # it may be tried again

    def _start_in_background(self) -> None:
        def log_failure(starting: asyncio.Task[None]) -> None:
            if not starting.cancelled() and (error := starting.exception()) is not None:
                remark = error.remark() if isinstance(error, PenstockError) else str(error)
                show_error(log, f"{self._options.group}: cannot start consuming: {remark}")

        self.start().add_done_callback(log_failure)

    async def _start(self) -> None:
        session, options = self._session, self._options
        self.started_ms = session.clock.now_ms()
        if self._retry_subscription is not None:
            self._retry_subscription = replace(self._retry_subscription, version=self.started_ms)
        self._tracer = make_tracer(session, options.group, self._send_trace)
        parts = self._parts = make_parts(session, options, self._handlers, self, self._tracer)
        await self.offsets.load()
        try:
            await session.join(self)
            for subscription in list(self._subscriptions.values()):
                await self._check_filter(subscription)
        except BaseException:
            await session.leave(self)
            raise
        parts.rebalancer.start()
        session.spawn(self._keep_persisting())
        if parts.locks is not None:
            session.spawn(parts.locks.keep_locked())
        if not options.orderly:
            session.spawn(self._keep_expiring(parts))
        session.spawn(parts.diagnosis.keep_explaining())

    async def close(self) -> None:
        """Stop pulling, wait for handlers, store offsets, unlock queues and unregister."""
        self._closing = True
        starting, parts = self._starting, self._parts
        if starting is None or not starting.done():
            await self.cancel_start()
            return
        if starting.cancelled() or starting.exception() is not None:
            return
        assert parts is not None
        for task in self._pull_tasks.values():
            task.cancel()
        await asyncio.gather(*self._pull_tasks.values(), return_exceptions=True)
        if parts.iterator_dispatch is not None:
            await parts.iterator_dispatch.close(0)
        await parts.dispatch.close(self._options.drain_ms)
        await parts.calls.close(self._session, 0)
        await parts.rebalancer.close()
        if self._tracer is not None:
            await self._tracer.close()
        if self._sender is not None:
            await self._sender.close(self._session.options.timeout_ms)
            await self._session.leave(self._sender)
        await self._session.leave(self)

    async def cancel_start(self) -> None:
        """Cancel a start in progress."""
        starting = self._starting
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])

    @property
    def is_handling(self) -> bool:
        """Whether the caller runs in one of our async handlers, or in a task of one."""
        return self._parts is not None and is_handling(self._parts.completion)

    @property
    def iterator_dispatch(self) -> IteratorDispatch | None:
        """The dispatch for `async for`; None if there are handlers, or before the start."""
        return None if self._parts is None else self._parts.iterator_dispatch

    async def _keep_persisting(self) -> None:
        while True:
            await pause(self._session.clock, PERSIST_MS)
            self._update_offsets()
            await self.offsets.persist()

    async def _keep_expiring(self, parts: ConsumerParts) -> None:
        timeout_ms = self._options.consume_timeout_ms
        while True:
            await pause(self._session.clock, min(timeout_ms, STUCK_CHECK_MS))
            await parts.completion.expire_stuck(list(self.process_queues.values()), timeout_ms)

    def _update_offsets(self) -> None:
        for queue, process_queue in self.process_queues.items():
            if not process_queue.dropped:
                self.offsets.update(queue, process_queue.progress)

    # --- subscriptions

    def next_version(self) -> int:
        """The version of a new subscription; brokers ignore versions that do not increase."""
        self._version = max(self._version + 1, self._session.clock.now_ms())
        return self._version

    def subscribe(self, subscription: Subscription, *, merge: bool) -> None:
        """Subscribe to a topic; `merge`: in addition to the present subscription."""
        known = self._subscriptions.get(subscription.topic)
        if known is not None and merge:
            subscription = known.merged(subscription)
        self._subscriptions[subscription.topic] = subscription
        if self._session.started:
            if self._starting is None:
                self._start_in_background()  # not at once: more handlers may be added now
            else:
                self._session.spawn(self._apply_subscription(self._starting, subscription))

    @property
    def has_subscriptions(self) -> bool:
        return bool(self._subscriptions)

    def unsubscribe(self, topic: str) -> None:
        """Remove the subscription to a topic."""
        if self._subscriptions.pop(topic, None) is not None and self._starting is not None:
            self._session.spawn(self._apply_subscription(self._starting, None))

    async def _apply_subscription(
        self, starting: asyncio.Task[None], subscription: Subscription | None
    ) -> None:
        await asyncio.wait([starting])
        if self._starting is not starting:  # the start failed and has been reported
            return
        if subscription is not None:
            await self._session.find_route(subscription.topic)
            await self._check_filter(subscription)
        await self._session.send_heartbeats()
        self.members_changed()

    async def _check_filter(self, subscription: Subscription) -> None:
        """Let a broker check an SQL92 expression; raises BadFilter."""
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
        """The subscriptions for heartbeats, with that to the retry topic."""
        found = [subscription.data() for subscription in self._subscriptions.values()]
        if self._retry_subscription is not None:
            found.append(self._retry_subscription.data())
        return found

    def _subscription(self, topic: str) -> Subscription | None:
        retry = self._retry_subscription
        if retry is not None and topic == retry.topic:
            return retry
        return self._subscriptions.get(topic)

    # --- RebalanceListener

    def topics(self) -> Iterable[str]:
        """The subscribed topics and the retry topic of the group."""
        if self._retry_subscription is None:
            return tuple(self._subscriptions)
        return (*self._subscriptions, self._retry_subscription.topic)

    def add_queue(self, queue: MessageQueue, offset: int) -> None:
        """Start to pull a queue."""
        if self._closing:
            return
        options, parts = self._options, self._parts
        assert parts is not None
        locks = parts.locks
        subscription = self._subscription(queue.topic)
        if subscription is None:  # unsubscribed meanwhile
            return
        process_queue = ProcessQueue(queue, offset, options.limits(), ordered=options.orderly)
        process_queue.paused = queue.topic in self._paused
        puller = Puller(
            self._session,
            self.group,
            process_queue,
            subscription=lambda: self._subscription(queue.topic) or subscription,
            on_messages=parts.dispatch.submit,
            on_offset_moved=self._offset_moved,
            failures=self._pull_failures,
            batch=options.pull_batch,
            may_pull=None if locks is None else lambda pulled: locks.holds(pulled.queue),
        )
        self.process_queues[queue] = process_queue
        task = self._pull_tasks[process_queue] = self._session.spawn(puller.run())
        task.add_done_callback(lambda task: self._pull_done(process_queue, task))

    def _pull_done(self, process_queue: ProcessQueue, task: asyncio.Task[object]) -> None:
        """Restart a queue whose pull loop ended with an unexpected error."""
        del self._pull_tasks[process_queue]
        if not (task.cancelled() or task.exception() is None or self._closing):
            self._session.spawn(self._restart_later(process_queue))

    async def _restart_later(self, process_queue: ProcessQueue) -> None:
        await pause(self._session.clock, RETRY_MS_MAX)
        if not process_queue.dropped and self._parts is not None:
            await self._parts.rebalancer.restart_queue(process_queue.queue)

    async def remove_queue(self, queue: MessageQueue) -> None:
        """Stop a queue that is no longer assigned."""
        process_queue, parts = self.process_queues.pop(queue, None), self._parts
        if process_queue is None:
            return
        assert parts is not None
        process_queue.drop()
        task = self._pull_tasks.get(process_queue)
        if task is not None:
            task.cancel()
        if parts.iterator_dispatch is not None:
            # Wakes the worker of an ordered queue, which waits for an iterator.
            await parts.iterator_dispatch.stop(process_queue)
        await parts.dispatch.stop(process_queue)
        self.offsets.update(queue, process_queue.progress)

    def allocation_changed(self, allocation: Allocation) -> None:
        """Nothing to do: queues are started and stopped one by one."""

    def lock_lost(self, queue: MessageQueue) -> None:
        """Another member has, or may have had, the lock of a queue."""
        if self._parts is not None:
            self._parts.rebalancer.lock_lost(queue)

    def resubmit(self, message: ReceivedMessage) -> None:
        """Dispatch a message again that no broker has taken back."""
        if self._parts is not None:
            self._parts.dispatch.submit(process_queue_of(message), [message])

    def _offset_moved(self, process_queue: ProcessQueue, offset: int) -> None:
        """The broker does not have the offset: restart the queue at the broker's offset."""
        self.offsets.freeze(process_queue.queue, offset)
        if self._parts is not None:
            self._session.spawn(self._parts.rebalancer.restart_queue(process_queue.queue))

    def pause(self, topics: Iterable[str]) -> None:
        """Stop pulling these topics."""
        self._paused.update(topics)
        for queue, process_queue in self.process_queues.items():
            if queue.topic in self._paused:
                process_queue.pause()

    def resume(self, topics: Iterable[str]) -> None:
        """Pull these topics again."""
        self._paused.difference_update(topics)
        for queue, process_queue in self.process_queues.items():
            if queue.topic not in self._paused:
                process_queue.resume()

    # --- SessionMember

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        yield broker_requests.consumer_data(
            self.group, self._options, "CONSUME_PASSIVELY", self.subscriptions()
        )

    def route_changed(self, route: Route) -> None:
        if route.topic in self.topics():
            self.members_changed()

    def handle_request(self, request: PeerRequest, address: str) -> MemberResponse | bool:
        return broker_requests.handle_request(self, request, address)

    # --- ManagedConsumer

    def members_changed(self) -> None:
        if self._parts is not None:
            self._parts.rebalancer.wake()

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        if self._parts is not None:
            await broker_requests.reset_queues(self._parts.rebalancer, self.offsets, offsets)

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        self._update_offsets()
        return self.offsets.snapshot(topic)

    def running_info(self) -> ConsumerRunningInfo:
        options = self._options
        self._update_offsets()
        return broker_requests.running_info(
            self._session,
            subscriptions=self.subscriptions(),
            process_queues=self.process_queues.values(),
            offsets=self.offsets,
            started_ms=self.started_ms,
            orderly=options.orderly,
            concurrency=options.concurrency,
            locks=None if self._parts is None else self._parts.locks,
            rates=self._rates,
            settings={
                **broker_requests.common_settings(options),
                "consumeMessageBatchMaxSize": str(options.handle_batch),
                "consumeConcurrentlyMaxSpan": str(options.span_max),
                "maxReconsumeTimes": str(options.retries),
                "consumeTimeout": str(options.consume_timeout_ms // 60_000),
            },
        )

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        """Call the handler with a message of an admin tool; the result has no consequences."""

        async def call() -> bool:
            assert self._parts is not None
            messages = decode_records(
                record,
                broker_name,
                namespace=self._session.options.namespace,
                received_ms=self._session.clock.now_ms(),
            )
            return retry_from_result(await self._parts.calls.call(messages[:1])) is None

        return await broker_requests.try_handler(
            call, self._session.clock, orderly=self._options.orderly
        )

    async def explain(self) -> list[str]:
        """Why no messages are received or handled."""
        if self._parts is None:
            return ["there is no subscription" if not self._subscriptions else "it is not started"]
        return await self._parts.diagnosis.explain()

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
