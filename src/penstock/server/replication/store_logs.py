"""The store's log as the sessions of replication see it."""

from collections.abc import Callable

from penstock.errors import WriteStopped
from penstock.replication.epochs import EpochHistory
from penstock.store.put import OFFSET_MAX
from penstock.store.received_log import ReceivedLog
from penstock.store.store import MessageStore


class StoreMasterLog:
    """The log of a master."""

    def __init__(
        self, store: MessageStore, history: EpochHistory, *, flushed_only: bool = False
    ) -> None:
        """With `flushed_only` slaves get what is on the disk: then they are never ahead of a master
        that a power failure has hit, which only epochs could tell."""
        self._store = store
        self._flushed_only = flushed_only
        self.history = history
        self.segment_bytes = store.log.segments.segment_bytes

    @property
    def begin(self) -> int:
        return self._store.log.begin()

    @property
    def end(self) -> int:
        """What can be sent: records that are staged for a write can't be yet."""
        return self._store.flusher.flushed() if self._flushed_only else self._store.log.written

    @property
    def confirm_offset(self) -> int:
        return self._store.confirm_offset

    def view(self, offset: int, length: int) -> memoryview | None:
        """Bytes of one segment without a copy; None if that might wait for the disk."""
        log = self._store.log
        cold = offset < max(log.hot_from, log.end - self._store.config.hot_bytes)
        segment = None if cold else log.segments.find(offset)
        return None if segment is None else segment.slice(offset, length)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of one segment; waits for the disk. Fewer if retention has deleted it."""
        segment = self._store.log.segments.find(offset)
        if segment is None:
            return b""
        return bytes(segment.disk.read_at(segment.fd, length, offset - segment.start))


class StoreSlaveLog:
    """The log of a slave."""

    def __init__(
        self, store: MessageStore, history: EpochHistory, save: Callable[[EpochHistory], None]
    ) -> None:
        """`save` stores the epochs durably."""
        self._store = store
        self._save = save
        self.history = history
        self.segment_bytes = store.log.segments.segment_bytes
        self.received = ReceivedLog(store.log, store.writer, store.make_queue)
        self._master_confirm = OFFSET_MAX
        self.publish()

    @property
    def begin(self) -> int:
        return self._store.log.begin()

    @property
    def end(self) -> int:
        return self._store.log.end

    @property
    def next_offset(self) -> int:
        return self.received.next_offset

    @property
    def acknowledged(self) -> int:
        flusher = self._store.flusher
        return flusher.flushed() if flusher.group_commit else self._store.log.end

    def restart(self, next_offset: int) -> None:
        self.received.restart(next_offset)

    def begin_at(self, offset: int) -> None:
        # Creates a file in the event loop: once in the life of an empty slave, before it has
        # anything that could be read.
        self._store.begin_log_at(offset)
        self.received.restart(offset)

    def receive(self, data: memoryview) -> None:
        refusal = self._store.writer.refusal
        if isinstance(refusal, WriteStopped):  # what is on the disk is not known any more
            raise refusal
        self.received.receive(data)

    def follow(self, history: EpochHistory) -> None:
        # Waits for the disk in the event loop, once per connection: no byte of a new epoch may be
        # acknowledged before the epoch is stored.
        self.history = EpochHistory(history.epochs)
        self._save(self.history)

    def confirm(self, offset: int) -> None:
        self._master_confirm = offset

    def publish(self) -> None:
        """Dispatch what has arrived, and let readers see what the master has confirmed."""
        self.received.dispatch()
        writer = self._store.writer
        writer.confirm_limit = min(self.received.dispatched, self._master_confirm)
        self._store.publish()
