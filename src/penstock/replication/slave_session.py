"""The slave's side of one HA connection, without I/O: frames in, reports out.

The slave reports where its log ends as soon as it is connected, after each read, and at least every
`report_ms`. What it reports is on its disk under sync flush, otherwise it has arrived. The first
report says where the master begins and counts as an acknowledgement, so it waits until the whole
log is flushed.

With epochs, the handshake tells up to where both logs are equal. What the slave has beyond that was
written by a master that was replaced: `LogsDiffer` asks for a truncation. A master whose last epoch
is older than the slave's own has been replaced itself, and is refused.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from penstock.errors import LogsDiffer, ReplicationError
from penstock.replication.epoch_frames import (
    MasterHandshake,
    SlaveHandshake,
    encode_acknowledgement,
    encode_slave_handshake,
    read_master_frame,
)
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.master_session import FIRST_BYTE
from penstock.replication.static_frames import encode_report, read_header

UNKNOWN = -1


class SlaveLog(Protocol):
    """What a session needs of the slave's log."""

    history: EpochHistory
    segment_bytes: int

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def next_offset(self) -> int:
        """Log offset of the next byte that is expected."""

    @property
    def acknowledged(self) -> int:
        """What the slave may report: flushed under sync flush, otherwise the log's end."""

    @property
    def may_receive(self) -> bool:
        """Whether the master may begin to send: the log may be reported up to its end, and the
        master's epochs are stored."""

    def restart(self, next_offset: int, *, equal: bool = False) -> None:
        """Expect bytes from an offset on: the log's end, or 1 in an empty log.

        `equal`: this log is known to be the begin of the master's.
        """

    def begin_at(self, offset: int) -> None:
        """Begin the empty log at the start of a segment.

        Raises ReplicationError if that takes time: the slave connects again when it is done.
        """

    def receive(self, data: memoryview) -> None:
        """Append bytes; raises ReplicationError if they are not valid records."""

    def follow(self, history: EpochHistory) -> None:
        """Take over the master's epochs, durably."""

    def confirm(self, offset: int) -> None:
        """The master says that readers may see the log up to here."""


class SlaveOptions(NamedTuple):
    """Settings of a session."""

    report_ms: int
    idle_ms: int
    from_first_segment: bool
    broker_id: int = 0
    learner: bool = False
    acknowledges_flushed: bool = False
    epoch_least: int = UNKNOWN
    """The last epoch that the slave was told of: an older master is refused."""


class SlaveSession(ABC):
    """One connection to a master."""

    def __init__(self, log: SlaveLog, options: SlaveOptions, now_ms: int) -> None:
        self.log = log
        self.options = options
        self.master_end = UNKNOWN
        """The end of the master's log, as far as it is known."""
        self._head = bytearray()
        self._body_left = 0
        self._reported = UNKNOWN
        self._reported_ms = self._heard_ms = now_ms

    @abstractmethod
    def start(self, now_ms: int) -> bytes:
        """What is sent first."""

    def receive(self, data: memoryview, now_ms: int) -> None:
        """Take what the master sent. Raises ReplicationError; StoreError if the disk is full."""
        self._heard_ms = now_ms
        while len(data) > 0:
            if self._body_left > 0:
                piece = data[: self._body_left]
                self.log.receive(piece)
                self._body_left -= len(piece)
                data = data[len(piece) :]
            else:
                data = self._read_head(data)

    def report(self, now_ms: int) -> bytes:
        """The report that is due, or nothing."""
        offset = self.log.acknowledged
        if not self._may_report():
            return b""
        if self._reported == UNKNOWN:
            return self._first_report(now_ms)
        if offset <= self._reported and now_ms - self._reported_ms < self.options.report_ms:
            return b""
        self._reported, self._reported_ms = max(offset, self._reported), now_ms
        return self._encode_report(self._reported)

    def due(self) -> int:
        """When `report` or `check_idle` has something to do, at the earliest."""
        idle_ms = self._heard_ms + self.options.idle_ms
        if self._reported == UNKNOWN:
            return idle_ms
        return min(self._reported_ms + self.options.report_ms, idle_ms)

    def check_idle(self, now_ms: int) -> None:
        """Raise ReplicationError if the master has been silent for too long."""
        if now_ms - self._heard_ms > self.options.idle_ms:
            raise ReplicationError(f"the master was silent for {self.options.idle_ms} ms")

    def _first_report(self, now_ms: int) -> bytes:
        """The report from which the master begins; nothing before the log may receive."""
        if not self.log.may_receive:
            return b""
        self._reported, self._reported_ms = self._first_offset(), now_ms
        return self._encode_report(self._reported)

    @abstractmethod
    def _first_offset(self) -> int:
        """Log offset from which bytes are expected."""

    def _read_head(self, data: memoryview) -> memoryview:
        """Take a frame's head from `data`; returns what follows it."""
        had = len(self._head)
        self._head += data[: self._head_bytes_max()]
        size = self._take_head(memoryview(bytes(self._head)))
        if size == 0:
            if len(self._head) - had < len(data):
                raise ReplicationError("the head of a frame is too long")
            return data[len(data) :]
        self._head = bytearray()
        return data[size - had :]

    def _expect(self, offset: int, length: int) -> None:
        """A frame of the log follows."""
        log = self.log
        if offset != log.next_offset and log.begin == log.end and offset % log.segment_bytes == 0:
            log.begin_at(offset)
        if offset != log.next_offset:
            raise ReplicationError(
                f"the master sent its log from offset {offset} on instead of {log.next_offset}",
                hint="if the slave was a master before, its log may differ: delete its store so "
                "that it begins again",
            )
        self.master_end = max(self.master_end, offset + length)
        self._body_left = length

    @abstractmethod
    def _head_bytes_max(self) -> int: ...

    @abstractmethod
    def _take_head(self, head: memoryview) -> int:
        """Interpret a frame's head; returns its size, 0 if it is incomplete."""

    def _may_report(self) -> bool:
        return True

    @abstractmethod
    def _encode_report(self, offset: int) -> bytes: ...


