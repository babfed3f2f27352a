"""Which delayed messages and timer messages a master has delivered last, as its log tells.

A slave that becomes the master has offsets that are some seconds old. What the old master delivered
since then is in the log: a copy of the waiting message in its real topic, with the same unique id.
So the delay levels continue behind the last delivered message, and the timer leaves out what was
delivered. Messages without a unique id are delivered again.

The log is searched from a position on that the slave noted; at most SEARCH_BYTES_MAX of it. Waits
for the disk.
"""

import logging
from collections import Counter
from typing import Final

from penstock.broker.delay.delivery_time import TimerKey
from penstock.broker.transaction.half_recovery import walk_log
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import DelayOffsetTable
from penstock.wire.codes import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    TOPIC_SCHEDULE,
    TOPIC_TIMER,
)
from penstock.wire.message import decode_properties
from penstock.wire.record import RECORD, StoredRecord

log = logging.getLogger(__name__)

SEARCH_BYTES_MAX: Final = 256 * 1024 * 1024
"""Most bytes of the log that are searched: less than a second if they are in the page cache."""
_DELAYED_MARK: Final = PROPERTY_REAL_TOPIC.encode()
_TIMER_MARK: Final = PROPERTY_TIMER_DEQUEUE_MS.encode()


class DeliveredMessages:
    """Messages that were delivered by time."""

    def __init__(self) -> None:
        self.timers: set[TimerKey] = set()
        # Real topic, unique id and reconsume times of delayed messages. A message that is consumed
        # again is delayed again under the same id.
        self._delayed: Counter[tuple[str, str, int]] = Counter()

    def search(self, store: MessageStore, offset: int) -> None:
        """Find delivered messages in the log from `offset` on."""
        offset = max(offset, store.log.begin(), store.confirm_offset - SEARCH_BYTES_MAX)
        marks = (_DELAYED_MARK, _TIMER_MARK)
        for stored in walk_log(store, offset, marks) if offset < store.confirm_offset else ():
            at = stored.properties_at
            text = bytes(stored.buffer[at : at + stored.properties_length])
            self._add(stored, decode_properties(text))

    def _add(self, stored: StoredRecord, properties: dict[str, str]) -> None:
        topic, key = _topic(stored), properties.get(PROPERTY_UNIQ_KEY, "")
        if not key:
            return
        if PROPERTY_TIMER_DEQUEUE_MS in properties and topic != TOPIC_TIMER:
            self.timers.add((topic, key, properties.get(PROPERTY_TIMER_OUT_MS, "")))
        if properties.get(PROPERTY_REAL_TOPIC) == topic:
            self._delayed[topic, key, stored.reconsume_times] += 1

    def advance(self, store: MessageStore, table: DelayOffsetTable, now_ms: int) -> None:
        """Move the offset of each delay level behind its delivered messages."""
        for queue in store.queues.of(TOPIC_SCHEDULE.encode()):
            level = queue.queue_id + 1
            before = max(table.get(level), queue.min_offset)
            offset = before
            while self._take(store, queue, offset):
                offset += 1
            if offset > before:
                log.info(
                    "delay level %d continues at offset %d: the old master has delivered %d more "
                    "messages",
                    level,
                    offset,
                    offset - before,
                )
                table.commit(level, offset, now_ms)

    def _take(self, store: MessageStore, queue: ConsumeQueue, offset: int) -> bool:
        """Whether the message at this offset of a delay level was delivered."""
        entry = queue.entry(offset)
        data = None if entry is None else store.lookup.record(entry[0], store.confirm_offset)
        if data is None:
            return False
        stored = StoredRecord()
        stored.bind(memoryview(bytearray(data)))
        if stored.read(0, len(data)) != RECORD:
            return False
        text = data[stored.properties_at : stored.properties_at + stored.properties_length]
        properties = decode_properties(text)
        topic, unique = properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_UNIQ_KEY)
        key = (topic, unique or "", stored.reconsume_times)
        if not unique or self._delayed[key] <= 0:
            return False
        self._delayed[key] -= 1
        return True


def _topic(stored: StoredRecord) -> str:
    topic = stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length]
    return bytes(topic).decode("utf-8", "replace")
