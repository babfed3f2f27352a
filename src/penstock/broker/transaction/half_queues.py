"""What the store holds of transactions: the queue of halves, the queue of op messages.

| Topic | Holds |
|---|---|
| RMQ_SYS_TRANS_HALF_TOPIC | halves, and again those whose checks were counted |
| RMQ_SYS_TRANS_OP_HALF_TOPIC | for each append of a half that is done with, its queue offset |

An op message has the tag `d` and a body of queue offsets, `12,13,`. It lies right behind the
message that was committed. Where it could not be stored it goes ahead of the next one, into the
same body: so whatever lies before an op message of ours has got its own.

How far both queues are done with is noted as progress of the group CID_RMQ_SYS_TRANS, as Apache's
brokers do. It never runs ahead of what is on the disk.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import ClassVar, Final, NamedTuple

from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    NOWHERE,
    Half,
    HalfRecord,
    Halves,
    fits,
    read_half,
)
from penstock.errors import PenstockError
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import COLD, FOUND, OFFSET_OVERFLOW_BADLY, OFFSET_OVERFLOW_ONE
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion
from penstock.wire.codes import (
    GROUP_SYS_TRANS,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
)
from penstock.wire.message import encode_properties, split_records
from penstock.wire.output import Output
from penstock.wire.record import Record

log = logging.getLogger(__name__)

HALF: Final = TOPIC_TRANS_HALF.encode()
OP: Final = TOPIC_TRANS_OP_HALF.encode()
DONE_TAG: Final = "d"
_DONE: Final = encode_properties({PROPERTY_TAGS: DONE_TAG})

OP_BYTES_MAX: Final = 4096
"""Longest body of an op message, as in RocketMQ."""
FOLLOW_MAX: Final = 256
FOLLOW_BYTES_MAX: Final = 1024 * 1024
"""Halves that are read before others have their turn."""
POLL_MS: Final = 5
"""How often a read that waits for the disk is asked for."""
RETRY_MS: Final = 100
"""After a read that failed, or a store that refused."""
STEPS_MAX: Final = 1024
"""Notes of which op messages belong to which halves."""
NEVER: Final = 1 << 62

_OFFSET_DIGITS_MAX: Final = 18


class TransactionsFile(Body):
    """The content of the table's file."""

    data_version: DataVersion = DataVersion()
    searched_to: int = 0


class TransactionTable:
    """Up to where in the log every message that was committed has its op message.

    It bounds what the next start has to search for those that lack it.
    """

    FILE: ClassVar[str] = "config/penstock-transactions.json"

    def __init__(self) -> None:
        self.dirty = False
        self._content = TransactionsFile()

    @property
    def searched_to(self) -> int:
        return self._content.searched_to

    def load(self, file: ConfigFile) -> None:
        found = file.load(lambda data: fastjson.decode(data, TransactionsFile))
        if found is not None:
            self._content = found

    def note(self, searched_to: int, now_ms: int) -> None:
        version = self._content.data_version.next(now_ms)
        self._content = TransactionsFile(data_version=version, searched_to=searched_to)
        self.dirty = True

    def forget(self) -> None:
        """What was noted speaks of a log that is no more."""
        self._content = TransactionsFile(data_version=self._content.data_version)
        self.dirty = True

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(self._content)


class Run(NamedTuple):
    """Halves that were read, and where to go on."""

    begin: int
    end: int
    records: list[bytes]


class Mark(NamedTuple):
    """Progress that may be noted when the log is on the disk up to `log_end`."""

    half: int
    op: int
    log_end: int


