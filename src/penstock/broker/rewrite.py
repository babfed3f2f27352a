"""Stores a message of the log again in another queue: delayed messages and timer messages that are
due, committed half messages, retries.

The copy has the body, the born time and host and, by default, the flags of the original. Its store
time and offsets are new.
"""

import logging
from typing import Final

from penstock.broker.topics import Topics
from penstock.errors import InvalidParameter, MessageIllegal, NotWriteable, PenstockError
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.codes import (
    PERM_READ_WRITE,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    REVIVE_TOPIC_PREFIX,
    is_internal_topic,
)
from penstock.wire.java_numbers import parse_int
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.record import RECORD, Record, StoredRecord

log = logging.getLogger(__name__)

_I32_MAX: Final = (1 << 31) - 1
_QUEUES_LEAST: Final = 4


class MessageRewriter:
    """Reads one stored record at a time and stores it in queues."""

    def __init__(self, store: MessageStore, topics: Topics) -> None:
        self._store = store
        self._topics = topics
        self._record = Record(_I32_MAX)
        # The record that was read last, its decoded header and its properties as stored.
        self._data = b""
        self.stored = StoredRecord()
        self.text = b""

    def read(self, data: bytes) -> bool:
        """Read a record; False if it is not valid."""
        self._data = data
        stored = self.stored
        stored.bind(memoryview(bytearray(data or b"\0")))
        if stored.read(0, len(data)) != RECORD:
            return False
        self.text = data[stored.properties_at : stored.properties_at + stored.properties_length]
        return True

    def properties(self) -> dict[str, str]:
        """The properties of the record that was read."""
        return decode_properties(self.text)

    def put(
        self,
        queue: ConsumeQueue,
        now_ms: int,
        *,
        properties: dict[str, str] | None = None,
        sys_flag: int | None = None,
        reconsumed: int | None = None,
        prepared_offset: int = 0,
        store_host: bytes | None = None,
    ) -> int:
        """Store the record that was read in a queue; a status of `store.put`.

        Its place is in `store.writer` afterwards: `offset` and `queue_offset`.
        """
        stored, record, data = self.stored, self._record, self._data
        text = self.text if properties is None else encode_properties(properties)
        born_at, store_at = stored.at + 48, stored.store_host_at
        record.fill(queue.topic, data[stored.body_at : stored.body_at + stored.body_length], text)
        record.queue_id = queue.queue_id
        record.flag = stored.flag
        record.sys_flag = stored.sys_flag if sys_flag is None else sys_flag
        record.born_ms = stored.born_ms
        record.born_host = data[born_at : born_at + stored.born_host_length]
        if store_host is None:
            store_host = data[store_at : store_at + stored.store_host_length]
        record.store_host = store_host
        record.reconsume_times = stored.reconsume_times if reconsumed is None else reconsumed
        record.prepared_offset = prepared_offset
        writer = self._store.writer
        status = writer.check(record)
        if status == PUT_OK:
            status = writer.put_in(record, queue, now_ms)
        record.release()
        return status

    def fault(self, status: int) -> PenstockError:
        """The error for a status other than PUT_OK."""
        writer = self._store.writer
        if status == ILLEGAL:
            return MessageIllegal(f"the message can't be stored again (problem {writer.problem})")
        if isinstance(writer.fault, PenstockError):
            return writer.fault
        return NotWriteable(f"the message can't be stored: {writer.fault}")

    def destination(
        self,
        properties: dict[str, str],
        log_offset: int,
        now_ms: int,
        *,
        may_be_revive_log: bool = False,
    ) -> ConsumeQueue | None:
        """The queue that a message was sent to, by its properties; None if its topic was deleted.

        `log_offset` is that of the waiting message. A topic that a send created may be lost in a
        crash while the message waits; it is created again. If the topic has fewer queues now, the
        message goes to a queue that consumers read. Raises InvalidParameter, also for an internal
        topic, whose messages the broker trusts: no client sends to it. Apache's brokers keep the
        checkpoints of POP as timer messages to the revive log (`may_be_revive_log`).
        """
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        queue_id = parse_int(properties.get(PROPERTY_REAL_QUEUE_ID, ""))
        if queue_id is None:
            raise InvalidParameter(f"the queue ID ({PROPERTY_REAL_QUEUE_ID}) is not a number")
        config = self._topics.get(topic)
        revive_log = topic.startswith(REVIVE_TOPIC_PREFIX) and config is not None
        if is_internal_topic(topic) and not (revive_log and may_be_revive_log):
            raise InvalidParameter(f"the topic {topic} is internal: no message is sent to it")
        if log_offset < self._store.deleted_below(topic.encode()):
            return None
        if config is None:
            queues = max(_QUEUES_LEAST, queue_id + 1)
            log.warning("created topic %s again: a waiting message was sent to it", topic)
            config = self._topics.ensure(topic, queues, PERM_READ_WRITE, now_ms)
        queues = max(config.read_queue_nums, config.write_queue_nums)
        if queue_id >= queues > 0:
            queue_id %= max(config.read_queue_nums, 1)
        queue = self._store.make_queue(topic.encode(), queue_id)
        if queue is None:
            raise InvalidParameter(f"the topic {topic} can't have a queue {queue_id}")
        return queue
