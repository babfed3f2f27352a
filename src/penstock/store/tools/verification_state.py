"""The state of one verification, which the checks of log, queues and index share."""

import msgspec

from penstock.store.directory import opened_here
from penstock.store.disk import Disk
from penstock.store.recovery.damage import DamageJudge
from penstock.store.tools.file_pieces import LogFile, log_part
from penstock.store.tools.inspection import QueueEntries, StoreFiles
from penstock.store.tools.log_scan import LogScan, QueueComparison
from penstock.store.tools.survey import Progress, dispatched_end

SCHEDULE_TOPIC = b"SCHEDULE_TOPIC_XXXX"
"""Entries of these queues hold the delivery time where others have a tag hash."""


class Totals(msgspec.Struct):
    """Counts of a verification."""

    log_begin: int = 0
    log_end: int = 0
    records: int = 0
    record_bytes: int = 0
    queues: int = 0
    queue_entries: int = 0
    index_files: int = 0
    index_entries: int = 0
    keys: int = 0
    first_ms: int = 0
    last_ms: int = 0
    damage: int = 0
    notes: int = 0


class VerificationState:
    """The files, the queues that were compared so far, and the totals."""

    def __init__(self, files: StoreFiles, progress: Progress | None = None) -> None:
        self.files = files
        self.tell = progress or (lambda what, done, of: None)
        self.totals = Totals(log_begin=files.log_begin)
        self.replay_from = files.replay_from()
        # Read before the log is walked: the checkpoint of a live store changes meanwhile.
        self.checkpoint = files.checkpoint()
        confirm_offset = self.checkpoint.confirm_offset if self.checkpoint is not None else 0
        if confirm_offset > files.log_beyond:
            confirm_offset = 0
        self.judge = DamageJudge(
            [log_part(file) for file in files.log],
            files.sizes.segment_bytes,
            durable_to=self._durable_to(confirm_offset),
            confirm_offset=confirm_offset,
        )
        self.entries: dict[tuple[bytes, int], QueueEntries] = {}
        self.comparisons: dict[tuple[bytes, int], QueueComparison] = {}
        self.scan = LogScan(self._make_queue)
        self.index = [(path, files.index_head(path)) for path in files.index_files()]
        heads = [head for _, head in self.index if head is not None]
        self.scan.keys_from = heads[0].begin_offset if heads else 0
        self.scan.keys_to = heads[-1].end_offset if heads else -1
        if files.live:  # after the index headers: what they count is dispatched by now
            files.stop = dispatched_end(files)

    def _durable_to(self, confirm_offset: int) -> int:
        """No record below this log offset can be torn."""
        files = self.files
        if not files.crashed or opened_here(Disk(), files.paths):
            return files.log_beyond
        return max(confirm_offset, self.replay_from)

    def rebuilt_by_recovery(self, physical_offset: int) -> bool:
        """Whether recovery rebuilds the entries of the record at this offset."""
        return self.files.crashed and physical_offset >= self.replay_from

    def name(self, file: LogFile) -> str:
        return str(file.path.relative_to(self.files.root))

    def _make_queue(self, topic: bytes, queue_id: int) -> QueueComparison:
        key = (topic, queue_id)
        # A damaged header may name any topic, and such a topic has no files.
        name = topic.decode("utf-8", "replace").replace("/", "\ufffd").replace("\0", "\ufffd")
        entries = self.entries[key] = QueueEntries(self.files, name, queue_id)
        comparison = self.comparisons[key] = QueueComparison(topic, queue_id, entries.fetch)
        comparison.any_tag = topic == SCHEDULE_TOPIC
        return comparison
