"""What pops read, resolved once per group, topic, queue id and expression, not once per pop.

`PopRequestReader` and `PopQueues` have the rules; what they have allowed is kept here as a target.
On every use a target is compared with what it was resolved from: the settings and the configs of
topics and group are replaced by other objects when they change. So a target is never used after a
change. The queues are looked up by each pop, because they are made for their first messages.

There are no targets for ordered pops, by priority, with a filter, from a retry topic, and for
topics with so many queues that a pop looks at them in several steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.broker.consumers.consumer_targets import ConsumerTarget, TargetKey, TargetTable
from penstock.broker.pop import pop_polling
from penstock.broker.priority import priority_factor
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import TAG_HASHES_MAX
from penstock.wire import octets
from penstock.wire.codes import RETRY_TOPIC_PREFIX
from penstock.wire.frame import Request

if TYPE_CHECKING:
    from penstock.broker.consumers.groups import Groups
    from penstock.broker.context import BrokerContext
    from penstock.broker.pop.pop_polling import PopPolling
    from penstock.broker.pop.pop_request import PopRequest
    from penstock.config import LiveSettings, Settings
    from penstock.store.store import MessageStore
    from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig

_TAG = b"TAG"


class PopTopic:
    """A topic that a pop reads: the requested one, or a retry topic of the group."""

    def __init__(self, name: str, config: TopicConfig | None, retry: bool) -> None:
        self.name: str = name
        self.name_bytes: bytes = name.encode()
        self.retry: bool = retry
        # What it was resolved from; None if the topic does not exist.
        self.config: TopicConfig | None = config
        self.queues: int = 0 if config is None else config.read_queue_nums


class ResolvedPop(ConsumerTarget):
    """What a group pops."""

    def __init__(
        self,
        key: TargetKey,
        queue: ConsumeQueue,
        topics: list[PopTopic],
        tag_hashes: Sequence[int],
    ) -> None:
        ConsumerTarget.__init__(self, key, queue)
        # The requested topic, then the retry topics.
        self.topics: list[PopTopic] = topics
        # Hashes of the wanted tags; none means all.
        self.tag_hashes: Sequence[int] = tag_hashes
        # What it was resolved from.
        self.settings: Settings | None = None
        self.group_config: SubscriptionGroupConfig | None = None


class PopTargets:
    """The targets of pops."""

    def __init__(self, context: BrokerContext, polling: PopPolling) -> None:
        self._polling: PopPolling = polling
        self._store: MessageStore = context.store
        # What targets are resolved from. The mappings stay the same as long as the broker.
        self._settings: LiveSettings = context.settings
        self._topics: Mapping[str, TopicConfig] = context.topics.table.topics
        self._groups: Mapping[str, SubscriptionGroupConfig] = context.groups.table.groups
        self._group_table: Groups = context.groups
        self._table: TargetTable = TargetTable()
        # The key of the current request.
        self._key: TargetKey = TargetKey()

    def find(self, request: Request) -> ResolvedPop | None:
        """The target of a pop; None if it has to be resolved.

        Raises a HeaderError if the queue id is not a number.
        """
        if not self._read_key(request):
            return None
        target: ResolvedPop | None = self._table.find(self._key)
        return target if target is not None and self.is_current(target) else None

    def is_current(self, target: ResolvedPop) -> bool:
        """Whether nothing has changed that decides what may be popped."""
        if (
            target.settings is not self._settings.current
            or target.queue.deleted
            or self._groups.get(target.group) is not target.group_config
        ):
            return False
        for topic in target.topics:
            if self._topics.get(topic.name) is not topic.config:
                return False
        return self._group_table.may_read(target.group, target.topic)

    def keep(self, request: Request, pop: PopRequest) -> None:
        """Keep what a pop reads, which has just been allowed."""
        group = self._groups.get(pop.group)
        made = self._store.queues.of(pop.topic.encode())
        if (
            pop.ordered
            or pop.wanted.filter is not None
            or pop.topic.startswith(RETRY_TOPIC_PREFIX)
            or priority_factor(self._topics.get(pop.topic), group) != 0
            or not made
            or not self._read_key(request)
        ):
            return
        names = [pop.topic, *self._polling.retry_topics(pop.topic, pop.group)]
        topics = [PopTopic(name, self._topics.get(name), name != pop.topic) for name in names]
        if sum(topic.queues for topic in topics) >= pop_polling.QUEUES_PER_STEP:
            return
        # With too many tags the broker does not filter; clients check the tags too.
        hashes = pop.wanted.tag_hashes if len(pop.wanted.tag_hashes) <= TAG_HASHES_MAX else ()
        target = ResolvedPop(self._key, made[0], topics, array("q", hashes))
        target.settings = self._settings.current
        target.group_config = group
        self._table.put(self._key, target)

    def _read_key(self, request: Request) -> bool:
        """Read the key of a pop; False if there can't be a target."""
        kind = request.find(b"expType")
        if kind >= 0 and request.value_length(kind) > 0:
            length = request.value_length(kind)
            at = request.value_at(kind)
            if length != len(_TAG) or not octets.matches(request.buffer, at, _TAG):
                return False
        return self._key.read(request, b"exp", True)
