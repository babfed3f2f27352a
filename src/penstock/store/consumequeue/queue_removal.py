"""Deletion of topics: their queue files, and the log offsets below which their records are ignored.

The records of a deleted topic stay in the log until retention deletes their segments, and recovery
after a crash replays the log. So `penstock.removed` keeps the log's end at the time of each
deletion: records below it get no queue entry again, and a new topic of the same name begins at 0.
(Apache's broker keeps no such file and brings the old messages back.)

The files are deleted in two steps. The loop renames the topic's directory, which is quick and frees
the name at once; the pool then writes `penstock.removed` and deletes. A start deletes directories
that a crash left behind; it finds them by their name.
"""

import threading

import msgspec

from penstock.errors import StoreError
from penstock.store.consumequeue.consumequeue import ConsumeQueue, renaming
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
        self._stored: dict[str, int] = {}  # what the file holds
        # Replaced and never changed, so that the pool can write it while the loop adds the next.
        self.ends: dict[str, int] = read_ends(disk, paths)

    def end_of(self, topic: bytes) -> int:
        """Records of the topic below this log offset are ignored; 0 if it was never deleted."""
        return self.ends.get(topic.decode("utf-8", "replace"), 0)

    def detach(
        self, topic: bytes, queues: list[ConsumeQueue], *, log_begin: int, log_end: int
    ) -> None:
        """Free the topic's name; nothing has changed if this raises a StoreError.

        Deletions before `log_begin` are forgotten: their records can't be replayed.
        """
        name = topic.decode()
        folder = self._layout.queues / name
        with renaming:
            if any(queue.file_starts for queue in queues) or self._disk.names(folder):
                old, folder = folder, self._layout.queues / f"{PREFIX}{self._count}"
                self._count += 1
                try:
                    self._disk.rename(old, folder)
                except OSError as error:
                    raise StoreError(f"can't rename {old} for deletion: {error}") from error
            if log_end > log_begin:  # without files too: delayed messages of it may be stored
                kept = {other: end for other, end in self.ends.items() if end > log_begin}
                self.ends = {**kept, name: log_end}
            for queue in queues:
                queue.retire(folder / str(queue.queue_id))

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