class StaticSlaveSession(SlaveSession):
    """Of RocketMQ's DefaultHAService.

    An Apache master begins with its last segment if the slave reports 0. So an empty slave that
    wants the whole log reports 1: the byte before is the first one of a record's length, which is
    zero. If the master's log begins later, the empty log must begin there too before it connects.
    """

    def start(self, now_ms: int) -> bytes:
        return self._first_report(now_ms)

    def _first_offset(self) -> int:
        log = self.log
        first = log.end
        if log.begin == log.end and log.end == 0 and self.options.from_first_segment:
            first = FIRST_BYTE
        log.restart(first)
        return first

    def _head_bytes_max(self) -> int:
        return 12

    def _take_head(self, head: memoryview) -> int:
        header = read_header(head, 0, len(head))
        if header is None:
            return 0
        self._expect(header.offset, header.length)
        return 12

    def _encode_report(self, offset: int) -> bytes:
        return encode_report(offset)


class EpochSlaveSession(SlaveSession):
    """Of RocketMQ's AutoSwitchHAService."""

    def __init__(self, log: SlaveLog, options: SlaveOptions, now_ms: int) -> None:
        super().__init__(log, options, now_ms)
        self._greeted = False

    def start(self, now_ms: int) -> bytes:
        options = self.options
        return encode_slave_handshake(
            SlaveHandshake(
                from_last_file=not options.from_first_segment,
                learner=options.learner,
                broker_id=options.broker_id,
                penstock=True,
                acknowledges_flushed=options.acknowledges_flushed,
            )
        )

    def _head_bytes_max(self) -> int:
        return 36 if self._greeted else 1 << 20

    def _take_head(self, head: memoryview) -> int:
        frame = read_master_frame(head, 0, len(head))
        if frame is None:
            return 0
        if isinstance(frame, MasterHandshake):
            if self._greeted:
                raise ReplicationError("the master sent a second handshake")
            self._greet(frame)
        elif not self._greeted:
            raise ReplicationError("the master sent its log before the handshake")
        elif frame.offset >= 0:
            self._expect(frame.offset, frame.length)
            self._follow(frame.epoch)
            if frame.confirm_offset >= 0:
                self.log.confirm(frame.confirm_offset)
        return frame.size

    def _follow(self, epoch: Epoch) -> None:
        """The master has begun another epoch since the handshake."""
        last = self.log.history.last
        if epoch.number > (last.number if last is not None else 0):
            history = EpochHistory(self.log.history.epochs)
            history.append(*epoch)
            self.log.follow(history)

    def _greet(self, master: MasterHandshake) -> None:
        """Compare the epochs of both logs."""
        self._refuse_replaced(master.history)
        self.master_end = master.log_end
        self._refuse_difference(master)
        self.log.follow(master.history)
        self.log.restart(self.log.end, equal=True)
        self._greeted = True

    def _refuse_replaced(self, theirs: EpochHistory) -> None:
        mine = self.log.history.last
        newest = max(mine.number if mine is not None else UNKNOWN, self.options.epoch_least)
        if newest > (theirs.last.number if theirs.last is not None else UNKNOWN):
            raise ReplicationError(
                f"the master's last epoch is {theirs.last.number if theirs.last else 'none'}, this "
                f"slave has seen epoch {newest}: it is not the master any more",
                hint="wait until the NameServers know the new master",
            )

    def _refuse_difference(self, master: MasterHandshake) -> None:
        log, theirs = self.log, master.history
        if log.end == log.begin:
            return
        common = log.history.common_end(log.end, theirs, master.log_end)
        if common is None or common < log.begin:
            raise ReplicationError(
                "the log has no epoch in common with the master's",
                hint="delete the slave's store so that it begins again",
            )
        if common < log.end:
            assert theirs.last is not None
            raise LogsDiffer(
                f"the log differs from the master's from offset {common} on; "
                f"{log.end - common} bytes were written by a master that epoch "
                f"{theirs.last.number} has replaced",
                offset=common,
            )

    def _may_report(self) -> bool:
        return self._greeted

    def _first_offset(self) -> int:
        # An empty log may begin anywhere: where it was, the master may have nothing.
        return self.log.end if self.log.end > self.log.begin else 0

    def _encode_report(self, offset: int) -> bytes:
        return encode_acknowledgement(offset)
