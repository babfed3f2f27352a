"""What pulls read, resolved once per group, queue and subscription instead of once per pull.

`PullRequests` has the rules and resolves; what it has allowed is kept here as a target. On every
use a target is compared with what it was resolved from: the settings, the configs of topic and
group, and the subscription of the group's last heartbeat are replaced by other objects when they
change, and a deleted queue is marked. So a target is never used after a change.

There are no targets for pulls with a filter, nor while slaves may be suggested to consumers
(`read_from_slaves`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.broker.consumers.consumer_targets import ConsumerTarget, TargetKey, TargetTable
from penstock.broker.flow_counters import FlowCounter
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import TAG_HASHES_MAX
from penstock.wire import octets
from penstock.wire.codes import PULL_SUBSCRIPTION
from penstock.wire.frame import Request

if TYPE_CHECKING:
    from penstock.broker.consumers.clients import Clients
    from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
    from penstock.broker.consumers.groups import Groups
    from penstock.broker.context import BrokerContext
    from penstock.broker.pull.pull_subscription import Wanted
    from penstock.config import LiveSettings, Settings
    from penstock.wire.bodies.client_bodies import (
        SubscriptionData,
        SubscriptionGroupConfig,
        TopicConfig,
    )

_TAG = b"TAG"
_PULL_SUBSCRIPTION = PULL_SUBSCRIPTION


class PullTarget(ConsumerTarget):
    """A queue, and what a group wants of it."""

    def __init__(self, key: TargetKey, queue: ConsumeQueue, tag_hashes: Sequence[int]) -> None:
        ConsumerTarget.__init__(self, key, queue)
        # Hashes of the wanted tags; none means all.
        self.tag_hashes: Sequence[int] = tag_hashes
        # What it was resolved from.
        self.settings: Settings | None = None
        self.topic_config: TopicConfig | None = None
        self.group_config: SubscriptionGroupConfig | None = None
        # The same for a pull without a subscription of its own.
        self.message_model: str = ""
        self.subscription: SubscriptionData | None = None
        self.version: int = 0
        # The group's counter, from the first delivery until it is dropped.
        self.delivered: FlowCounter | None = None


class PullTargets:
    """The targets of pulls."""

    def __init__(self, context: BrokerContext) -> None:
        # What targets are resolved from. The mappings stay the same as long as the broker.
        self._settings: LiveSettings = context.settings
        self._topics: Mapping[str, TopicConfig] = context.topics.table.topics
        self._groups: Mapping[str, SubscriptionGroupConfig] = context.groups.table.groups
        self._group_table: Groups = context.groups
        self._clients: Clients = context.clients
        self._offsets: ConsumerOffsets = context.offsets
        self._table: TargetTable = TargetTable()
        # The key of the current request.
        self._key: TargetKey = TargetKey()

    def find(self, request: Request, flags: int) -> PullTarget | None:
        """The target of a pull with these flags (`sysFlag`); None if it has to be resolved."""
        if not self._read_key(request, flags):
            return None
        target: PullTarget | None = self._table.find(self._key)
        if target is None or not self.is_current(target):
            return None
        if not target.with_expression and not self._is_subscribed(target, request):
            return None
        return target

    def is_current(self, target: PullTarget) -> bool:
        """Whether nothing has changed that decides if the queue may be read, and from where on.

        The subscription is not compared: a suspended pull keeps that of its request.
        """
        return (
            target.settings is self._settings.current
            and not target.queue.deleted
            and self._topics.get(target.topic) is target.topic_config
            and self._groups.get(target.group) is target.group_config
            and not self._offsets.has_reset(target.group, target.topic, target.queue_id)
        )

    def _is_subscribed(self, target: PullTarget, request: Request) -> bool:
        """Whether the group's subscription is the same, and not older than the request's."""
        members = self._clients.consumer_group(target.group)
        version = request.find(b"subVersion")
        return (
            members is not None
            and members.message_model == target.message_model
            and members.subscriptions.get(target.topic) is target.subscription
            and (version < 0 or request.number(version) <= target.version)
            and self._group_table.may_read(target.group, target.topic)
        )

    def keep(self, request: Request, flags: int, queue: ConsumeQueue, wanted: Wanted) -> None:
        """Keep what a pull wants of a queue, which it has just been allowed to read."""
        settings = self._settings.current
        if (
            wanted.filter is not None
            or settings.replication.read_from_slaves
            or not self._read_key(request, flags)
        ):
            return
        # With too many tags the broker does not filter; clients check the tags too.
        hashes = wanted.tag_hashes if len(wanted.tag_hashes) <= TAG_HASHES_MAX else ()
        target = PullTarget(self._key, queue, array("q", hashes))
        target.settings = settings
        target.topic_config = self._topics.get(target.topic)
        target.group_config = self._groups.get(target.group)
        if not target.with_expression:
            members = self._clients.consumer_group(target.group)
            assert members is not None
            target.message_model = members.message_model
            target.subscription = members.subscriptions[target.topic]
            target.version = members.subscriptions[target.topic].sub_version
        self._table.put(self._key, target)

    def _read_key(self, request: Request, flags: int) -> bool:
        """Read the key of a pull; False if there can't be a target."""
        own = flags & _PULL_SUBSCRIPTION != 0
        if own:
            kind = request.find(b"expressionType")
            if kind >= 0 and request.value_length(kind) > 0:
                length = request.value_length(kind)
                at = request.value_at(kind)
                if length != len(_TAG) or not octets.matches(request.buffer, at, _TAG):
                    return False
        return self._key.read(request, b"subscription" if own else None)
