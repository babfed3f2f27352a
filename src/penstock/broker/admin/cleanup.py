"""Files that are not needed any more, deleted when a tool asks for it and not when it is due."""

import logging
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

import msgspec

from penstock.broker.context import BrokerContext
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store import retention
from penstock.wire.codes import RequestCode, is_system_topic

log = logging.getLogger(__name__)

TOPICS_AT_ONCE = 10
"""How many topics are cleaned while the loop waits: a few milliseconds."""


class CleaningHandlers:
    """CLEAN_EXPIRED_CONSUMEQUEUE, CLEAN_UNUSED_TOPIC, DELETE_EXPIRED_COMMITLOG."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, self.clean_queues),
            Row(RequestCode.CLEAN_UNUSED_TOPIC, self.clean_topics),
            Row(RequestCode.DELETE_EXPIRED_COMMITLOG, self.clean_log),
        ]

    def clean_queues(self, command: Command) -> Answer:
        """Delete queue and index files that only speak of messages which are gone."""
        self._context.store.expire(0)
        return Reply()

    def clean_topics(self, command: Command) -> Answer:
        """Delete the queues of topics that do not exist (any more)."""
        return self._clean_some(iter(list(self._context.store.queues.topics)), command.peer)

    def _clean_some(self, stored: Iterator[bytes], peer: str) -> Answer:
        """Clean a few of these, where they are unused, and the others after their files."""
        store = self._context.store
        unused = list(islice(filter(self._is_unused, stored), TOPICS_AT_ONCE))
        if not unused:
            return Reply()
        for name in unused:
            log.info("%s has the queues of %s removed: no such topic", peer, name.decode())
            store.remove_queues(name)
        return InThread(store.finish_removal, lambda _: self._clean_some(stored, peer))

    def _is_unused(self, name: bytes) -> bool:
        topic = name.decode()
        return self._context.topics.get(topic) is None and not is_system_topic(topic)

    def clean_log(self, command: Command) -> Answer:
        """Delete expired segments now, whatever the hour."""
        store = self._context.store
        segments = [(s.start, s.size, s.path) for s in store.log.segments.items]
        hour = datetime.fromtimestamp(command.now_ms / 1000).hour
        config = msgspec.structs.replace(store.config, delete_hours=str(hour))
        pinned_from = store.maintenance.pinned_from()

        def decide() -> int:
            aged = [
                retention.AgedSegment(start, size, store.disk.modified_ms(path))
                for start, size, path in segments
            ]
            percent = store.disk.space(store.paths.log).percent
            decision = retention.decide(
                config,
                aged,
                now_ms=command.now_ms,
                hour=hour,
                disk_percent=percent,
                refusing=False,
                pinned_from=pinned_from,
            )
            return decision.delete

        def delete(count: int) -> Answer:
            # Others may have deleted some of them since.
            gone = sum(start < store.log.begin() for start, _, _ in segments)
            if count > gone:
                store.expire(count - gone)
            return Reply()

        return InThread(decide, delete)