class HalfLog:
    """Reads and writes the two queues."""

    def __init__(self, context: BrokerContext, halves: Halves, host: bytes) -> None:
        self._context = context
        self._store = context.store
        self._halves = halves
        self._host = host
        self._record = Record()
        self.table = TransactionTable()
        self.table.load(context.persistence.file(self.table.FILE))
        self.undone: list[int] = []
        """Appends that are done with and that no op message names yet."""
        self.refused = False
        self.followed_to = self._store.log.end
        """No half that is still to be followed lies below this log offset."""
        self._reading: Future[Run | None] | None = None
        self._mark: Mark | None = None
        self._steps: deque[tuple[int, int]] = deque()
        """(half, op): op messages before `op` name only appends before `half`; ascending."""

    @property
    def queue(self) -> ConsumeQueue | None:
        """The queue of halves, if there ever was one."""
        return self._store.queues.get(HALF, 0)

    def make_queue(self) -> ConsumeQueue:
        queue = self._store.make_queue(HALF, 0)
        assert queue is not None
        return queue

    # --- op messages

    def finish(self, appends: Iterable[int], now_ms: int) -> None:
        """These appends are done with: say so in an op message, or later if that is refused."""
        self.undone += appends
        self.write_ops(now_ms)

    def close(self, half: Half, outcome: int, now_ms: int) -> None:
        """A half has ended: note it in the table and in an op message."""
        self._halves.close(half, outcome)
        self.finish(needed_of(half), now_ms)

    def write_ops(self, now_ms: int) -> None:
        """Write the op messages that are due."""
        while self.undone:
            body, count = b"", 0
            while count < len(self.undone) and len(body) < OP_BYTES_MAX:
                body += b"%d," % self.undone[count]
                count += 1
            if not self._put_op(body, now_ms):
                return
            del self.undone[:count]

    def _put_op(self, body: bytes, now_ms: int) -> bool:
        queue = self._store.make_queue(OP, 0)
        assert queue is not None
        record, path = self._record, self._store.path
        record.fill(OP, body, _DONE)
        record.born_ms = now_ms
        record.born_host = record.store_host = self._host
        status = path.check(record)
        if status == PUT_OK:
            status = path.put_in(record, queue, now_ms)
        record.release()
        if status != PUT_OK and not self.refused:
            log.error("op messages have to wait: %s", path.fault)
        self.refused = status != PUT_OK
        return not self.refused

    # --- halves

    def append_again(self, half: Half, data: bytes, now_ms: int) -> int:
        """Append a half once more with the checks that were counted; a status of `store.put`.

        The append before it is done with then.
        """
        rewriter, halves = self._context.rewriter, self._halves
        rewriter.read(data)
        properties = rewriter.properties()
        properties[PROPERTY_TRANSACTION_CHECK_TIMES] = str(half.checks)
        properties[PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET] = str(half.first)
        if not fits(properties):
            return ILLEGAL
        status = rewriter.put(
            self.make_queue(),
            now_ms,
            properties=properties,
            prepared_offset=max(half.origin, 0),
            store_host=self._host,
        )
        if status == PUT_OK:
            path, before = self._store.path, half.newest
            halves.move(half, path.queue_offset, path.offset, self._store.log.end - path.offset)
            half.noted = half.checks
            if half.origin > 0:  # at 0, it would look as if it had been ended by its first handle
                self.finish((before,), now_ms)
        return status

    def origin_of(self, record: HalfRecord) -> int:
        """Log offset of the first append of a half; may wait for the disk where the record does not
        tell, as those of other brokers do not."""
        if record.first == record.queue_offset:
            return record.log_offset
        if 0 < record.prepared_offset < record.log_offset:
            return record.prepared_offset
        queue = self.queue
        entry = queue.entry(record.first) if queue is not None else None
        return entry[0] if entry is not None else NOWHERE

    # --- following the queue

    def follow(self, now_ms: int, admit: Callable[[HalfRecord], None]) -> int:
        """Take up the halves that were stored since; when to go on, if there are more."""
        queue = self.queue
        if queue is None:
            return NEVER
        left = FOLLOW_MAX
        while left > 0:
            run = self._next_run(queue)
            if run is None:
                return NEVER if self._reading is None else now_ms + POLL_MS
            if run.end == run.begin:
                return now_ms + RETRY_MS
            left -= self._take(run, admit)
        return now_ms

    def _next_run(self, queue: ConsumeQueue) -> Run | None:
        """Halves that were read; None if there are no more, or the disk is waited for."""
        halves, confirmed = self._halves, self._store.confirmed
        if self._reading is None:
            end = queue.visible_max(confirmed)
            self._skip(max(halves.position, queue.min_offset), end)
            if halves.position >= end:
                self.followed_to = confirmed
                halves.forget()
                return None
            begin, end = halves.position, self._unknown_to(halves.position, end)
            try:
                run = self.read(begin, end, confirmed)
            except PenstockError as error:
                log.error("halves can't be read: %s", error)
                return Run(begin, begin, [])
            if run is not None:
                return run
            self._reading = self._store.disk.submit(
                lambda: self.read(begin, end, confirmed, wait=True)
            )
        if not self._reading.done():
            return None
        done, self._reading = self._reading, None
        error_or_none = done.exception()
        if error_or_none is not None:
            log.error("halves can't be read: %s", error_or_none)
            return Run(halves.position, halves.position, [])
        return done.result()

    def _skip(self, position: int, end: int) -> None:
        """Pass what is known."""
        halves = self._halves
        halves.position = position
        while halves.position < end and halves.is_known(halves.position):
            halves.passed(halves.position)

    def _unknown_to(self, begin: int, end: int) -> int:
        """The end of the entries from here on of which nothing is known."""
        end = min(end, begin + FOLLOW_MAX)
        for queue_offset in range(begin + 1, end):
            if self._halves.is_known(queue_offset):
                return queue_offset
        return end

    def _take(self, run: Run, admit: Callable[[HalfRecord], None]) -> int:
        halves = self._halves
        for data in run.records:
            record = read_half(data)
            # Where there is no record it is gone or never was.
            if record is not None and halves.position <= record.queue_offset < run.end:
                self._pass_to(record.queue_offset)
                if not halves.is_known(record.queue_offset):
                    admit(record)
                halves.passed(record.queue_offset)
        self._pass_to(run.end)
        return max(len(run.records), 1)

    def _pass_to(self, end: int) -> None:
        halves = self._halves
        while halves.position < end:
            halves.passed(halves.position)

    def read(self, begin: int, end: int, confirmed: int, *, wait: bool = False) -> Run | None:
        """Halves from an entry on, as records; None if that would wait for the disk and may not.

        It changes nothing: it may run in the pool.
        """
        queue = self.queue
        assert queue is not None
        reader = self._store.fresh_reader()
        status = reader.find(queue, begin, end - begin, FOLLOW_BYTES_MAX, confirmed, wait)
        if status == COLD:
            return None
        if status in (OFFSET_OVERFLOW_ONE, OFFSET_OVERFLOW_BADLY):  # not visible yet after all
            return Run(begin, begin, [])
        following = min(max(reader.next_offset, begin + 1), end)
        output = Output(1024)
        if status == FOUND and not reader.copy_to(output, wait):
            if not wait:
                return None
            if following > begin + 1:  # one of them is gone, not all
                return self.read(begin, begin + 1, confirmed, wait=True)
        return Run(begin, following, list(split_records(output.take())))

    # --- progress

    def begin_progress(self, half: int, op: int) -> None:
        """Where the last run stood."""
        self._steps.append((half, op))

    def note_progress(self, now_ms: int) -> None:
        """Note how far the queues are done with, as far as that is on the disk."""
        self._take_step()
        mark, store, offsets = self._mark, self._store, self._context.offsets
        if mark is not None and mark.log_end <= store.flusher.flushed():
            for topic, offset in ((TOPIC_TRANS_HALF, mark.half), (TOPIC_TRANS_OP_HALF, mark.op)):
                if offset != (offsets.get(GROUP_SYS_TRANS, topic, 0) or 0):
                    offsets.table.commit(topic, GROUP_SYS_TRANS, 0, offset, now_ms)
            # Without open halves nothing will be searched for.
            if self._halves.open and mark.log_end > self.table.searched_to:
                self.table.note(mark.log_end, now_ms)
            self._mark = None
        if self._mark is None and not self.undone:
            half, op = self._done_to()
            self._mark = Mark(half, op, store.log.end)

    def done_to(self) -> int:
        """Queue offset of the first append that is still needed."""
        oldest = self._halves.oldest()
        return self._halves.position if oldest is None else oldest.newest

    def _done_to(self) -> tuple[int, int]:
        half, steps = self.done_to(), self._steps
        while len(steps) > 1 and steps[1][0] <= half:
            steps.popleft()
        return half, (steps[0][1] if steps and steps[0][0] <= half else 0)

    def _take_step(self) -> None:
        queue, ops, steps = self.queue, self._store.queues.get(OP, 0), self._steps
        if queue is None or ops is None:
            return
        step = (queue.max_offset, ops.max_offset)
        if not steps or step != steps[-1]:
            if steps and step[0] == steps[-1][0] and len(steps) > 1:
                steps.pop()
            steps.append(step)
        if len(steps) > STEPS_MAX:
            self._steps = deque(list(steps)[::2])


def needed_of(half: Half) -> tuple[int, ...]:
    """The appends of a half that no op message names before it ends: its newest, and the first one
    where the others do not say where that lies."""
    if half.first != half.newest and half.origin <= 0:
        return (half.first, half.newest)
    return (half.newest,)


def done_by(body: bytes) -> list[int]:
    """The queue offsets in the body of an op message."""
    return [
        int(piece)
        for piece in body.split(b",")
        if piece.isdigit() and len(piece) <= _OFFSET_DIGITS_MAX
    ]
