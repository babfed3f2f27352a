"""A pull consumer as its session, its group and its brokers see it.

`pull.AsyncPullConsumer` is the face. Queues come by assignment, or by the rebalancer that shares
those of subscribed topics among the members of the group.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime

from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer import broker_requests
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.offset_store import (
    LocalOffsets,
    Offsets,
    RemoteOffsets,
    stored_offset,
)
from penstock.client.consumer.rebalance import Rebalancer, Share
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
    """Member of the session, holder of queues, and what brokers' requests are about.

    Topics and queues are named as servers know them, except for listeners.
    """

    def __init__(self, session: Session, options: PullConsumerOptions) -> None:
        self.group = session.with_namespace(options.group)
        self.subscriptions: dict[str, Subscription] = {}
        self._assigned: tuple[MessageQueue, ...] | None = None
        self._session = session
        self._options = options
        self._auto_commit_ms = options.auto_commit_ms if options.auto_commit else None
        self._known: dict[str, frozenset[MessageQueue]] = {}
        self._started_ms = 0
        self._rates = Rates(session.clock)
        self.offsets: Offsets = (
            LocalOffsets(options.offsets_path)
            if options.broadcast
            else RemoteOffsets(session, self.group)
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

    # --- life

    async def start(self) -> None:
        """Begin; the session has begun before."""
        session = self._session
        self._started_ms = session.clock.now_ms()
        await self.offsets.load()
        await session.join(self)
        if self._auto_commit_ms is not None:
            session.spawn(self._keep_committing(self._auto_commit_ms))
        if self._assigned is not None:
            self._fetch(self._assigned)
        elif self.subscriptions:
            self._share()

    async def close(self, *, done: bool) -> None:
        """End; `done`: what was polled last is done too."""
        if done:
            self.note_done()
        if self._rebalancer is not None:
            await self._rebalancer.close()
        for queue in list(self.queues):
            await self._release(queue)
        await self._session.leave(self)

    def note_done(self) -> None:
        """All that was handed out is done; only where progress is stored automatically."""
        if self._auto_commit_ms is not None:
            for queue, offset in self.queues.positions().items():
                self.offsets.update(queue, offset, only_up=False)

    async def committed(self, queue: MessageQueue) -> int | None:
        """What is stored for the group; None if nothing is, also where brokers would say 0."""
        if self._options.broadcast:
            return await self.offsets.read(queue)
        return await stored_offset(self._session, self.group, queue, exact=True)

    async def _keep_committing(self, every_ms: int) -> None:
        while True:
            await pause(self._session.clock, every_ms)
            await self.offsets.persist()

    # --- what to consume

    @property
    def idle(self) -> bool:
        """Whether nothing is subscribed or assigned."""
        return self._assigned is None and not self.subscriptions

    def subscribe(self, subscription: Subscription) -> None:
        """Share the queues of a topic with the group."""
        if self._assigned is not None:
            raise InvalidParameter("queues are assigned", hint="either assign or subscribe")
        self.subscriptions[subscription.topic] = subscription
        if self._session.started:
            self._session.spawn(self._announce(subscription.topic))

    def unsubscribe(self, topic: str) -> None:
        """Want no more of a topic."""
        if self.subscriptions.pop(topic, None) is not None and self._session.started:
            self._session.spawn(self._announce(None))

    def assign(self, queues: Iterable[MessageQueue], subscriptions: Iterable[Subscription]) -> None:
        """Take exactly these queues."""
        if self._assigned is None and self.subscriptions:
            raise InvalidParameter("topics are subscribed", hint="either assign or subscribe")
        before, self._assigned = self._assigned or (), tuple(dict.fromkeys(queues))
        self.subscriptions = {subscription.topic: subscription for subscription in subscriptions}
        if self._session.started:
            for queue in set(before).difference(self._assigned):
                self._session.spawn(self._release(queue))
            self._fetch(self._assigned)

    async def _announce(self, topic: str | None) -> None:
        if topic is not None:
            await self._session.find_route(topic)
        await self._session.send_heartbeats()
        if self._rebalancer is None:
            self._share()
        self.members_changed()

    def _share(self) -> None:
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

    # --- queues (rebalance.Holder)

    def topics(self) -> Iterable[str]:
        """What is subscribed, or has assigned queues."""
        return list(self.subscriptions)

    def take(self, queue: MessageQueue, offset: int) -> None:
        """The queue is ours from now on."""
        self.queues.begin(queue, offset)

    async def drop(self, queue: MessageQueue) -> None:
        """The queue is not ours any more; what was committed before and by the listener counts."""
        self.queues.withhold(queue)
        await self._tell(self._options.on_revoked, [queue])
        self.queues.end(queue)

    def shared(self, share: Share) -> None:
        """Our part of a topic has changed."""
        new = share.ours - self._known.get(share.topic, frozenset())
        self._known[share.topic] = share.ours
        if new:
            self._session.spawn(self._tell(self._options.on_assigned, sorted(new)))

    async def _tell(self, listener: Listener | None, queues: Iterable[MessageQueue]) -> None:
        if listener is None:
            return
        try:
            result = listener([bare_queue(self._session, queue) for queue in queues])
            if inspect.isawaitable(result):
                await result
        except Exception:  # the application's
            log.exception("%s: a listener to rebalances failed", self.group)

    # --- a member of the session

    def producers(self) -> Iterable[ProducerData]:
        return ()

    def consumers(self) -> Iterable[ConsumerData]:
        start_at = self._options.start_at
        where = "TIMESTAMP" if isinstance(start_at, datetime) else f"{start_at.upper()}_OFFSET"
        shared = self.subscriptions.values() if self._assigned is None else ()
        yield ConsumerData(
            group_name=self.group,
            consume_type="CONSUME_ACTIVELY",
            message_model="BROADCASTING" if self._options.broadcast else "CLUSTERING",
            consume_from_where=f"CONSUME_FROM_{where}",
            subscription_data_set=[subscription.data() for subscription in shared],
        )

    def route_changed(self, route: Route) -> None:
        if route.topic in self.subscriptions:
            self.members_changed()

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        return broker_requests.answer(self, ask, address)

    # --- what brokers ask for (inbound.Consuming)

    def members_changed(self) -> None:
        if self._rebalancer is not None:
            self._rebalancer.wake()

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self.queues:
                self.queues.begin(queue, offset)
                self.offsets.update(queue, offset, only_up=False)
        await self.offsets.persist(offsets)

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        return self.offsets.snapshot(topic)

    def running_info(self) -> ConsumerRunningInfo:
        options = self._options
        return broker_requests.running_info(
            self._session,
            subscriptions=[s.data() for s in self.subscriptions.values()],
            works=self.queues.works.values(),
            offsets=self.offsets,
            started_ms=self._started_ms,
            rates=self._rates,
            settings={
                "consumerGroup": options.group,
                "messageModel": "BROADCASTING" if options.broadcast else "CLUSTERING",
                "pullBatchSize": str(options.pull_batch),
                "pullThresholdForQueue": str(options.messages_max),
                "pullThresholdSizeForQueue": str(options.bytes_max // 2**20),
                "autoCommit": str(self._auto_commit_ms is not None).lower(),
                "autoCommitIntervalMillis": str(self._auto_commit_ms or 0),
            },
        )

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        return ConsumeMessageDirectlyResult(
            consume_result="CR_THROW_EXCEPTION",
            remark="a pull consumer has no handler that a message could be handed to",
        )


def bare_queue(session: Session, queue: MessageQueue) -> MessageQueue:
    """A queue as the application knows it."""
    return MessageQueue(session.without_namespace(queue.topic), queue.broker_name, queue.queue_id)
