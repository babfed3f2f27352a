"""The master's side of one HA connection, without I/O: reports in, frames out.

A session sends nothing before the slave's first report, which says where to begin. From then on
`next_frame` names the range of the log that is sent next; it is not aligned to records, and crosses
neither the end of a segment nor that of an epoch. Frames grow while the connection takes them at
once and shrink when it does not, so that a slow slave has little in flight.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from penstock.errors import ReplicationError
from penstock.replication.epoch_frames import (
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_master_handshake,
    encode_transfer_header,
    read_slave_frame,
)
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.replicas import Replica, Replicas
from penstock.replication.static_frames import encode_header, newest_report

FRAME_BYTES_LEAST = 32 * 1024
"""The size of the first frames, and the smallest limit of a slow connection."""
RECEIVED_BYTES_MAX = 64 * 1024
"""More unread bytes than this are not reports of a slave."""
FIRST_BYTE = 1
"""What an empty slave of the static protocol reports to get the whole log; see `slave_session`."""
_NO_EPOCH = Epoch(0, 0)


class MasterLog(Protocol):
    """What a session needs of the master's log."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int:
        """Up to here the log can be sent."""

    @property
    def confirm_offset(self) -> int: ...

    segment_bytes: int
    history: EpochHistory


class SessionOptions(NamedTuple):
    """Settings of a session."""

    frame_bytes_max: int
    report_ms: int
    idle_ms: int
    from_first_segment: bool
    rate_bytes_max: int = 0


class Frame(NamedTuple):
    """A header, and the range of the log that follows it; a heartbeat has an empty one."""

    header: bytes
    offset: int
    length: int


