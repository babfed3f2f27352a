"""Queue locks for ordered consumption: one owner per (group, queue), by a lease.

A consumer owns a queue from the moment it locks it until it unlocks it or has not renewed the lock
for `lock_lease_ms`. The end of its connection changes nothing: it may come back and still be in
the middle of a message, and nobody else must begin before its lease is over. For the same reason
the locks outlive the broker: they are a table with a file, and who gets a queue is told only when
that is written (`are_noted`). A renewal waits for the file only where it is more than half a lease
behind; so at the start a lock counts as renewed so long after what the file says, and its owner
loses nothing.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import msgspec

from penstock.config import Live
from penstock.errors import BodyError, StoreDamaged
from penstock.store.tables import ConfigFile
from penstock.wire.bodies.client_bodies import MessageQueue

log = logging.getLogger(__name__)


_NEVER: Final = -(1 << 62)


class _Queue(NamedTuple):
    """A queue of this broker, by whatever name clients call the broker."""

    topic: str
    queue_id: int


@dataclass(slots=True)
class _Lock:
    owner: str
    renewed_ms: int
    taken_ms: int = _NEVER  # when it was renewed, by the last snapshot
    noted_ms: int = _NEVER  # and by the file


class LockRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A lock in the file, where thousands may stand: an array, without names."""

    group: str
    topic: str
    queue_id: int
    owner: str
    renewed_ms: int


class LocksFile(msgspec.Struct, frozen=True):
    """The content of the file."""

    locks: list[LockRow]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LocksFile)


class QueueLocks:
    """Who owns which queue of a group."""

    FILE: ClassVar[str] = "config/penstock-locks.json"

    def __init__(self, settings: Live) -> None:
        self._settings = settings
        self._groups: dict[str, dict[_Queue, _Lock]] = {}
        self._swept_ms = 0
        self._taken = False
        self.dirty = False

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Take or renew; gives those the client owns now."""
        self._sweep(now_ms)
        locks = self._groups.setdefault(group, {})
        most_ms = self._noting_ms()
        owned = []
        for queue in dict.fromkeys(queues):
            key = _Queue(queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is None or self._is_over(lock, now_ms):
                lock = locks[key] = _Lock(client_id, now_ms)
            elif lock.owner != client_id:
                # The clock was set back: a lease must not last until it is there again.
                lock.renewed_ms = min(lock.renewed_ms, now_ms)
                continue
            lock.renewed_ms = now_ms
            if not 0 <= now_ms - lock.taken_ms <= most_ms:
                self.dirty = True
            owned.append(queue)
        if not locks:
            del self._groups[group]
        return owned

    def are_noted(self, group: str, queues: Iterable[MessageQueue]) -> bool:
        """Whether the file knows enough of these locks for their owner to be told."""
        locks, most_ms = self._groups.get(group, {}), self._noting_ms()
        found = (locks.get(_Queue(queue.topic, queue.queue_id)) for queue in queues)
        return all(
            lock is None or 0 <= lock.renewed_ms - lock.noted_ms <= most_ms for lock in found
        )

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> bool:
        """Give back what the client owns of these; whether it owned any."""
        locks = self._groups.get(group, {})
        given_back = False
        for queue in queues:
            key = _Queue(queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is not None and lock.owner == client_id:
                del locks[key]
                self.dirty = given_back = True
                if not locks:
                    del self._groups[group]
        return given_back

    def is_locked(self, group: str, now_ms: int) -> bool:
        """Whether anybody owns any queue of the group."""
        locks = self._groups.get(group, {})
        return any(not self._is_over(lock, now_ms) for lock in locks.values())

    # --- the file

    def load(self, file: ConfigFile, now_ms: int) -> None:
        """Take over the locks of the time before; leases that are over by now are left out."""
        try:
            found = file.load(_parse)
        except StoreDamaged as error:
            log.warning("the owners of queues are forgotten, as if no lock had been: %s", error)
            return
        for row in found.locks if found is not None else ():
            renewed_ms = min(row.renewed_ms + self._noting_ms(), now_ms)
            lock = _Lock(row.owner, renewed_ms, row.renewed_ms, row.renewed_ms)
            if not self._is_over(lock, now_ms):
                locks = self._groups.setdefault(row.group, {})
                locks[_Queue(row.topic, row.queue_id)] = lock

    def snapshot(self) -> bytes:
        self.dirty = False
        self._taken = True
        rows = []
        for group, locks in self._groups.items():
            for (topic, queue_id), lock in locks.items():
                lock.taken_ms = at_ms = lock.renewed_ms
                rows.append(LockRow(group, topic, queue_id, lock.owner, at_ms))
        return _encoder.encode(LocksFile(rows))

    def note(self) -> None:
        """The last snapshot is in the file."""
        if self._taken:
            self._taken = False
            for locks in self._groups.values():
                for lock in locks.values():
                    lock.noted_ms = lock.taken_ms

    def _noting_ms(self) -> int:
        """How far the file may be behind a renewal that was answered."""
        return self._settings.current.broker.lock_lease_ms // 2

    # --- leases

    def _is_over(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self._settings.current.broker.lock_lease_ms

    def _sweep(self, now_ms: int) -> None:
        """Once per lease, forget locks that are over: their owners may never come back."""
        if 0 <= now_ms - self._swept_ms <= self._settings.current.broker.lock_lease_ms:
            return
        self._swept_ms = now_ms
        for group, locks in list(self._groups.items()):
            kept = {queue: lock for queue, lock in locks.items() if not self._is_over(lock, now_ms)}
            if kept:
                self._groups[group] = kept
            else:
                del self._groups[group]


def _parse(data: bytes) -> LocksFile:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BodyError(f"{QueueLocks.FILE} can't be read: {error}") from None
