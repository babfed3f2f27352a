"""Deleting topics: their queues' files, and the note that their records in the log no longer count.

The records of a deleted topic stay in the log until retention takes their segments, and a crash has
recovery replay the log. So `penstock.removed` keeps, for each deleted topic, where the log ended
then: what lies before that place gets no queue entry again, and a topic that is made anew begins
at 0 and stays there. (Apache's broker keeps no such note and brings the old messages back.)

The files go in two steps. In the loop the topic's directory is renamed, which is quick and leaves
the name free for a topic made anew at once; the pool then writes the note and deletes. Directories
that a crash left half deleted are found by their name at the next start.
"""

import threading

import msgspec

from penstock.errors import StoreError
from penstock.store.consumequeue.consumequeue import ConsumeQueue, renaming
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk

PREFIX = ".removed-"
"""Of directories on their way out: no topic's name begins with a point."""


class Removal:
    """Deleted topics of one store."""

    def __init__(self, disk: Disk, paths: StorePaths) -> None:
        self._disk = disk
        self._layout = paths
        self._lock = threading.Lock()
        self._count = 0
        self._noted: dict[str, int] = {}
        # Replaced and never changed, so that the pool can write it while the loop notes the next.
        self.ends: dict[str, int] = read_ends(disk, paths)

    def end_of(self, topic: bytes) -> int:
        """Records of the topic below this log offset are deleted."""
        return self.ends.get(topic.decode("utf-8", "replace"), 0)

    def detach(
        self, topic: bytes, queues: list[ConsumeQueue], *, log_begin: int, log_end: int
    ) -> None:
        """Free the topic's name; nothing has changed if this raises a StoreError.

        Notes of what lies before `log_begin` go: no crash brings such records back.
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
                    raise StoreError(f"{old} can't be renamed to be deleted: {error}") from error
            if log_end > log_begin:  # without files too: messages of the topic may be parked
                kept = {other: end for other, end in self.ends.items() if end > log_begin}
                self.ends = {**kept, name: log_end}
            for queue in queues:
                queue.retire(folder / str(queue.queue_id))

    def finish(self) -> None:
        """Write the note, then delete what was taken away; waits for the disk."""
        with self._lock:
            ends = self.ends
            if ends != self._noted:
                self._disk.replace(self._layout.removed, msgspec.json.encode(ends))
                self._noted = ends
            self._disk.sync_directory(self._layout.queues)
            self.sweep()

    def sweep(self) -> None:
        """Delete all directories that are on their way out; waits for the disk."""
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
        """After recovery: forget what the log no longer holds, and never speak of what comes.

        A power cut may have shortened the log; what is appended in that place is new.
        """
        noted = self.ends
        self.ends = {t: min(end, log_end) for t, end in noted.items() if end > log_begin}
        if self.ends != noted:
            self._disk.replace(self._layout.removed, msgspec.json.encode(self.ends))
        self._noted = self.ends
        self.sweep()


def read_ends(disk: Disk, paths: StorePaths) -> dict[str, int]:
    """What `penstock.removed` says: the log's end when each topic was deleted."""
    for path in (paths.removed, paths.removed.with_name(paths.removed.name + ".bak")):
        data = disk.read(path)
        if data is not None:
            try:
                return msgspec.json.decode(data, type=dict[str, int])
            except ValueError:  # DecodeError, or bytes that are no UTF-8
                continue
    return {}