class MasterSession(ABC):
    """One connection of a slave."""

    def __init__(
        self, log: MasterLog, replicas: Replicas, options: SessionOptions, peer: str, now_ms: int
    ) -> None:
        self.log = log
        self.replicas = replicas
        self.options = options
        self.peer = peer
        self.replica: Replica | None = None
        self._order = replicas.next_order()
        self.position = -1
        """Log offset of the next byte that is sent; -1 before the first report."""
        self.joined = False
        """Whether the last `receive` made the slave a member of the in-sync set."""
        self._received = bytearray()
        self._frame_bytes = min(FRAME_BYTES_LEAST, options.frame_bytes_max)
        self._heard_ms = self._sent_ms = self._budget_ms = now_ms
        self._budget = options.rate_bytes_max

    # --- from the slave

    def receive(self, data: bytes | memoryview, now_ms: int) -> bytes:
        """Take what the slave sent; returns bytes to send at once. Raises ReplicationError."""
        self._heard_ms = now_ms
        self.joined = False
        self._received += data
        answer = self._read_reports(now_ms)
        if len(self._received) > RECEIVED_BYTES_MAX:
            raise ReplicationError(f"slave {self.peer} sends what is not a report")
        return answer

    @abstractmethod
    def _read_reports(self, now_ms: int) -> bytes:
        """Work off whole reports in `_received`."""

    def _reported(self, offset: int, now_ms: int) -> None:
        assert self.replica is not None
        if self.position < 0:
            self.position = self._first_position(offset)
        has = 0 if offset == FIRST_BYTE else offset  # no record ends there
        self.joined |= self.replicas.acknowledge(self.replica, has, self.log.end, now_ms)

    def _first_position(self, offset: int) -> int:
        log = self.log
        if offset == FIRST_BYTE:
            return offset if log.begin == 0 else log.begin
        if offset > log.end:
            raise ReplicationError(
                f"slave {self.peer} has the log up to offset {offset}, the master only up to "
                f"{log.end}: their logs are different",
                hint="restore the slave from a copy of the master, or delete its store so that it "
                "begins again",
            )
        if offset == 0:
            from_first = self._from_first_segment()
            return log.begin if from_first else log.end - log.end % log.segment_bytes
        if offset < log.begin:
            raise ReplicationError(
                f"slave {self.peer} needs the log from offset {offset} on, but the master's "
                f"begins at {log.begin}: the messages between are deleted",
                hint="delete the slave's store so that it begins again",
            )
        return offset

    def _from_first_segment(self) -> bool:
        return self.options.from_first_segment

    # --- to the slave

    def next_frame(self, now_ms: int) -> Frame | None:
        """The next range of the log or a heartbeat; None if there is nothing to send now."""
        if self.position < 0:
            return None
        begin = self.position
        length = min(self.log.end - begin, self._frame_bytes, self._allowance(now_ms))
        if length > 0:
            length = min(length, self.log.segment_bytes - begin % self.log.segment_bytes)
            length = self._within_epoch(begin, length)
            self.position += length
            self._budget -= length
        elif now_ms - self._sent_ms < self.options.report_ms:
            return None
        self._sent_ms = now_ms
        return Frame(self._header(begin, max(length, 0)), begin, max(length, 0))

    def taken_at_once(self) -> None:
        """The connection has taken the last frame without a delay."""
        self._frame_bytes = min(2 * self._frame_bytes, self.options.frame_bytes_max)

    def taken_late(self) -> None:
        """The connection had to wait before it could take the last frame."""
        least = min(FRAME_BYTES_LEAST, self.options.frame_bytes_max)
        self._frame_bytes = max(self._frame_bytes // 2, least)

    def due(self) -> int:
        """When `next_frame` has a heartbeat or again something within the rate limit, or
        `check_idle` an error, at the earliest."""
        idle_ms = self._heard_ms + self.options.idle_ms
        if self.position < 0:
            return idle_ms
        due = min(self._sent_ms + self.options.report_ms, idle_ms)
        if self.options.rate_bytes_max and self.position < self.log.end:
            due = min(due, self._refilled_ms())
        return due

    def check_idle(self, now_ms: int) -> None:
        """Raise ReplicationError if the slave has been silent for too long."""
        if now_ms - self._heard_ms > self.options.idle_ms:
            raise ReplicationError(f"slave {self.peer} was silent for {self.options.idle_ms} ms")

    def closed(self) -> None:
        """The connection is lost."""
        if self.replica is not None:
            self.replicas.disconnect(self.replica)

    def _allowance(self, now_ms: int) -> int:
        """How many bytes may be sent now: nothing, or at least a frame of the smallest size."""
        rate = self.options.rate_bytes_max
        if not rate:
            return self._frame_bytes
        grown = rate * (now_ms - self._budget_ms) // 1000
        if grown > 0:
            self._budget = min(self._budget + grown, rate)
            self._budget_ms += -(-1000 * grown // rate)
        return self._budget if self._budget >= self._least_allowance() else 0

    def _least_allowance(self) -> int:
        rest = self.log.end - self.position
        return min(FRAME_BYTES_LEAST, self.options.rate_bytes_max, rest)

    def _refilled_ms(self) -> int:
        """When the rate limit allows the next frame."""
        lacks = max(self._least_allowance() - self._budget, 0)
        return self._budget_ms - (-1000 * lacks // self.options.rate_bytes_max)

    def _within_epoch(self, begin: int, length: int) -> int:
        return length

    @abstractmethod
    def _header(self, offset: int, length: int) -> bytes: ...


class StaticMasterSession(MasterSession):
    """Of RocketMQ's DefaultHAService: the slave reports offsets and nothing else."""

    def _read_reports(self, now_ms: int) -> bytes:
        if self.replica is None:
            self.replica = self.replicas.connect(self._name(), now_ms, order=self._order)
        offset, consumed = newest_report(memoryview(self._received), len(self._received))
        del self._received[:consumed]
        if offset is not None:
            self._reported(offset, now_ms)
        return b""

    def _name(self) -> str:
        """The slave does not say who it is: one that comes back has the host of a lost one."""
        host = self.peer.rpartition(":")[0]
        lost = (replica.name for replica in self.replicas.slaves.values() if not replica.connected)
        return next((name for name in lost if name.rpartition(":")[0] == host), self.peer)

    def _header(self, offset: int, length: int) -> bytes:
        return encode_header(offset, length)


class EpochMasterSession(MasterSession):
    """Of RocketMQ's AutoSwitchHAService: a handshake with epochs comes first."""

    def __init__(
        self, log: MasterLog, replicas: Replicas, options: SessionOptions, peer: str, now_ms: int
    ) -> None:
        super().__init__(log, replicas, options, peer, now_ms)
        self.handshake: SlaveHandshake | None = None

    def _read_reports(self, now_ms: int) -> bytes:
        answer, at = b"", 0
        view = memoryview(bytes(self._received))
        while (frame := read_slave_frame(view, at, len(view))) is not None:
            at += frame.size
            if isinstance(frame, SlaveHandshake):
                # Apache's slaves repeat it if the answer is late; a second answer is an error.
                if self.handshake is None:
                    self.handshake = frame
                    self.replica = self.replicas.connect(
                        str(frame.broker_id),
                        now_ms,
                        learner=frame.learner,
                        acknowledges_flushed=frame.acknowledges_flushed,
                        order=self._order,
                    )
                    answer = encode_master_handshake(
                        MasterHandshake(self.log.end, self.log.history)
                    )
            elif self.replica is None:
                raise ReplicationError(f"slave {self.peer} reports before the handshake")
            else:
                self._reported(frame.offset, now_ms)
        del self._received[:at]
        return answer

    def _from_first_segment(self) -> bool:
        assert self.handshake is not None
        return not self.handshake.from_last_file

    def _within_epoch(self, begin: int, length: int) -> int:
        history = self.log.history
        index = history.index_at(begin)
        following = 0 if index is None else index + 1  # the log may be older than its first epoch
        if following < len(history):
            length = min(length, history.epochs[following].begin - begin)
        return length

    def _header(self, offset: int, length: int) -> bytes:
        history = self.log.history
        # A heartbeat at the log's end must not name an epoch that is still empty.
        epoch = history.at(offset if length else max(offset - 1, 0)) or _NO_EPOCH
        return encode_transfer_header(
            TransferHeader(offset, length, epoch, self.log.confirm_offset)
        )
