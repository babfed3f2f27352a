"""The queues of a verification: entries that no record confirmed, and records without an entry.

The walk over the log has found the ranges of queue offsets where entry and record agree. Only the
gaps between them are checked here, entry by entry, so an undamaged store costs nothing.
"""

from collections.abc import Iterator

from penstock.store.consumequeue.consumequeue import FILLER_SIZE
from penstock.store.tools.inspection import QueueEntries
from penstock.store.tools.log_scan import QueueComparison
from penstock.store.tools.problem import DAMAGE, NOTE, Problem, merge_neighbours
from penstock.store.tools.verification_state import VerificationState
from penstock.wire.layout import ENTRY_BYTES
from penstock.wire.record import NOTHING

LITE_PREFIX = "%LMQ%"
"""Apache's light message queues point at records of other topics; their entries are not checked."""

_REBUILT = "; recovery rebuilds these entries"
Range = tuple[int, int]


def check_queues(verification: VerificationState) -> Iterator[Problem]:
    """Check all queues that have files or records."""
    names = list(verification.files.queues())
    for topic, queue_id in names:
        key = (topic.encode(), queue_id)
        if key not in verification.entries:
            verification.entries[key] = QueueEntries(verification.files, topic, queue_id)
    total = len(verification.entries)
    verification.totals.queues = len(names)
    for done, (key, entries) in enumerate(sorted(verification.entries.items())):
        verification.tell("queues", done, total)
        verification.totals.queue_entries += max(entries.end - entries.first, 0)
        if entries.topic.startswith(LITE_PREFIX):
            continue
        yield from _QueueCheck(verification, entries, verification.comparisons.get(key)).run()
    verification.tell("queues", total, total)
    yield from _check_snapshot(verification)


def _check_snapshot(verification: VerificationState) -> Iterator[Problem]:
    """Compare with the queue ends that a clean shutdown recorded."""
    files = verification.files
    if files.crashed or files.snapshot is None:
        return
    for topic, queue_id, low, high in files.snapshot.queues:
        entries = verification.entries.get((topic.encode(), queue_id))
        end = entries.end if entries is not None else 0
        if high > low and end != high:
            yield Problem(
                DAMAGE,
                "snapshot.queue",
                files.paths.snapshot.name,
                0,
                f"queue {topic}/{queue_id} ended at offset {high} when the store was closed, "
                f"its entries end at {end}",
            )


