"""Writes the entries of the revive log, which `revive_log` describes, and applies them in memory.

An entry is written before it is applied. It is made in a buffer that is used again, so a checkpoint
or an ack makes no other objects than those that stay in memory.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.broker.pop.checkpoints import CheckpointKey, PopCheckpoint, PopCheckpoints
from penstock.errors import MessageIllegal, NotWriteable, PenstockError
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK, StoreWriter
from penstock.wire import octets
from penstock.wire.output import Output
from penstock.wire.record import Record

NO_OFFSET = -1
"""In place of the group's next offset: the entry does not contain one."""
NEXT_PROPERTY = "POP_NEXT"
_NO_OFFSET = NO_OFFSET
_PUT_OK, _ILLEGAL = PUT_OK, ILLEGAL
_NEXT = f"{NEXT_PROPERTY}\x01".encode()
_DELIVER = b"TIMER_DELIVER_MS\x01"
_NUMBER_BYTES = 20
_encode_json = msgspec.json.encode


class ReviveWriter:
    """Writes checkpoints and acks.

    Its methods raise the error of the store if an entry can't be written.
    """

    def __init__(
        self,
        writer: StoreWriter,
        queues: list[ConsumeQueue],
        checkpoints: PopCheckpoints,
        broker_name: str,
        host: bytes,
    ) -> None:
        self._writer: StoreWriter = writer
        self._queues: list[ConsumeQueue] = queues
        self._checkpoints: PopCheckpoints = checkpoints
        self._broker_name: bytes = _encode_json(broker_name)
        # By queue: the entries before this one are applied.
        self.read_to: list[int] = [0] * len(queues)
        # The log offset after the last entry: offsets are saved once it is flushed.
        self.flush_to: int = 0
        # Entries since the start, by (group, topic, type).
        self.written: Counter[tuple[str, str, str]] = Counter()
        # The record that is made: topic, properties and body one after another.
        self._text: Output = Output(4096)
        self._record: Record = Record()
        self._record.born_host = self._record.store_host = host

    def add(self, checkpoint: PopCheckpoint, now_ms: int, next_offset: int = NO_OFFSET) -> None:
        """Write and add a checkpoint; the entry contains the group's next offset, if given."""
        self.write_checkpoint(checkpoint, now_ms, next_offset)
        self._checkpoints.add(checkpoint)

    def ack(self, checkpoint: PopCheckpoint, bits: int, now_ms: int) -> int:
        """Write and apply acks of a checkpoint; returns how many messages were in flight."""
        bits &= ~checkpoint.acked
        if bits == 0 or not checkpoint.open:
            return 0
        queue_id = checkpoint.revive_queue_id
        several = bits & (bits - 1) != 0
        self._begin(queue_id, b"TAGS\x01bAck\x02" if several else b"TAGS\x01ack\x02", now_ms)
        self._put(b'{"ao":')
        if several:
            self._put(b'0,"aol":[')
        index = 0
        first = True
        while index < checkpoint.count:
            if bits >> index & 1:
                if not first:
                    self._put(b",")
                first = False
                self._put_number(checkpoint.start_offset + checkpoint.distance(index))
            index += 1
        self._put(b"]" if several else b"")
        self._end_ack(checkpoint.key, queue_id, now_ms)
        return self._checkpoints.ack(checkpoint, bits)

    def write_acks(
        self, key: CheckpointKey, queue_id: int, offsets: list[int], now_ms: int
    ) -> None:
        """Write acks of a checkpoint that is not known."""
        several = len(offsets) > 1
        self._begin(queue_id, b"TAGS\x01bAck\x02" if several else b"TAGS\x01ack\x02", now_ms)
        self._put(b'{"ao":0,"aol":' if several else b'{"ao":')
        self._put(_encode_json(offsets if several else offsets[0]))
        self._end_ack(key, queue_id, now_ms)

    def write_checkpoint(
        self, checkpoint: PopCheckpoint, now_ms: int, next_offset: int = NO_OFFSET
    ) -> None:
        """Write a checkpoint, or write it again."""
        topic, group, queue_id, start_offset, pop_ms = checkpoint.key
        self._put_tag(checkpoint.revive_queue_id, b"TAGS\x01ck\x02")
        if next_offset != _NO_OFFSET:
            self._put(_NEXT)
            self._put_number(next_offset)
            self._put(b"\x02")
        self._put_deliver_ms(pop_ms + checkpoint.invisible_ms - 1000)
        acked = checkpoint.acked
        if acked >= 0x80000000:  # an int of Java
            acked -= 0x100000000
        # The members are in alphabetical order, as RocketMQ writes them.
        self._put(b'{"bm":')
        self._put_number(acked)
        self._put(b',"bn":')
        self._put(self._broker_name)
        self._put(b',"c":')
        self._put(_encode_json(group))
        self._put(b',"d":[')
        index = 0
        while index < checkpoint.count:
            if index > 0:
                self._put(b",")
            self._put_number(checkpoint.distance(index))
            index += 1
        self._put(b'],"it":')
        self._put_number(checkpoint.invisible_ms)
        self._put(b',"n":')
        self._put_number(checkpoint.count)
        self._put(b',"pt":')
        self._put_number(pop_ms)
        self._put(b',"q":')
        self._put_number(queue_id)
        self._put(b',"ro":0,"so":')
        self._put_number(start_offset)
        self._put(b',"t":')
        self._put(_encode_json(topic))
        self._put(b"}")
        self._write(checkpoint.revive_queue_id, now_ms)
        checkpoint.revive_offset = self._writer.queue_offset
        checkpoint.revive_log_offset = self._writer.offset
        self.written[group, topic, "CK"] += 1

    def write(self, body: bytes, tag: str, queue_id: int, now_ms: int) -> int:
        """Write another entry; returns its queue offset."""
        self._begin(queue_id, f"TAGS\x01{tag}\x02".encode(), now_ms)
        self._put(body)
        self._write(queue_id, now_ms)
        return self._writer.queue_offset

    # --- the record

    def _begin(self, queue_id: int, tags: bytes, deliver_ms: int) -> None:
        """Begin an entry for this queue: its body follows."""
        self._put_tag(queue_id, tags)
        self._put_deliver_ms(deliver_ms)

    def _put_tag(self, queue_id: int, tags: bytes) -> None:
        record, queue = self._record, self._queues[queue_id]
        self._text.length = 0
        self._put(queue.topic)
        record.topic_at = 0
        record.topic_length = record.properties_at = self._text.length
        self._put(tags)

    def _put_deliver_ms(self, deliver_ms: int) -> None:
        """End the properties: RocketMQ's brokers read the time, should one open this store."""
        record = self._record
        self._put(_DELIVER)
        self._put_number(deliver_ms)
        self._put(b"\x02")
        record.properties_length = self._text.length - record.properties_at
        record.body_at = self._text.length

    def _end_ack(self, key: CheckpointKey, queue_id: int, now_ms: int) -> None:
        """End the body of an ack, and write the entry."""
        topic, group, ordinary_id, start_offset, pop_ms = key
        self._put(b',"bn":')
        self._put(self._broker_name)
        self._put(b',"c":')
        self._put(_encode_json(group))
        self._put(b',"pt":')
        self._put_number(pop_ms)
        self._put(b',"q":')
        self._put_number(ordinary_id)
        self._put(b',"so":')
        self._put_number(start_offset)
        self._put(b',"t":')
        self._put(_encode_json(topic))
        self._put(b"}")
        self._write(queue_id, now_ms)
        self.written[group, topic, "ACK"] += 1

    def _write(self, queue_id: int, now_ms: int) -> None:
        record, writer, queue = self._record, self._writer, self._queues[queue_id]
        record.bind(self._text.view)
        record.body_length = self._text.length - record.body_at
        record.queue_id = queue_id
        record.born_ms = now_ms
        status = writer.check(record)
        if status == _PUT_OK:
            status = writer.put_in(record, queue, now_ms)
        if status != _PUT_OK:
            self._refuse(status)
        self.flush_to = writer.offset + record.size
        if self.read_to[queue_id] == writer.queue_offset:
            self.read_to[queue_id] += 1

    def _refuse(self, status: int) -> None:
        writer = self._writer
        if status == _ILLEGAL:
            raise MessageIllegal(f"the entry for the revive log is not valid ({writer.problem})")
        if isinstance(writer.fault, PenstockError):
            raise writer.fault
        raise NotWriteable(f"the revive log can't be written: {writer.fault}")

    def _put(self, text: bytes) -> None:
        output = self._text
        output.reserve(len(text))
        output.length += octets.put_bytes(output.view, output.length, text)

    def _put_number(self, number: int) -> None:
        output = self._text
        output.reserve(_NUMBER_BYTES)
        output.length += octets.put_decimal(output.view, output.length, number)
