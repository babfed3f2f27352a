"""Refuses a store whose log has lost its last segments, or all of them.

Such a log must not be continued: offsets would be used again, and if the files come back, because
a file system was not mounted, they would contradict what was written meanwhile.

How far the log reached is known from the snapshot of a clean shutdown, or else from the confirm
offset of the checkpoint. One wrong number there refuses nothing: queue or index entries must point
at the missing part, unless there is no segment at all.
"""

from penstock.errors import StoreDamaged
from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.recovery.damage import DamageJudge
from penstock.store.recovery.opened_files import RESTORE_LOG, OpenedFiles
from penstock.store.recovery.shutdown_snapshot import ShutdownSnapshot
from penstock.store.segment import segment_name
from penstock.wire.layout import FIXED_BYTES

_EVER = 1 << 62


def refuse_missing_log(
    files: OpenedFiles, snapshot: ShutdownSnapshot | None, judge: DamageJudge, *, pages_kept: bool
) -> None:
    """Raise StoreDamaged if segments are missing at the log's end.

    `pages_kept`: no power failure has undone what was written.
    """
    segments = files.segments
    source = files.paths.checkpoint.name if snapshot is None else files.paths.snapshot.name
    known = files.checkpoint.confirm_offset if snapshot is None else snapshot.log_end
    if not segments.items:
        _refuse_empty(files, known, source)
        return
    reached = f"{source} says that the log reached offset {known}"
    beyond = files.beyond()
    if known > beyond and (snapshot is not None or _entries_between(files, beyond, known)):
        missing = segment_name(beyond)
        raise StoreDamaged(
            f"the last segments in {files.paths.log} are missing, from {missing} on: {reached}",
            hint=files.restore_hint(missing),
        )
    lost_all = 0 < known < segments.first and pages_kept
    if lost_all and judge.next_record(segments.first) is None:
        raise StoreDamaged(
            f"no record of the log is left in {files.paths.log}: {reached}",
            hint=f"{RESTORE_LOG}. {_start_over(files)}",
        )


def _refuse_empty(files: OpenedFiles, known: int, source: str) -> None:
    """There is no segment: only a store without messages may be opened."""
    why = f"{source} says that the log reached offset {known}"
    if known <= 0:
        holder = _entries_between(files, 0, _EVER)
        if not holder:
            return
        why = f"{holder} has entries of messages"
    raise StoreDamaged(
        f"{files.paths.log} is empty, but {why}",
        hint=f"check that its file system is mounted; {RESTORE_LOG}. {_start_over(files)}",
    )


def _start_over(files: OpenedFiles) -> str:
    return f"To start over without any stored message, delete {files.paths.root} as a whole"


def _entries_between(files: OpenedFiles, low: int, high: int) -> str:
    """The name of an index file or queue that points at log offsets in [low, high), or ""."""
    for file in files.index.files:
        if file.next_number() > 1 and low <= file.end_offset() < high:
            return f"index/{file.path.name}"
    files.load_queues()
    for queue in files.queues.rows:
        if _points_between(queue, low, high):
            return f"consumequeue/{queue.topic.decode()}/{queue.queue_id}"
    return ""


def _points_between(queue: ConsumeQueue, low: int, high: int) -> bool:
    """Whether the first entry behind those of records below `low` points below `high`."""
    first = queue_files.find_below(queue, low)
    end = first - first % queue.file_entries + queue.file_entries
    queue.max_offset = max(queue.max_offset, end)
    found = queue.next_real(first, end)
    return found is not None and low <= found[1][0] < high and found[1][1] >= FIXED_BYTES
