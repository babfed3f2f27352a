"""The parts of simulated replication: logs in memory, replicas, and links between them.

A record is

    length u16, epoch u16 (BLANK: the end of a segment), log offset u32, serial u32, filler

As in `store/received_log`, half a record waits in memory until it is whole, and each record is
checked before it is appended. The first byte of a record is zero.
"""

import random
import struct
from typing import NamedTuple

from penstock.errors import ReplicationError
from penstock.replication.epochs import EpochHistory
from penstock.replication.master_session import EpochMasterSession, MasterSession
from penstock.replication.replicas import Replica, ReplicaRules, Replicas
from penstock.replication.slave_session import EpochSlaveSession, SlaveSession

SEGMENT_BYTES = 512
HEAD = struct.Struct(">HHII")
BLANK = 0xFFFF
RECORD_BYTES_MAX = 90


class ModelLog:
    """Of a slave; the bytes are in the page cache up to its end, on the disk up to `flushed`."""

    segment_bytes = SEGMENT_BYTES
    begin = 0

    def __init__(self, *, sync_flush: bool) -> None:
        self.sync_flush = sync_flush
        self.data = bytearray()
        self.flushed = 0
        self.history = EpochHistory()
        self.confirmed = 0
        self._flushing_to = 0
        self._rest = bytearray()

    # --- as a slave's session sees it

    @property
    def end(self) -> int:
        return len(self.data)

    @property
    def next_offset(self) -> int:
        return len(self.data) + len(self._rest)

    @property
    def acknowledged(self) -> int:
        return self.flushed if self.sync_flush else len(self.data)

    @property
    def may_receive(self) -> bool:
        return self.acknowledged >= self.end

    def restart(self, next_offset: int, *, equal: bool = False) -> None:
        self._rest = bytearray(next_offset - len(self.data))  # the first byte of a record is zero

    def begin_at(self, offset: int) -> None:
        raise AssertionError("the log of a master begins at 0 here")

    def receive(self, data: memoryview) -> None:
        rest = self._rest
        rest += data
        at = 0
        while len(rest) - at >= HEAD.size:
            length, epoch, offset, _ = HEAD.unpack_from(rest, at)
            left = SEGMENT_BYTES - len(self.data) % SEGMENT_BYTES
            if offset != len(self.data) or length < HEAD.size or length > left:
                raise ReplicationError(f"not a record of offset {len(self.data)}: {offset}")
            if epoch == BLANK and length != left:
                raise ReplicationError("not the end of a segment")
            if len(rest) - at < length:
                break
            self.data += rest[at : at + length]
            at += length
        self._rest = rest[at:]

    def follow(self, history: EpochHistory) -> None:
        self.history = EpochHistory(history.epochs)

    def confirm(self, offset: int) -> None:
        self.confirmed = offset

    # --- as its owner sees it

    def append(self, epoch: int, serial: int, length: int) -> None:
        """Write a record, behind a blank one if the segment has no room."""
        left = SEGMENT_BYTES - len(self.data) % SEGMENT_BYTES
        if length > left - HEAD.size:
            self.data += HEAD.pack(left, BLANK, len(self.data), 0) + bytes(left - HEAD.size)
        head = HEAD.pack(length, epoch, len(self.data), serial)
        self.data += head + bytes([serial & 255]) * (length - HEAD.size)

    def flush(self) -> None:
        """One flush ends and the next one begins."""
        self.flushed = max(self.flushed, self._flushing_to)
        self._flushing_to = len(self.data)

    def truncate(self, offset: int) -> None:
        """Remove what another master wrote."""
        assert offset in self.record_ends(0), "inside a record"
        del self.data[offset:]
        self.history.cut_after(offset)
        self.confirmed = min(self.confirmed, offset)
        self.reopen()

    def reopen(self) -> None:
        """Start again after a crash: what the log has is flushed."""
        self._rest = bytearray()
        self.flushed = self._flushing_to = len(self.data)

    def power_cut(self, rng: random.Random) -> bool:
        """Lose a part of what is not flushed; returns whether anything is lost."""
        end = rng.choice(self.record_ends(self.flushed))
        lost = end < len(self.data)
        del self.data[end:]
        self.confirmed = 0
        return lost

    def delete(self) -> None:
        """The disk is lost."""
        self.__init__(sync_flush=self.sync_flush)  # type: ignore[misc]

    def record_ends(self, least: int) -> list[int]:
        """The ends of all records from an offset on, which is the end of one itself."""
        ends = [least]
        while ends[-1] < len(self.data):
            ends.append(ends[-1] + HEAD.unpack_from(self.data, ends[-1])[0])
        return ends


