"""What recovery found and did, and what the operator should know of it."""

import bisect

import msgspec

from penstock.wire.record import PROBLEMS, UNWRITTEN

NAMED_MAX = 20
"""Damaged ranges and lost messages that are named one by one; the rest is counted."""


class DamagedRange(msgspec.Struct, frozen=True):
    """Bytes of the log that are not valid records; valid ones follow. They stay as they are."""

    offset: int
    length: int
    reason: str
    message: str = ""
    """Whose message was there, if that is readable."""

    def __str__(self) -> str:
        whose = f"; it was {self.message}" if self.message else ""
        return (
            f"the log is damaged at offset {self.offset}: {self.length} bytes can't be read "
            f"({self.reason}){whose}. They are kept in the file, and so is what follows them"
        )


class LostRange(msgspec.Struct, frozen=True):
    """Queue offsets whose messages were in a damaged range."""

    topic: str
    queue_id: int
    begin: int
    end: int

    def __str__(self) -> str:
        many = self.end - self.begin > 1
        which = f"offsets {self.begin} to {self.end - 1}" if many else f"offset {self.begin}"
        return (
            f"queue {self.queue_id} of topic {self.topic}: the message{'s' * many} at queue "
            f"{which} {'are' if many else 'is'} lost to the damage; consumers skip "
            f"{'them' if many else 'it'}"
        )


class RecoveryReport(msgspec.Struct):
    """What recovery found and did.

    `pages_kept`: all that the last run wrote is there, because it stopped cleanly or was killed.
    `damage`, `lost` and `rebuilt` name at most NAMED_MAX items each; the numbers count all.
    """

    clean: bool = True
    pages_kept: bool = True
    replayed_from: int = 0
    records: int = 0
    damaged_records: int = 0
    log_end: int = 0
    last_offset: int = -1
    cut_reason: str | None = None
    store_ms: int = 0
    invalid_index_files: list[str] = msgspec.field(default_factory=list)
    short_files: list[str] = msgspec.field(default_factory=list)
    damage: list[DamagedRange] = msgspec.field(default_factory=list)
    damaged_ranges: int = 0
    damaged_bytes: int = 0
    lost: list[LostRange] = msgspec.field(default_factory=list)
    lost_messages: int = 0
    saved_files: list[str] = msgspec.field(default_factory=list)
    saved_bytes: int = 0
    rebuilt: list[str] = msgspec.field(default_factory=list)
    rebuilt_files: int = 0
    deleted_topics: list[str] = msgspec.field(default_factory=list)
    missing_begin: tuple[int, int] | None = None
    """Log offsets whose segments were deleted while the store was closed."""
    unwritten: tuple[int, int] | None = None
    """Log offsets behind the log's end that were on the disk."""
    replaced_from: int | None = None
    """Where the log ended at the clean shutdown, if other records are there now."""

    def add_rebuilt(self, name: str) -> None:
        """A queue or index file was missing or damaged after a clean shutdown."""
        self.rebuilt_files += 1
        if len(self.rebuilt) < NAMED_MAX:
            self.rebuilt.append(name)

    def warnings(self) -> list[str]:
        """What the operator should know."""
        texts = [
            f"segment {name} is truncated: the messages at its end can't be read"
            for name in self.short_files
        ]
        if self.missing_begin is not None:
            low, high = self.missing_begin
            texts.append(
                f"the segments with log offsets {low} to {high} were deleted since the store was "
                "closed, so not by its retention: their messages are lost"
            )
        if self.replaced_from is not None:
            texts.append(
                f"the log does not end at offset {self.replaced_from}, where it ended when the "
                "store was closed: valid records follow. The whole log was read again"
            )
        if self.unwritten is not None:
            low, high = self.unwritten
            texts.append(
                f"the log had records up to offset {high}, now they end at offset {low}: "
                f"{high - low} bytes are lost"
            )
        texts += [
            f"index/{name} is not a valid index file and is ignored"
            for name in self.invalid_index_files
        ]
        texts += [
            f"consumequeue/{topic} is missing and the topic does not exist: another program has "
            "deleted it"
            for topic in self.deleted_topics[:NAMED_MAX]
        ]
        if self.rebuilt_files:
            names = ", ".join(self.rebuilt)
            names += ", …" if self.rebuilt_files > len(self.rebuilt) else ""
            texts.append(
                f"{self.rebuilt_files} queues or index files are missing or damaged since the "
                f"store was closed ({names}): they were rebuilt from the log, which was read from "
                f"offset {self.replayed_from} on"
            )
        texts += [str(item) for item in (*self.damage, *self.lost)]
        if self.damaged_ranges > len(self.damage):
            texts.append(
                f"the log has {self.damaged_ranges} damaged ranges ({self.damaged_bytes} bytes) "
                f"and {self.lost_messages} lost messages; not all of them are listed here: "
                "run `penstock store verify`"
            )
        if self.damaged_records:
            texts.append(f"{self.damaged_records} records have damaged headers and no queue entry")
        if self.saved_files:
            texts.append(
                f"the log was truncated: {self.cut_reason or 'nothing was written here'}; "
                f"{self.saved_bytes} bytes were saved before in {', '.join(self.saved_files)}"
            )
        elif self.cut_reason and not self.cut_reason.startswith(PROBLEMS[UNWRITTEN]):
            texts.append(f"the log was truncated: {self.cut_reason}")
        return texts


class ReplayDamage:
    """The damage that a replay has met so far, and the queue offsets that it cost."""

    def __init__(self, report: RecoveryReport, replayed_from: int) -> None:
        self._report = report
        self._replayed_from = replayed_from
        # Begin and end of each damaged range, in the order of the log.
        self._begins: list[int] = []
        self._ends: list[int] = []
        report.damage, report.lost = [], []
        report.damaged_ranges = report.damaged_bytes = report.lost_messages = 0

    @property
    def bytes_met(self) -> int:
        return self._report.damaged_bytes

    def add(self, found: DamagedRange) -> None:
        report = self._report
        report.damaged_ranges += 1
        report.damaged_bytes += found.length
        if len(report.damage) < NAMED_MAX:
            report.damage.append(found)
        self._begins.append(found.offset)
        self._ends.append(found.offset + found.length)

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether a damaged range has bytes in common with this one."""
        number = bisect.bisect_right(self._ends, begin)
        return number < len(self._ends) and self._begins[number] < end

    def explains(self, before: int) -> bool:
        """Whether damage may have cost the entries that follow the one of the record at `before`.

        Only if the queue's own file is known to be complete up to there: the record was replayed.
        """
        return bool(self._begins) and self._replayed_from <= before < self._begins[-1]

    def add_lost(self, topic: bytes, queue_id: int, begin: int, end: int) -> None:
        report = self._report
        report.lost_messages += end - begin
        if len(report.lost) < NAMED_MAX:
            report.lost.append(LostRange(topic.decode("utf-8", "replace"), queue_id, begin, end))
