"""The store's log as the sessions of replication see it."""

from collections.abc import Callable
from concurrent.futures import Future

from penstock.errors import ReplicationError, WriteStopped
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.slave_session import UNKNOWN
from penstock.server.background import in_pool
from penstock.store.put import OFFSET_MAX
from penstock.store.received.received_log import ReceivedLog
from penstock.store.recovery.recovery import CLOCK_AHEAD_MS
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
        self,
        store: MessageStore,
        history: EpochHistory,
        save: Callable[[EpochHistory], None],
        *,
        confirmed: int = OFFSET_MAX,
    ) -> None:
        """`save` stores the epochs durably. The log is known to be confirmed up to `confirmed`;
        later a master says how much is confirmed."""
        self._store = store
        self._save = save
        self.history = history
        self.segment_bytes = store.log.segments.segment_bytes
        self.received = ReceivedLog(store.log, store.writer, store.make_queue)
        self.begin_wanted = UNKNOWN
        """Where the empty log must begin before anything can be received."""
        self.on_saved: Callable[[], None] = lambda: None
        """Called by a thread when the epochs are stored, or can't be."""
        self._saved: tuple[Epoch, ...] | None = None  # what the last save has stored
        self._saving: Future[None] | None = None
        self._being_saved: tuple[Epoch, ...] = ()
        self._epochs_stored_to = OFFSET_MAX  # epochs after this log offset are not stored yet
        self._master_confirm = confirmed
        self._opened_end = store.log.end
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
        offset = flusher.flushed() if flusher.group_commit else self._store.log.end
        return min(offset, self._epochs_stored_to)

    @property
    def may_receive(self) -> bool:
        """A log without any stored epoch would have nothing in common with the master's after a
        crash. A slave whose disk has failed must not join the in-sync set."""
        if isinstance(self._store.writer.refusal, WriteStopped):
            return False
        return self._epochs_stored_to == OFFSET_MAX and self.acknowledged >= self.end

    def restart(self, next_offset: int, *, equal: bool = False) -> None:
        self.received.restart(next_offset, equal=equal)

    def begin_at(self, offset: int) -> None:
        """Always raises ReplicationError, which ends the connection: creating the first file of an
        empty log takes time. The caller does that (`begin_wanted`, `move_begin`) and then connects
        again."""
        self.begin_wanted = offset
        raise ReplicationError(f"the master's log begins at offset {offset}")

    async def move_begin(self, offset: int) -> None:
        """Begin the empty log at the start of a segment. The pool creates and deletes files."""
        store = self._store
        self.begin_wanted = UNKNOWN
        segment = await in_pool(store.disk, store.log.create_begin(offset))
        delete_old = store.begin_log_at(segment)
        self.received.restart(offset)
        await in_pool(store.disk, delete_old)

    def receive(self, data: memoryview) -> None:
        refusal = self._store.writer.refusal
        if isinstance(refusal, WriteStopped):  # what is on the disk is not known any more
            raise refusal
        self.received.receive(data)

    def follow(self, history: EpochHistory) -> None:
        """Take over the master's epochs; the pool stores them.

        No byte of a new epoch is acknowledged before that. After a crash meanwhile, such bytes
        count as those of an older epoch: then they are truncated and received again. There is an
        older one: nothing is received before the epochs of the handshake are stored.
        """
        self.history = EpochHistory(history.epochs)
        if self._saving is not None or self.history.epochs != self._saved:
            self._epochs_stored_to = min(self._epochs_stored_to, self._store.log.end)
        if self._saving is None:
            self._save_epochs()

    def _save_epochs(self) -> None:
        if self.history.epochs == self._saved:
            self._epochs_stored_to = OFFSET_MAX
            return
        history, save = EpochHistory(self.history.epochs), self._save
        self._saving = self._store.disk.submit(lambda: save(history))
        self._being_saved = history.epochs
        self._saving.add_done_callback(lambda done: self.on_saved())

    def epochs_stored(self) -> None:
        """Take note of a finished save. Raises OSError or StoreError if it failed."""
        saving = self._saving
        if saving is None or not saving.done():
            return
        self._saving = None
        saving.result()
        self._saved = self._being_saved
        self._save_epochs()  # there may be another epoch by now

    def confirm(self, offset: int) -> None:
        self._master_confirm = offset

    @property
    def opened_confirmed(self) -> bool:
        """Whether all that the log had when it was opened is confirmed. The store shows it to
        readers in any case: its queues take what they had for confirmed."""
        return self._master_confirm >= self._opened_end

    def publish(self, now_ms: int | None = None) -> None:
        """Dispatch what has arrived, and let readers see what the master has confirmed.

        A store time that is far ahead of `now_ms` is damage, as in a recovery: no checksum covers
        it, and store times never go back.
        """
        if now_ms is not None:
            self._store.writer.plausible_to_ms = now_ms + CLOCK_AHEAD_MS
        self.received.dispatch()
        writer = self._store.writer
        writer.confirm_limit = min(self.received.dispatched, self._master_confirm)
        self._store.publish()
