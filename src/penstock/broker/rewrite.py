"""Storing a message of the log once more, in another queue: delayed and timed messages that are
due, committed halves, retries.

The copy has the body, the birth and (unless told otherwise) the flags of the original; where and
when it is stored is its own.
"""

import logging
from typing import Final

from penstock.broker.topics import Topics
from penstock.errors import InvalidParameter, MessageIllegal, NotWriteable, PenstockError
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.codes import PERM_READ_WRITE, TOPIC_TRANS_HALF
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.record import RECORD, Record, StoredRecord

log = logging.getLogger(__name__)

_I32_MAX: Final = (1 << 31) - 1
_QUEUES_LEAST: Final = 4


class MessageRewriter:
    """Reads one stored record at a time and puts it into queues."""

    def __init__(self, store: MessageStore, topics: Topics) -> None:
        self._store = store
        self._topics = topics
        self._data = b""
        self._record = Record(_I32_MAX)
        self.stored = StoredRecord()
        self.text = b""  # its properties

    def read(self, data: bytes) -> bool:
        """Take a record to copy; False if it is none."""
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
        """What a status other than PUT_OK means, as an error."""
        writer = self._store.writer
        if status == ILLEGAL:
            return MessageIllegal(f"the message can't be stored again (problem {writer.problem})")
        if isinstance(writer.fault, PenstockError):
            return writer.fault
        return NotWriteable(f"the message can't be stored: {writer.fault}")

    def destination(
        self, topic: str, queue_id: int, place: int, now_ms: int
    ) -> ConsumeQueue | None:
        """The queue that a message was sent to; None if its topic was deleted since.

        `place` is the log offset where it waited. A topic that a send made may be lost in a crash,
        while the message is parked: it is made anew. In one that was made smaller the message goes
        where consumers look. Raises InvalidParameter.
        """
        if topic == TOPIC_TRANS_HALF or place < self._store.deleted_below(topic.encode()):
            return None
        config = self._topics.get(topic)
        if config is None:
            queues = max(_QUEUES_LEAST, queue_id + 1)
            log.warning("the topic %s of a message that waited is unknown: made anew", topic)
            config = self._topics.ensure(topic, queues, PERM_READ_WRITE, now_ms)
        queues = max(config.read_queue_nums, config.write_queue_nums)
        if queue_id >= queues > 0:
            queue_id %= max(config.read_queue_nums, 1)
        queue = self._store.make_queue(topic.encode(), queue_id)
        if queue is None:
            raise InvalidParameter(f"there can't be a queue {queue_id}")
        return queue