class _QueueCheck:
    """One queue."""

    def __init__(
        self,
        verification: VerificationState,
        entries: QueueEntries,
        comparison: QueueComparison | None,
    ) -> None:
        self.verification = verification
        self.files = verification.files
        self.entries = entries
        self.covered = merge(comparison.matches) if comparison is not None else []
        self.misses = comparison.misses if comparison is not None else []

    def run(self) -> Iterator[Problem]:
        # A damaged entry may mislead the search for the first one; a record does not.
        known = [low for low, *_ in (*self.covered, *self.misses) if low >= self.entries.first]
        low = min([self.entries.min_offset(self.files.log_begin), *known])
        for begin, end in gaps(self.covered, low, self.entries.end):
            yield from merge_neighbours(self._gap(begin, end))
        yield from self._missing()

    def _gap(self, begin: int, end: int) -> Iterator[tuple[int, Problem]]:
        offset = begin
        while offset < end:
            data = self.entries.read(offset, min(end - offset, 4096))
            if not data:
                yield (
                    offset,
                    self._problem(
                        DAMAGE,
                        "queue.missing-file",
                        offset,
                        "the file of these entries is missing or short: consumers can't see them",
                    ),
                )
                offset = next((f.start for f in self.entries.files if f.start > offset), end)
                continue
            for _ in range(len(data) // ENTRY_BYTES):
                problem = self._judge(offset)
                if problem is not None:
                    yield offset, problem
                offset += 1

    def _judge(self, offset: int) -> Problem | None:
        """What is wrong with an entry that no good record confirmed."""
        entry = self.entries.entry(offset)
        record_at = self._record_at(offset)
        if entry is None:
            rebuilt = record_at is not None and self.verification.rebuilt_by_recovery(record_at)
            return self._problem(
                NOTE if rebuilt else DAMAGE,
                "queue.hole",
                offset,
                "an entry is missing" + (_REBUILT if rebuilt else ": consumers stop or skip here"),
            )
        physical, size, tags_code = entry
        if size == FILLER_SIZE:
            return self._problem(
                NOTE,
                "queue.filler",
                offset,
                "a filler replaces a message that was deleted or damaged: consumers skip it",
            )
        if 0 <= physical < self.files.log_begin and record_at is None:
            return None  # its segment was deleted
        if self.files.live and physical >= self.verification.totals.log_end:
            return None  # written since the check began
        what, kind = self._compare(offset, physical, size, tags_code)
        rebuilt = self.verification.rebuilt_by_recovery(
            physical if record_at is None else record_at
        )
        text = f"{what} (entry → log offset {physical}, {size} bytes)"
        return self._problem(
            NOTE if rebuilt else DAMAGE, kind, offset, text + (_REBUILT if rebuilt else "")
        )

    def _record_at(self, offset: int) -> int | None:
        """About where the record of a queue offset is that its entry does not point at."""
        for begin, end, physical in self.misses:
            if begin <= offset < end:
                return physical
        return None

    def _compare(self, offset: int, physical: int, size: int, tags_code: int) -> tuple[str, str]:
        if physical >= self.verification.totals.log_end:
            return "points behind the log's end", "queue.beyond"
        found = self.files.record(physical)
        if found is None:
            return "points at no record", "queue.no-record"
        stored, data = found
        topic = data[stored.topic_at : stored.topic_at + stored.topic_length]
        stored.scan()
        if topic.decode("utf-8", "replace") != self.entries.topic:
            return "points at a record of another topic", "queue.topic"
        if stored.queue_id != self.entries.queue_id:
            return f"points at a record of queue {stored.queue_id}", "queue.queue-id"
        if stored.queue_offset != offset:
            return f"points at the record of queue offset {stored.queue_offset}", "queue.offset"
        if stored.size != size:
            return f"gives a size other than the record's {stored.size}", "queue.size"
        if stored.marks.tags_code() != tags_code:
            return "has another tag hash than the record: filters miss it", "queue.tag"
        if stored.check(physical) == NOTHING:
            return "points at a damaged record", "queue.damaged-record"
        return "was not found in the log: the log before its record is damaged", "queue.unmet"

    def _missing(self) -> Iterator[Problem]:
        """Records of this queue that have no entry."""
        for begin, end, physical in self.misses:
            outside = begin >= self.entries.end or end <= self.entries.first
            if not outside:
                if any(low <= begin < high for low, high in self.covered):
                    yield self._problem(
                        NOTE,
                        "queue.superseded",
                        begin,
                        f"records from log offset {physical} on belong to a deleted topic of this "
                        "name, which was created again",
                        end - begin,
                    )
                continue
            rebuilt = self.verification.rebuilt_by_recovery(physical)
            removed_end = self.verification.files.removed.get(self.entries.topic, 0)
            deleted = physical < removed_end or not (self.entries.files or self._known())
            text = f"records from log offset {physical} on have no entry: "
            if rebuilt:
                text += "recovery adds them"
            elif deleted:
                text += "the topic was deleted, or the record's header is damaged"
            else:
                text += "consumers can't see them"
            severity = NOTE if rebuilt or deleted else DAMAGE
            yield self._problem(severity, "queue.no-entry", begin, text, end - begin)

    def _known(self) -> bool:
        """Whether the snapshot or the topic table says that this topic exists."""
        snapshot = self.files.snapshot
        if snapshot is not None and any(row[0] == self.entries.topic for row in snapshot.queues):
            return True
        table = self.files.paths.config / "topics.json"
        return table.exists() and f'"{self.entries.topic}"'.encode() in table.read_bytes()

    def _problem(self, severity: str, kind: str, offset: int, text: str, count: int = 1) -> Problem:
        where = f"queue offset {offset}: " if count == 1 else f"queue offsets from {offset} on: "
        name, at = f"consumequeue/{self.entries.topic}/{self.entries.queue_id}", 0
        for file in self.entries.files:
            if file.start <= offset < file.start + file.entries:
                name = str(file.path.relative_to(self.files.root))
                at = (offset - file.start) * ENTRY_BYTES
        return Problem(severity, kind, name, at, where + text, count)


def merge(ranges: list[Range]) -> list[Range]:
    """The same numbers in sorted ranges that do not touch."""
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def gaps(ranges: list[Range], low: int, high: int) -> Iterator[Range]:
    """The parts of [low, high) that sorted ranges do not cover."""
    for begin, end in ranges:
        if begin > low:
            yield low, min(begin, high)
        low = max(low, end)
        if low >= high:
            return
    if low < high:
        yield low, high
