"""Deletion of files that are no longer needed, on request of a tool."""

import logging
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

import msgspec

from penstock.broker.context import BrokerContext
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.rpc.steps import run_in_steps
from penstock.store import retention
from penstock.wire.codes import RequestCode, is_system_topic

log = logging.getLogger(__name__)

STEP_TOPICS = 10
"""Topics whose files are deleted together."""


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
        """Delete queue and index files that refer only to deleted messages."""
        self._context.store.expire(0)
        return Reply()

    def clean_topics(self, command: Command) -> Answer:
        """Delete the queues of topics that do not exist."""
        return self._clean_next(iter(list(self._context.store.queues.topics)), command.peer)

    def _clean_next(self, stored: Iterator[bytes], peer: str) -> Answer:
        """Clean some of the unused topics; the next ones follow when their files are deleted."""
        store = self._context.store
        unused = list(islice(filter(self._is_unused, stored), STEP_TOPICS))
        if not unused:
            return Reply()

        def remove() -> Iterator[object]:
            for name in unused:
                log.info(
                    "removed the queues of %s, which is not a topic (by %s)", name.decode(), peer
                )
                yield from store.remove_queues(name)

        return run_in_steps(
            remove(),
            lambda: InThread(store.finish_removal, lambda _: self._clean_next(stored, peer)),
        )

    def _is_unused(self, name: bytes) -> bool:
        topic = name.decode()
        return self._context.topics.get(topic) is None and not is_system_topic(topic)

    def clean_log(self, command: Command) -> Answer:
        """Delete expired segments now, regardless of `delete_hours`."""
        store = self._context.store
        segments = [(s.start, s.size, s.path) for s in store.log.segments.items]
        hour = datetime.fromtimestamp(command.now_ms / 1000).hour
        config = msgspec.structs.replace(store.config, delete_hours=str(hour))
        pinned_from = store.maintenance.pinned_from()
        steady_ms = store.maintenance.clock.time(command.now_ms)

        def decide() -> int:
            aged = [
                retention.AgedSegment(start, size, store.disk.modified_ms(path))
                for start, size, path in segments
            ]
            decision = retention.decide(
                config,
                aged,
                now_ms=steady_ms,
                hour=hour,
                disk=store.disk.space(store.paths.log),
                refusing=False,
                pinned_from=pinned_from,
            )
            return decision.delete

        def delete(count: int) -> Answer:
            # Some of them may have been deleted since.
            gone = sum(start < store.log.begin() for start, _, _ in segments)
            if count > gone:
                store.expire(count - gone)
            return Reply()

        return InThread(decide, delete)
