"""Compares the log with the snapshot of a clean shutdown: is it the log that was closed?

Everything behind the end that the snapshot names is searched for valid records, so that a log that
another program continued, or that was exchanged for another one, is never cut there. The search
reads no holes: mostly that is nothing, or the few MiB that were allocated ahead.
"""

from penstock.store.recovery.damage import DamageJudge
from penstock.store.recovery.shutdown_snapshot import ShutdownSnapshot
from penstock.store.recovery_report import RecoveryReport
from penstock.store.segment import SegmentList
from penstock.wire.record import BLANK, NOTHING, RECORD, StoredRecord

UNKNOWN = 0  # there is no snapshot
AS_CLOSED = 1
CHANGED = 2  # damaged at its end, or with other first segments
CONTINUED = 3  # by another program: records follow the last one
REPLACED = 4  # by another log: records follow, but not where the log ended


def compare(
    segments: SegmentList,
    snapshot: ShutdownSnapshot | None,
    judge: DamageJudge,
    report: RecoveryReport,
) -> int:
    """What the log is now, compared with the snapshot; notes in the report what is unexpected."""
    if snapshot is None:
        return UNKNOWN
    if snapshot.log_begin < segments.first:
        report.missing_begin = (snapshot.log_begin, segments.first)
    following = judge.next_record(snapshot.log_end)
    if following is None:
        same = snapshot.log_begin == segments.first and _has_last_record(segments, snapshot)
        return AS_CLOSED if same else CHANGED
    if following == snapshot.log_end or _is_blank(segments, snapshot.log_end):
        return CONTINUED
    report.replaced_from = snapshot.log_end
    return REPLACED


def _has_last_record(segments: SegmentList, snapshot: ShutdownSnapshot) -> bool:
    """Whether the snapshot's last record is valid, if it was not deleted by retention."""
    if snapshot.last_offset < segments.first:
        return True
    segment = segments.find(snapshot.last_offset)
    if segment is None:
        return False
    stored = StoredRecord()
    stored.bind(segment.view)
    kind = stored.read(snapshot.last_offset - segment.start, segment.size)
    return kind == RECORD and stored.check(snapshot.last_offset) != NOTHING


def _is_blank(segments: SegmentList, offset: int) -> bool:
    """Whether the segment ends here with a blank record, or does not exist any more."""
    segment = segments.find(offset)
    if segment is None:
        return True
    stored = StoredRecord()
    stored.bind(segment.view)
    return stored.read(offset - segment.start, segment.size) == BLANK
