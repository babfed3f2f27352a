"""Deletion of topics: their queue files, and the log offsets below which their records are ignored.

The records of a deleted topic stay in the log until retention deletes their segments, and recovery
after a crash replays the log. So `penstock.removed` keeps the log's end at the time of each
deletion: records below it get no queue entry again, and a new topic of the same name begins at 0.
(Apache's broker keeps no such file and brings the old messages back.)

The files are deleted in three steps. The loop renames the topic's directory, which is quick. Then
it marks the queues as deleted, some at a time, because there may be very many; until all are
marked, no queue of this name can be made. At last the pool writes `penstock.removed` and deletes
the files. A start deletes directories that a crash left behind; it finds them by their name.
"""

import threading

import msgspec

from penstock.errors import StoreError
from penstock.store.consumequeue.consumequeue import ConsumeQueue, renamed_folders, renaming
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk

PREFIX = ".removed-"
"""Prefix of directories that are being deleted; no topic's name begins with a dot."""


class QueueRemoval:
    """Deleted topics of one store."""

    def __init__(self, disk: Disk, paths: StorePaths) -> None:
        self._disk = disk
        self._layout = paths
        self._lock = threading.Lock()
        self._count = 0
        self._folders: dict[bytes, str] = {}  # of topics that are being removed, after the rename
        self._stored: dict[str, int] = {}  # what the file holds
        # Replaced and never changed, so that the pool can write it while the loop adds the next.
        self.ends: dict[str, int] = read_ends(disk, paths)

    def end_of(self, topic: bytes) -> int:
        """Records of the topic below this log offset are ignored; 0 if it was never deleted."""
        return self.ends.get(topic.decode("utf-8", "replace"), 0)

    def is_running(self, topic: bytes) -> bool:
        """Whether the topic is being removed: some of its queues are not retired yet."""
        return topic in self._folders

    def begin(self, topic: bytes, *, log_begin: int, log_end: int) -> None:
        """Rename the topic's directory; nothing has changed if this raises a StoreError."""
        old = folder = self._layout.queues / topic.decode()
        with renaming:
            if self._disk.stat(str(old)) is not None:
                folder = self._layout.queues / f"{PREFIX}{self._count}"
                self._count += 1
                try:
                    self._disk.rename(old, folder)
                except OSError as error:
                    raise StoreError(f"can't rename {old} for deletion: {error}") from error
            renamed_folders.add(str(old))
            self._folders[topic] = str(folder)
        self._ignore_below(topic, log_begin=log_begin, log_end=log_end)

    def retire(self, topic: bytes, queues: list[ConsumeQueue]) -> None:
        """Mark some of the topic's queues as deleted."""
        with renaming:
            for queue in queues:
                queue.retire(f"{self._folders[topic]}/{queue.queue_id}")

    def end(self, topic: bytes, *, log_begin: int, log_end: int) -> None:
        """All queues are retired: the topic's name is free."""
        del self._folders[topic]
        renamed_folders.discard(str(self._layout.queues / topic.decode()))
        # Queues that were not retired yet may have got messages since `begin`.
        self._ignore_below(topic, log_begin=log_begin, log_end=log_end)

    def _ignore_below(self, topic: bytes, *, log_begin: int, log_end: int) -> None:
        """Ignore the topic's records below `log_end`, whether it has files or not: delayed messages
        of it may be stored. Deletions before `log_begin` are forgotten: their records can't be
        replayed."""
        if log_end > log_begin:
            kept = {other: end for other, end in self.ends.items() if end > log_begin}
            self.ends = {**kept, topic.decode(): log_end}

    def finish(self) -> None:
        """Write `penstock.removed`, then delete the files; waits for the disk."""
        with self._lock:
            ends = self.ends
            if ends != self._stored:
                self._disk.replace(self._layout.removed, msgspec.json.encode(ends))
                self._stored = ends
            self._disk.sync_directory(self._layout.queues)
            self.sweep()

    def sweep(self) -> None:
        """Delete all directories that were renamed for deletion; waits for the disk."""
        names = [n for n in self._disk.names(self._layout.queues) if n.startswith(PREFIX)]
        for name in names:
            folder = self._layout.queues / name
            for queue in self._disk.names(folder):
                for file in self._disk.names(folder / queue):
                    self._disk.unlink(folder / queue / file)
                self._disk.remove_directory(folder / queue)
            self._disk.remove_directory(folder)
        if names:
            self._disk.sync_directory(self._layout.queues)

    def finish_recovery(self, *, log_begin: int, log_end: int) -> None:
        """After recovery: drop deletions before the log's begin, and lower those behind its end.

        A power cut may have shortened the log; records appended at these offsets are new.
        """
        before = self.ends
        self.ends = {t: min(end, log_end) for t, end in before.items() if end > log_begin}
        if self.ends != before:
            self._disk.replace(self._layout.removed, msgspec.json.encode(self.ends))
        self._stored = self.ends
        self.sweep()


def read_ends(disk: Disk, paths: StorePaths) -> dict[str, int]:
    """The content of `penstock.removed`: the log's end when each topic was deleted."""
    for path in (paths.removed, paths.removed.with_name(paths.removed.name + ".bak")):
        data = disk.read(path)
        if data is not None:
            try:
                return msgspec.json.decode(data, type=dict[str, int])
            except ValueError:  # DecodeError, or not UTF-8
                continue
    return {}
