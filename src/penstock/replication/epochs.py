"""Epochs: which master wrote which part of the log, and the file that stores this.

An epoch is the term of one master. It begins at the end of the log at which the master took over
and ends where the next one begins; the last epoch ends with the log. In one epoch one master
writes. So two logs that both have an epoch with the same number and begin are equal up to the
smaller of the two ends of that epoch (`common_end`).

The file is that of RocketMQ's EpochFileCache, `epochFileCheckpoint`:

    count of epochs
    CRC-32 of the following lines with their line feeds, as a number of 31 bits; 0: not checked
    number-begin     one line for each epoch, the oldest first

An epoch in which nothing was written is empty. RocketMQ ignores a new epoch that begins where the
last one does, so that the new master writes under the number of the old one. If the old master
comes back with messages of its own from there on, the difference is not noticed. Here the new epoch
replaces the empty one. The only epoch of a history is never replaced: without it, a replica that
knows nothing else would find no epoch in common. RocketMQ reads such a file (`1-0`, `2-0`) too.
"""

import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.errors import ReplicationError, StoreDamaged
from penstock.replication.frame_limits import I32_MAX, I64_MAX

_CRC_BITS: Final = 0x7FFF_FFFF
_CRC_UNCHECKED: Final = 0
_NUMBER = re.compile(r"[0-9]{1,10}")
_EPOCH = re.compile(r"([0-9]{1,10})-([0-9]{1,19})")


class Epoch(NamedTuple):
    """The number of an epoch and the log offset at which it begins."""

    number: int
    begin: int


class EpochHistory:
    """The epochs of a log, the oldest first. Numbers grow; begins never decrease.

    `epochs` is replaced by each change and never modified, so that another thread may read it.
    """

    def __init__(self, epochs: Iterable[Epoch] = ()) -> None:
        self.epochs = tuple(epochs)
        previous = Epoch(-1, 0)
        for epoch in self.epochs:
            _check_successor(previous, epoch)
            previous = epoch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochHistory) and self.epochs == other.epochs

    __hash__ = None  # type: ignore[assignment]  # a history changes

    def __len__(self) -> int:
        return len(self.epochs)

    def __repr__(self) -> str:
        listed = ", ".join(f"{number}-{begin}" for number, begin in self.epochs)
        return f"EpochHistory({listed})"

    @property
    def last(self) -> Epoch | None:
        return self.epochs[-1] if self.epochs else None

    def append(self, number: int, begin: int) -> None:
        """Begin an epoch at the end of the log. It replaces the last one if that is empty."""
        kept, epoch = self.epochs, Epoch(number, begin)
        _check_successor(kept[-1] if kept else Epoch(-1, 0), epoch)
        if len(kept) > 1 and kept[-1].begin == begin:
            kept = kept[:-1]
        self.epochs = (*kept, epoch)

    def cut_after(self, log_end: int) -> None:
        """Drop the epochs that begin after the end of the log, which has lost or never had them.

        A new master does this before it begins its own epoch, whose number must be above all that
        are dropped. One that begins exactly at the end is kept: it may be that of a master that has
        written nothing yet.
        """
        self.epochs = tuple(epoch for epoch in self.epochs if epoch.begin <= log_end)

    def cut_before(self, log_begin: int) -> None:
        """Drop the epochs that end before the first offset of the log, which retention moved.

        One that ends exactly there is kept: it is what this log has in common with a replica whose
        log ends there. The begin of the first kept epoch does not change.
        """
        epochs = self.epochs
        first = 0
        while first + 1 < len(epochs) and epochs[first + 1].begin < log_begin:
            first += 1
        self.epochs = epochs[first:]

    def index_at(self, offset: int) -> int | None:
        """The index of the epoch that contains a log offset; the last epoch has no end here."""
        index = bisect_right(self.epochs, offset, key=lambda epoch: epoch.begin) - 1
        return index if index >= 0 else None

    def at(self, offset: int) -> Epoch | None:
        """The epoch that contains a log offset; None before the first epoch.

        At the end of the log it is the last epoch that the log has reached. Of two replicas, that
        with the greater (number of this epoch, end of the log) has all that is confirmed. The last
        epoch says nothing: a slave knows it before it has the log up to there.
        """
        index = self.index_at(offset)
        return None if index is None else self.epochs[index]

    def end_of(self, index: int, log_end: int) -> int:
        """The log offset at which an epoch ends."""
        if index + 1 < len(self.epochs):
            return min(self.epochs[index + 1].begin, log_end)
        return log_end

    def common_end(self, mine_end: int, theirs: "EpochHistory", theirs_end: int) -> int | None:
        """The log offset up to which both logs are equal; None if they have no epoch in common.

        It may be before the begin of a log whose older files are deleted.
        """
        places = {epoch: index for index, epoch in enumerate(theirs.epochs)}
        for index in range(len(self.epochs) - 1, -1, -1):
            place = places.get(self.epochs[index])
            if place is not None:
                return min(self.end_of(index, mine_end), theirs.end_of(place, theirs_end))
        return None

    def encode(self) -> bytes:
        """The content of the file."""
        lines = "".join(f"{number}-{begin}\n" for number, begin in self.epochs).encode()
        return b"%d\n%d\n%b" % (len(self.epochs), _crc(lines), lines)


def decode_epochs(data: bytes) -> EpochHistory:
    """The epochs of a file; StoreDamaged if it is not what RocketMQ or `encode` wrote."""
    try:
        lines = data.decode("ascii").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise StoreDamaged("the file of epochs is not text") from None
    if len(lines) < 2 or not all(_NUMBER.fullmatch(line) for line in lines[:2]):
        raise StoreDamaged("the file of epochs does not begin with a count and a CRC")
    count, crc = int(lines[0]), int(lines[1])
    entries = lines[2:]
    if count != len(entries):
        raise StoreDamaged(f"the file of epochs has {len(entries)} epochs instead of {count}")
    computed = _crc("".join(f"{line}\n" for line in entries).encode())
    if crc not in (_CRC_UNCHECKED, computed):
        raise StoreDamaged(f"the CRC of the epochs is {computed} instead of {crc}")
    try:
        return EpochHistory(map(_decode_epoch, entries))
    except ReplicationError as error:
        raise StoreDamaged(f"the file of epochs is damaged: {error}") from None


def _decode_epoch(line: str) -> Epoch:
    found = _EPOCH.fullmatch(line)
    if found is None:
        raise StoreDamaged(f"the file of epochs contains the line {line[:40]!r}")
    return Epoch(int(found[1]), int(found[2]))


def _check_successor(previous: Epoch, epoch: Epoch) -> None:
    """Refuse an epoch that does not fit the wire, or does not follow the previous one."""
    if epoch.number > I32_MAX or not 0 <= epoch.begin <= I64_MAX:
        raise ReplicationError(f"epoch {epoch.number} that begins at {epoch.begin} is impossible")
    if epoch.number <= previous.number or epoch.begin < previous.begin:
        after = f"epoch {previous.number}, which begins at {previous.begin}"
        if previous.number < 0:
            after = "nothing"
        raise ReplicationError(
            f"epoch {epoch.number}, which begins at {epoch.begin}, can't follow {after}"
        )


def _crc(lines: bytes) -> int:
    return zlib.crc32(lines) & _CRC_BITS