class ModelMasterLog:
    """The log of a replica while it is a master."""

    segment_bytes = SEGMENT_BYTES
    begin = 0

    def __init__(self, log: ModelLog, replicas: Replicas, *, flushed_only: bool) -> None:
        self.log = log
        self.replicas = replicas
        self.flushed_only = flushed_only
        """Whether slaves get only what is flushed."""
        self.history = log.history

    @property
    def end(self) -> int:
        return self.log.flushed if self.flushed_only else len(self.log.data)

    @property
    def confirm_offset(self) -> int:
        return min(self.replicas.confirm_offset(self.end), self.log.acknowledged)


class Mode(NamedTuple):
    """Settings of all replicas, and what they promise."""

    name: str
    rules: ReplicaRules
    static: bool = False
    sync_flush: bool = True
    keeps_acknowledged: bool = True
    keeps_read: bool = True
    loses_power: bool = True


class Parts(NamedTuple):
    """The classes under test."""

    replicas: type[Replicas] = Replicas
    master: type[EpochMasterSession] = EpochMasterSession
    slave: type[EpochSlaveSession] = EpochSlaveSession
    log: type[ModelLog] = ModelLog
    new_epoch: bool = True
    """Whether a master that has lost the end of its log begins an epoch."""


class InvariantError(AssertionError):
    """A promise was broken."""


class Node:
    """One replica."""

    def __init__(self, index: int, log: ModelLog, *, learner: bool) -> None:
        self.index = index
        self.log = log
        self.learner = learner
        self.up = True
        self.isolated = False
        self.lost_disk = False
        """Whether the master may still take it for a member although its log is lost."""
        self.served: ModelMasterLog | None = None
        """Its log for slaves, while it believes that it is the master."""
        self.waiting: list[int] = []
        """Ends of the sent records that are not acknowledged yet."""
        self.link: Link | None = None
        """To its master."""
        self.told_epoch = -1
        """The last epoch that it was told of."""
        self.sent_to: Node | None = None
        """The replaced master that it takes for the master."""
        self.shown = 0
        """Its last confirm offset as a master."""

    @property
    def epoch(self) -> int:
        """The last epoch that it knows."""
        last = self.log.history.last
        return last.number if last is not None else -1

    @property
    def rank(self) -> tuple[int, int]:
        """By which a careful operator compares replicas."""
        end = len(self.log.data)
        reached = self.log.history.at(end)
        return (reached.number if reached is not None else -1, end)

    def has_reported(self, replica: Replica) -> bool:
        """Whether it is known what a static slave has: it has no name, so it may be a new one."""
        session = self.link.master_session if self.link is not None else None
        return session is not None and session.replica is replica and session.position >= 0


class Link:
    """A connection of a slave to a master."""

    def __init__(self, slave: Node, master: Node, ends: tuple[SlaveSession, MasterSession]) -> None:
        self.slave, self.master = slave, master
        self.slave_session, self.master_session = ends
        self.slave_open = self.master_open = True
        self.alive = True
        self.notice = 0.0
        """How probable it is that an end notices the cut, at each step."""
        self.to_slave = bytearray()
        self.to_master = bytearray()

    def cut(self, rng: random.Random) -> None:
        if self.alive:
            self.alive = False
            self.notice = rng.choice((0.0, 0.05, 0.5))
            del self.to_slave[rng.randint(0, len(self.to_slave)) :]
            del self.to_master[rng.randint(0, len(self.to_master)) :]
