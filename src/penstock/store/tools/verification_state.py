"""The state of one verification, which the checks of log, queues and index share."""

from penstock.store.tools.inspection import QueueEntries, StoreFiles
from penstock.store.tools.log_scan import LogScan, QueueComparison
from penstock.store.tools.survey import Progress, dispatched_end
from penstock.store.tools.verify_log import LogVerification

SCHEDULE_TOPIC = b"SCHEDULE_TOPIC_XXXX"
"""Entries of these queues hold the delivery time where others have a tag hash."""


class VerificationState(LogVerification):
    """The files, the queues that were compared so far, and the totals."""

    def __init__(self, files: StoreFiles, progress: Progress | None = None) -> None:
        super().__init__(files, progress)
        self.entries: dict[tuple[bytes, int], QueueEntries] = {}
        self.comparisons: dict[tuple[bytes, int], QueueComparison] = {}
        self.scan = LogScan(self._make_queue)
        self.index = [(path, files.index_head(path)) for path in files.index_files()]
        heads = [head for _, head in self.index if head is not None]
        self.scan.keys_from = heads[0].begin_offset if heads else 0
        self.scan.keys_to = heads[-1].end_offset if heads else -1
        if files.live:  # after the index headers: what they count is dispatched by now
            files.stop = dispatched_end(files)

    def _make_queue(self, topic: bytes, queue_id: int) -> QueueComparison:
        key = (topic, queue_id)
        # A damaged header may name any topic, and such a topic has no files.
        name = topic.decode("utf-8", "replace").replace("/", "\ufffd").replace("\0", "\ufffd")
        entries = self.entries[key] = QueueEntries(self.files, name, queue_id)
        comparison = self.comparisons[key] = QueueComparison(topic, queue_id, entries.fetch)
        comparison.any_tag = topic == SCHEDULE_TOPIC
        return comparison
