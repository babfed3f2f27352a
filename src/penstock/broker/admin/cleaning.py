"""Files that are not needed any more, deleted when a tool asks for it and not when it is due."""

import logging
from datetime import datetime

import msgspec

from penstock.broker.answers import Answer, InThread, Reply
from penstock.broker.command import Command
from penstock.broker.parts import Parts
from penstock.broker.router import Row
from penstock.store import retention
from penstock.wire.codes import RequestCode, is_system_topic

log = logging.getLogger(__name__)


class CleaningHandlers:
    """CLEAN_EXPIRED_CONSUMEQUEUE, CLEAN_UNUSED_TOPIC, DELETE_EXPIRED_COMMITLOG."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, self.clean_queues),
            Row(RequestCode.CLEAN_UNUSED_TOPIC, self.clean_topics),
            Row(RequestCode.DELETE_EXPIRED_COMMITLOG, self.clean_log),
        ]

    def clean_queues(self, command: Command) -> Answer:
        """Delete queue and index files that only speak of messages which are gone."""
        self._parts.store.expire(0)
        return Reply()

    def clean_topics(self, command: Command) -> Answer:
        """Delete the queues of topics that do not exist (any more)."""
        store = self._parts.store
        stored = {queue.topic for queue in store.queues.rows}
        for name in sorted(stored):
            topic = name.decode("utf-8", "replace")
            if self._parts.topics.get(topic) is None and not is_system_topic(topic):
                log.info("%s has the queues of %s removed: no such topic", command.peer, topic)
                store.remove_queues(name)
        return InThread(store.finish_removal, lambda _: Reply())

    def clean_log(self, command: Command) -> Answer:
        """Delete expired segments now, whatever the hour."""
        store = self._parts.store
        segments = [(s.start, s.size, s.path) for s in store.log.row.segments]
        hour = datetime.fromtimestamp(command.now_ms / 1000).hour
        config = msgspec.structs.replace(store.config, delete_hours=str(hour))
        pinned_from = store.care.pinned_from()

        def decide() -> int:
            aged = [
                retention.Aged(start, size, store.disk.modified_ms(path))
                for start, size, path in segments
            ]
            percent = store.disk.space(store.layout.log).percent
            decision = retention.decide(
                config, aged, now_ms=command.now_ms, hour=hour, disk_percent=percent,
                refusing=False, pinned_from=pinned_from,
            )  # fmt: skip
            return decision.delete

        def delete(count: int) -> Answer:
            # Others may have deleted some of them since.
            gone = sum(start < store.log.begin() for start, _, _ in segments)
            if count > gone:
                store.expire(count - gone)
            return Reply()

        return InThread(decide, delete)
