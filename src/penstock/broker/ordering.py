"""Queue locks for ordered consumption: one owner per (group, queue), by a lease.

A consumer owns a queue from the moment it locks it until it unlocks it or has not renewed the lock
for `lock_lease_ms`. The end of its connection changes nothing: it may come back and still be in
the middle of a message, and nobody else must begin before its lease is over.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.config import Live
from penstock.wire.bodies import MessageQueue


@dataclass(slots=True)
class _Lock:
    owner: str
    renewed_ms: int


class QueueLocks:
    """Who owns which queue of a group."""

    def __init__(self, settings: Live) -> None:
        self._settings = settings
        self._groups: dict[str, dict[MessageQueue, _Lock]] = {}
        self._swept_ms = 0

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Take or renew; gives those the client owns now."""
        self._sweep(now_ms)
        locks = self._groups.setdefault(group, {})
        owned = []
        for queue in dict.fromkeys(queues):
            lock = locks.get(queue)
            if lock is None or self._is_over(lock, now_ms):
                locks[queue] = _Lock(client_id, now_ms)
            elif lock.owner == client_id:
                lock.renewed_ms = now_ms
            else:
                continue
            owned.append(queue)
        if not locks:
            del self._groups[group]
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give back what the client owns of these."""
        locks = self._groups.get(group, {})
        for queue in queues:
            lock = locks.get(queue)
            if lock is not None and lock.owner == client_id:
                del locks[queue]
                if not locks:
                    del self._groups[group]

    def is_locked(self, group: str, now_ms: int) -> bool:
        """Whether anybody owns any queue of the group."""
        locks = self._groups.get(group, {})
        return any(not self._is_over(lock, now_ms) for lock in locks.values())

    def _is_over(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self._settings.current.broker.lock_lease_ms

    def _sweep(self, now_ms: int) -> None:
        """Once per lease, forget locks that are over: their owners may never come back."""
        if now_ms - self._swept_ms <= self._settings.current.broker.lock_lease_ms:
            return
        self._swept_ms = now_ms
        for group, locks in list(self._groups.items()):
            kept = {queue: lock for queue, lock in locks.items() if not self._is_over(lock, now_ms)}
            if kept:
                self._groups[group] = kept
            else:
                del self._groups[group]
