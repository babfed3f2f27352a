"""The core of a pull consumer: subscriptions, queues and requests of brokers.

`AsyncPullConsumer` is the public class. Queues are assigned by the application, or by the
rebalancer, which shares the queues of subscribed topics among the members of the group.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping

from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer import broker_requests
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.offset_store import OffsetStore, make_offset_store, stored_offset
from penstock.client.consumer.rebalance import Allocation, Rebalancer
from penstock.client.consumer.subscription import Subscription
from penstock.client.messages import MessageQueue
from penstock.client.pull.pull_options import Listener, PullConsumerOptions
from penstock.client.pull.pull_queues import PulledQueues
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import InvalidParameter
from penstock.transport.peer import PeerRequest
from penstock.wire.bodies.admin_bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from penstock.wire.bodies.client_bodies import ConsumerData, ProducerData

log = logging.getLogger(__name__)


class PullCore:
    """Session member, rebalance listener and target of brokers' requests.

    Topics and queues have the namespace, except for the application's listeners.
    """

    def __init__(self, session: Session, options: PullConsumerOptions) -> None:
        self.group = session.with_namespace(options.group)
        self.subscriptions: dict[str, Subscription] = {}
        self._assigned: tuple[MessageQueue, ...] | None = None  # by the application
        self._session = session
        self._options = options
        self._auto_commit_ms = options.auto_commit_ms if options.auto_commit else None
        self._allocated: dict[str, frozenset[MessageQueue]] = {}  # by topic, by the rebalancer
        self._started_ms = 0
        self._rates = Rates(session.clock)
        self.offsets: OffsetStore = make_offset_store(
            session, self.group, broadcast=options.broadcast, offsets_path=options.offsets_path
        )
        self.queues = PulledQueues(
            session,
            self.group,
            self.offsets,
            subscription=self._subscription,
            start_at=options.start_at,
            limits=options.limits(),
            batch=options.pull_batch,
        )
        self._rebalancer: Rebalancer | None = None

    # --- lifecycle

    async def start(self) -> None:
        """Start; the session has been started before."""
        session = self._session
        self._started_ms = session.clock.now_ms()
        await self.offsets.load()
        await session.join(self)
        if self._auto_commit_ms is not None:
            session.spawn(self._keep_committing(self._auto_commit_ms))
        if self._assigned is not None:
            self._fetch(self._assigned)
        elif self.subscriptions:
            self._start_rebalancing()

    async def close(self, *, done: bool) -> None:
        """Close; `done`: the messages of the last poll count as handled."""
        if done:
            self.mark_polled_done()
        if self._rebalancer is not None:
            await self._rebalancer.close()
        for queue in list(self.queues):
            await self._release(queue)
        await self._session.leave(self)

    def mark_polled_done(self) -> None:
        """With auto-commit: all polled messages count as handled."""
        if self._auto_commit_ms is not None:
            for queue, offset in self.queues.positions().items():
                self.offsets.update(queue, offset, only_up=False)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The stored offset of the group; None if there is none."""
        if self._options.broadcast:
            return await self.offsets.read(queue)
        return await stored_offset(self._session, self.group, queue, exact=True)

    async def _keep_committing(self, every_ms: int) -> None:
        while True:
            await pause(self._session.clock, every_ms)
            await self.offsets.persist()

    # --- subscriptions and assignment

    @property
    def idle(self) -> bool:
        """Whether there is neither a subscription nor an assignment."""
        return self._assigned is None and not self.subscriptions

    def subscribe(self, subscription: Subscription) -> None:
        """Share the queues of a topic with the group."""
        if self._assigned is not None:
            raise InvalidParameter(
                "queues are assigned", hint="use either assign or subscribe, not both"
            )
        self.subscriptions[subscription.topic] = subscription
        if self._session.started:
            self._session.spawn(self._apply_subscription(subscription.topic))

    def unsubscribe(self, topic: str) -> None:
        """Remove the subscription to a topic."""
        if self.subscriptions.pop(topic, None) is not None and self._session.started:
            self._session.spawn(self._apply_subscription(None))

    def assign(self, queues: Iterable[MessageQueue], subscriptions: Iterable[Subscription]) -> None:
        """Assign exactly these queues."""
        if self._assigned is None and self.subscriptions:
            raise InvalidParameter(
                "topics are subscribed", hint="use either assign or subscribe, not both"
            )
        before, self._assigned = self._assigned or (), tuple(dict.fromkeys(queues))
        self.subscriptions = {subscription.topic: subscription for subscription in subscriptions}
        if self._session.started:
            for queue in set(before).difference(self._assigned):
                self._session.spawn(self._release(queue))
            self._fetch(self._assigned)

    async def _apply_subscription(self, topic: str | None) -> None:
        if topic is not None:
            await self._session.find_route(topic)
        await self._session.send_heartbeats()
        if self._rebalancer is None:
            self._start_rebalancing()
        self.members_changed()

    def _start_rebalancing(self) -> None:
        options = self._options
        self._rebalancer = Rebalancer(
            self._session,
            self.group,
            self,
            self.offsets,
            broadcast=options.broadcast,
            strategy=options.strategy,
            start_at=options.start_at,
            rebalance_ms=options.rebalance_ms,
        )
        self._rebalancer.start()

    def _fetch(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            if queue not in self.queues:
                self.queues.open(queue)

    async def _release(self, queue: MessageQueue) -> None:
        self.queues.end(queue)
        if self._auto_commit_ms is not None:
            await self.offsets.persist([queue])
        self.offsets.forget(queue)

    def _subscription(self, topic: str) -> Subscription:
        return self.subscriptions.get(topic) or Subscription(topic, version=self._started_ms)

    # --- RebalanceListener

    def topics(self) -> Iterable[str]:
        """The topics of subscriptions or assigned queues."""
        return list(self.subscriptions)

    def add_queue(self, queue: MessageQueue, offset: int) -> None:
        """Start to pull a queue."""
        self.queues.start(queue, offset)

    async def remove_queue(self, queue: MessageQueue) -> None:
        """Stop a queue that is no longer assigned; `on_revoked` may still commit its offset."""
        self.queues.suspend(queue)
        await self._notify(self._options.on_revoked, [queue])
        self.queues.end(queue)

    def allocation_changed(self, allocation: Allocation) -> None:
        """Call `on_assigned` with new queues of a topic."""
        new = allocation.assigned - self._allocated.get(allocation.topic, frozenset())
        self._allocated[allocation.topic] = allocation.assigned
        if new:
            self._session.spawn(self._notify(self._options.on_assigned, sorted(new)))

    async def _notify(self, listener: Listener | None, queues: Iterable[MessageQueue]) -> None:
        if listener is None:
            return
        try:
            result = listener([public_queue(self._session, queue) for queue in queues])
            if inspect.isawaitable(result):
                await result
        except Exception:  # raised by the application
            log.exception("%s: a rebalance listener failed", self.group)

    # --- SessionMember

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        shared = self.subscriptions.values() if self._assigned is None else ()
        yield broker_requests.consumer_data(
            self.group,
            self._options,
            "CONSUME_ACTIVELY",
            [subscription.data() for subscription in shared],
        )

    def route_changed(self, route: Route) -> None:
        if route.topic in self.subscriptions:
            self.members_changed()

    def handle_request(self, request: PeerRequest, address: str) -> MemberResponse | bool:
        return broker_requests.handle_request(self, request, address)

    # --- ManagedConsumer

    def members_changed(self) -> None:
        if self._rebalancer is not None:
            self._rebalancer.wake()

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self.queues:
                self.queues.start(queue, offset)
                self.offsets.update(queue, offset, only_up=False)
        await self.offsets.persist(offsets)

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        return self.offsets.snapshot(topic)

    def running_info(self) -> ConsumerRunningInfo:
        options = self._options
        return broker_requests.running_info(
            self._session,
            subscriptions=[s.data() for s in self.subscriptions.values()],
            process_queues=self.queues.process_queues.values(),
            offsets=self.offsets,
            started_ms=self._started_ms,
            rates=self._rates,
            settings={
                **broker_requests.common_settings(options),
                "autoCommit": str(self._auto_commit_ms is not None).lower(),
                "autoCommitIntervalMillis": str(self._auto_commit_ms or 0),
            },
        )

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        return ConsumeMessageDirectlyResult(
            consume_result="CR_THROW_EXCEPTION",
            remark="a pull consumer has no handler",
        )


def public_queue(session: Session, queue: MessageQueue) -> MessageQueue:
    """A queue without namespace, as the application knows it."""
    return MessageQueue(session.without_namespace(queue.topic), queue.broker_name, queue.queue_id)
