"""Logs in memory for the tests of sessions."""

from penstock.errors import ReplicationError
from penstock.replication.epochs import Epoch, EpochHistory

SEGMENT_BYTES = 1000


def history(*epochs: tuple[int, int]) -> EpochHistory:
    return EpochHistory(Epoch(*epoch) for epoch in epochs)


class MasterBytes:
    """The log of a master: numbers only."""

    def __init__(self, begin: int, end: int, *epochs: tuple[int, int]) -> None:
        self.begin = begin
        self.end = end
        self.confirm_offset = end
        self.segment_bytes = SEGMENT_BYTES
        self.history = history(*epochs)


class SlaveBytes:
    """The log of a slave: whatever arrives is in it. Byte i of a master's log is i modulo 251."""

    def __init__(self, begin: int = 0, end: int = 0, *epochs: tuple[int, int]) -> None:
        self.begin = begin
        self.end = end
        self.next_offset = end
        self.flushed: int | None = None
        """What is flushed, under sync flush."""
        self.epochs_stored = True
        self.segment_bytes = SEGMENT_BYTES
        self.history = history(*epochs)
        self.confirmed = -1
        self.follows: list[EpochHistory] = []

    @property
    def acknowledged(self) -> int:
        return self.end if self.flushed is None else self.flushed

    @property
    def may_receive(self) -> bool:
        return self.epochs_stored and self.acknowledged >= self.end

    def restart(self, next_offset: int, *, equal: bool = False) -> None:
        self.next_offset = next_offset

    def begin_at(self, offset: int) -> None:
        assert self.begin == self.end
        self.begin = self.end = self.next_offset = offset

    def receive(self, data: memoryview) -> None:
        if bytes(data) != content(self.next_offset, len(data)):
            raise ReplicationError("not the bytes of the master")
        self.next_offset += len(data)
        self.end = self.next_offset

    def follow(self, history: EpochHistory) -> None:
        self.history = EpochHistory(history.epochs)
        self.follows.append(self.history)

    def confirm(self, offset: int) -> None:
        self.confirmed = offset


def content(offset: int, length: int) -> bytes:
    """The bytes of every master's log."""
    return bytes((offset + i) % 251 for i in range(length))
