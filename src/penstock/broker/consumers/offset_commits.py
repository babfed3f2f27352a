"""Commits of consumer offsets in the connection's buffer (code 15): the usual ones.

What `OffsetRequests` would find out about group, topic and queue is kept as a target, and compared
on every use with what it was found out from. Whatever is unusual is left to `OffsetRequests`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.broker.consumers.consumer_targets import ConsumerTarget, TargetKey, TargetTable
from penstock.rpc.command import Command
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.frame import Request
from penstock.wire.output import Output

if TYPE_CHECKING:
    from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
    from penstock.broker.consumers.offset_requests import OffsetRequests
    from penstock.rpc.answers import Answer
    from penstock.store.store import MessageStore
    from penstock.store.tables.config_tables import SubscriptionGroupTable, TopicTable
    from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig

_SUCCESS = 0
_ONEWAY = 2


class CommitTarget(ConsumerTarget):
    """A queue that a group may commit an offset of."""

    def __init__(self, key: TargetKey, queue: ConsumeQueue) -> None:
        ConsumerTarget.__init__(self, key, queue)
        # What it was resolved from.
        self.topic_config: TopicConfig | None = None
        self.group_config: SubscriptionGroupConfig | None = None


class OffsetCommits:
    """Handles commits of offsets."""

    def __init__(
        self,
        requests: OffsetRequests,
        offsets: ConsumerOffsets,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroupTable,
    ) -> None:
        self._requests: OffsetRequests = requests
        self._offsets: ConsumerOffsets = offsets
        self._store: MessageStore = store
        # The mappings stay the same as long as the broker.
        self._topics: Mapping[str, TopicConfig] = topics.topics
        self._groups: Mapping[str, SubscriptionGroupConfig] = groups.groups
        self._table: TargetTable = TargetTable()
        # The key of the current request.
        self._key: TargetKey = TargetKey()

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Commit the offset and, unless the request is one-way, write the response."""
        field = request.find(b"commitOffset")
        if field >= 0 and self._key.read(request, None):
            offset = request.number(field)
            target = self._table.find(self._key)
            if target is not None and offset >= 0 and self._is_current(target):
                if self._offsets.commit(
                    target.group, target.topic, target.queue_id, offset, now_ms
                ):
                    if request.flag & _ONEWAY == 0:
                        output.begin(request.encoding, _SUCCESS, request.opaque)
                        output.end(0)
                    return None
            else:
                return self._resolve(request, client, now_ms)
        return self._requests.commit(self._command(request, client, now_ms))

    def _is_current(self, target: CommitTarget) -> bool:
        return (
            not target.queue.deleted
            and self._topics.get(target.topic) is target.topic_config
            and self._groups.get(target.group) is target.group_config
        )

    def _resolve(self, request: Request, client: int, now_ms: int) -> Answer:
        """Let `OffsetRequests` commit, and keep the target if it accepts."""
        answer = self._requests.commit(self._command(request, client, now_ms))
        key = self._key
        queue = self._store.queues.get(key.topic(), key.queue_id)
        if queue is not None:
            target = CommitTarget(key, queue)
            target.topic_config = self._topics.get(target.topic)
            target.group_config = self._groups.get(target.group)
            self._table.put(key, target)
        return answer

    def _command(self, request: Request, client: int, now_ms: int) -> Command:
        return Command(
            request.code,
            request.ext(),
            client=client,
            now_ms=now_ms,
            flag=request.flag,
            encoding=request.encoding,
        )
