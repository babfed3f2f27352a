"""Opening the files of a store before recovery makes them consistent."""

import os
import string
from collections.abc import Callable
from pathlib import Path

from penstock.config import StoreConfig, delays_ms
from penstock.errors import StoreDamaged, StoreRefused
from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.consumequeue.mapped_queues import MappedQueues, mapped_max
from penstock.store.consumequeue.queue_removal import QueueRemoval
from penstock.store.consumequeue.queue_table import QueueTable
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.store.index import Index, index_file_bytes
from penstock.store.recovery.checkpoint import Checkpoint
from penstock.store.recovery_report import RecoveryReport
from penstock.store.segment import NAME_DIGITS, Segment, SegmentList, is_number, segment_name
from penstock.wire.codes import TOPIC_SCHEDULE
from penstock.wire.layout import ENTRY_BYTES

QUEUE_ID_MAX = 1 << 20
SCHEDULE_TOPIC = TOPIC_SCHEDULE.encode()
RESTORE_LOG = "mount or restore commitlog/ and start again; nothing has been changed"

_QUEUE_NAME_BYTES = (string.ascii_letters + string.digits + "%|-_+").encode()
"""RocketMQ's characters of topics. Only retry topics of POP contain a plus."""

Progress = Callable[[str, int, int], None]
"""Called with the phase, how much of it is done and how much there is."""


class OpenedFiles:
    """The files of one store: log, queues, index, checkpoint."""

    def __init__(
        self, disk: Disk, paths: StorePaths, config: StoreConfig, progress: Progress | None
    ) -> None:
        self.disk = disk
        self.paths = paths
        self.config = config
        self.segments = SegmentList(disk, paths.log, config.segment_bytes)
        self.queues = QueueTable()
        self.mapped_queues = MappedQueues(mapped_max(disk, config))
        self.index = Index(disk, paths.index, config.index_slots, config.index_entries)
        self.checkpoint = Checkpoint()
        self.removal = QueueRemoval(disk, paths)
        self.report = RecoveryReport()
        self._delays_ms = delays_ms(config.delay_levels)
        self._progress = progress or (lambda what, done, of: None)

    def load_log(self, *, sizes_known: bool) -> None:
        """Map the log's segments; short ones are extended if the segment size is known."""
        names = [
            n for n in self.disk.names(self.paths.log) if is_number(n) and len(n) == NAME_DIGITS
        ]
        size = self.config.segment_bytes
        for place, name in enumerate(names):
            path = self.paths.log / name
            start = int(name)
            length = self.disk.size(path)
            if place and start != self.segments.first + place * size:
                if (start - self.segments.first) % size == 0:
                    missing = segment_name(self.segments.first + place * size)
                    raise StoreDamaged(
                        f"segment {missing} is missing in {self.paths.log}",
                        hint=self.restore_hint(missing),
                    )
                raise self._other_size(path, start - self.segments.first)
            if length == 0 and place == len(names) - 1 and place > 0:
                self.disk.unlink(path)
                break
            if length != size and (length > size or not sizes_known):
                raise self._other_size(path, length)
            if length < size and place < len(names) - 1:
                self.report.short_files.append(name)
            self.segments.push(Segment(self.disk, path, start, size, self.disk.create(path, size)))

    def restore_hint(self, missing: str) -> str:
        """What to do if a segment is missing."""
        return (
            f"{RESTORE_LOG}. To continue without the messages of a lost segment, put zeros in its "
            f"place: truncate -s {self.config.segment_bytes} {self.paths.log / missing}"
        )

    def beyond(self) -> int:
        """The end of the log's last segment."""
        return self.segments.first + len(self.segments.items) * self.segments.segment_bytes

    def _other_size(self, path: Path, length: int) -> StoreRefused:
        return StoreRefused(
            f"{path} belongs to segments of {length} bytes, the setting segment_bytes is "
            f"{self.config.segment_bytes}",
            hint="set segment_bytes (mappedFileSizeCommitLog) to the size of the store's files",
        )

    def load_queues(self) -> None:
        """Find all queues; their positions are set later."""
        for topic in self.disk.names(self.paths.queues):
            for queue_id in self.disk.names(f"{self.paths.queues}/{topic}"):
                if is_number(queue_id):
                    queue = self.add_queue(os.fsencode(topic), int(queue_id))
                    if queue is not None:
                        queue.load()

    def add_queue(self, topic: bytes, queue_id: int) -> ConsumeQueue | None:
        """The queue of this name, made if it is new; None for a name that no queue can have."""
        queue = self.queues.get(topic, queue_id)
        if queue is None and is_queue_name(topic) and 0 <= queue_id < QUEUE_ID_MAX:
            folder = f"{self.paths.queues}/{topic.decode()}/{queue_id}"
            queue = ConsumeQueue(
                self.disk,
                folder,
                topic,
                queue_id,
                self.config.queue_file_entries,
                self.mapped_queues,
                delay_ms=self._delay_ms(queue_id) if topic == SCHEDULE_TOPIC else -1,
            )
            self.queues.add(queue)
        return queue

    def _delay_ms(self, queue_id: int) -> int:
        """The delay of a level's queue; levels that the table had once get its longest."""
        return self._delays_ms[min(queue_id, len(self._delays_ms) - 1)]

    def load_index(self, *, extend: bool) -> set[str]:
        """Open the index files; returns the names of those that are too short."""
        if not self.config.index_enabled:
            return set()
        size = index_file_bytes(self.config.index_slots, self.config.index_entries)
        folder = self.paths.index
        short = {n for n in self.disk.names(folder) if self.disk.size(folder / n) < size}
        self.report.invalid_index_files = self.index.load(extend=extend)
        return short

    def refuse_other_sizes(self) -> None:
        """Refuse an Apache store whose files do not have the configured sizes."""
        self.load_queues()
        for queue in self.queues.rows:
            length = queue_files.other_file_size(queue)
            if length is not None:
                raise StoreRefused(
                    f"{queue.folder} has files of {length} bytes, the setting queue_file_entries "
                    f"requires {self.config.queue_file_entries * ENTRY_BYTES}",
                    hint="set queue_file_entries to the size of the store's files "
                    "(mappedFileSizeConsumeQueue / 20)",
                )
        invalid = [n for n in self.report.invalid_index_files if is_number(n)]
        if invalid:
            raise StoreRefused(
                f"{self.paths.index / invalid[0]} is not an index file with "
                f"{self.config.index_slots} slots and {self.config.index_entries} entries",
                hint="set index_slots (maxHashSlotNum) and index_entries (maxIndexNum) to the "
                "sizes of the store's files",
            )


def is_queue_name(topic: bytes) -> bool:
    """Whether a topic can be a directory's name: RocketMQ's characters, and not too long."""
    if not 0 < len(topic) <= 255:
        return False
    return not topic.translate(None, _QUEUE_NAME_BYTES)
