"""Queue locks for orderly consumption: one owner per group and queue, by a lease.

A consumer owns a queue until it unlocks it or has not renewed the lock for `lock_lease_ms`. The end
of a connection does not release locks: the consumer may reconnect while it still processes a
message, and no other consumer may start before the lease expires. For the same reason locks survive
a restart of the broker: a new owner is written to the journal before it gets its response. A
renewal is written only if the journal is more than half a lease behind. At start a lock therefore
counts as renewed half a lease later than the journal says.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from penstock.broker.consumers.client_groups import CLIENT_ID_MAX
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.lock_journal import LockChange, LockJournal
from penstock.broker.topics import Topics
from penstock.config import LiveSettings
from penstock.errors import InvalidParameter, SystemBusy
from penstock.rpc.answers import Answer, NextIteration, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire.bodies.client_bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
)
from penstock.wire.codes import RequestCode

log = logging.getLogger(__name__)


BODY_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of a request: enough for `QUEUES_MAX` queues with the longest names."""
QUEUES_MAX = 10_000
"""Maximum number of queues in one request: reading it takes about 10 ms."""
STEP_QUEUES = 500
"""Queues that are locked before other clients are served: a lock costs about 2 µs."""
LOCKS_MAX = 200_000
"""Maximum number of locks of all groups: a file begins with all of them."""

_NEVER: Final = -(1 << 62)
_RELEASED: Final = -1  # as `renewed_ms` in the journal
_SWEEP = 100  # expired locks that a request removes in addition to those of its own number

_encoder = msgspec.json.Encoder(order="sorted")


class LockedQueue(NamedTuple):
    """A queue of this broker; the broker name in the request does not matter."""

    topic: str
    queue_id: int


@dataclass(slots=True, eq=False)
class QueueLock:
    group: str
    queue: LockedQueue
    owner: str
    renewed_ms: int
    saved_ms: int = _NEVER  # `renewed_ms` in the journal


class QueueLocks:
    """The owners of queues, by group."""

    def __init__(self, settings: LiveSettings, journal: LockJournal) -> None:
        self._settings = settings
        self._journal = journal
        self._groups: dict[str, dict[LockedQueue, QueueLock]] = {}
        self._by_renewal: OrderedDict[QueueLock, None] = OrderedDict()  # the oldest first
        self._grants_from_ms = 0

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Lock or renew; returns the queues that the client owns now. They are in the journal."""
        queues = list(dict.fromkeys(queues))
        self._remove_expired(len(queues) + _SWEEP, now_ms)
        if not self._may_grant(now_ms):
            return []
        locks = self._groups.get(group, {})
        self._refuse_too_many(locks, queues)
        lag_max_ms = self._save_lag_max_ms()
        owned, unsaved = [], []
        for queue in queues:
            key = LockedQueue(queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is not None and self._is_expired(lock, now_ms):
                self._remove(lock)
                lock = None
            if lock is None:
                lock = self._add(QueueLock(group, key, client_id, now_ms))
                locks = self._groups[group]
            elif lock.owner != client_id:
                # If the clock was set back, a lease must not last until the old time.
                lock.renewed_ms = min(lock.renewed_ms, now_ms)
                continue
            else:
                lock.renewed_ms = now_ms
                self._by_renewal.move_to_end(lock)
            if not 0 <= now_ms - lock.saved_ms <= lag_max_ms:
                unsaved.append(lock)
            owned.append(queue)
        self._save(unsaved, now_ms)
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> bool:
        """Release the queues that the client owns; returns whether it owned any."""
        locks = self._groups.get(group, {})
        released = []
        for queue in queues:
            lock = locks.get(LockedQueue(queue.topic, queue.queue_id))
            if lock is not None and lock.owner == client_id:
                self._remove(lock)
                released.append(lock)
        self._save(released, _RELEASED)
        return bool(released)

    def is_locked(self, group: str, now_ms: int) -> bool:
        """Whether any queue of the group is locked."""
        locks = self._groups.get(group, {})
        return any(not self._is_expired(lock, now_ms) for lock in locks.values())

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set: shift the leases, also in the journal."""
        for lock in self._by_renewal:
            lock.renewed_ms += step_ms
        self._grants_from_ms += step_ms
        self._begin_file()

    # --- the journal

    def load(self, now_ms: int, *, complete: bool) -> None:
        """Load the locks of the last run, without expired leases. Waits for the disk.

        Unless the journal is `complete`, locks may be missing in it. Then no lock is granted until
        all of the last run have expired.
        """
        lines = self._journal.open()
        for line in lines:
            self._grants_from_ms = max(self._grants_from_ms, line.grants_from_ms)
            for change in line.changes:
                self._load(change, now_ms)
        lease_ms = self._settings.current.broker.lock_lease_ms
        self._grants_from_ms = min(self._grants_from_ms, now_ms + lease_ms)
        if not complete:
            self._grants_from_ms = now_ms + lease_ms
            log.warning(
                "the system went down while the broker was running: queues of orderly consumers "
                "are locked again in %d s, when all locks of that time have expired",
                lease_ms // 1000,
            )
        self._begin_file()

    def close(self) -> None:
        """Flush the journal. Waits for the disk."""
        self._journal.close()

    def _load(self, change: LockChange, now_ms: int) -> None:
        for topic, queue_ids in change.queues.items():
            for queue_id in queue_ids:
                key = LockedQueue(topic, queue_id)
                lock = self._groups.get(change.group, {}).get(key)
                if lock is not None:
                    self._remove(lock)
                renewed_ms = min(change.renewed_ms + self._save_lag_max_ms(), now_ms)
                lock = QueueLock(change.group, key, change.owner, renewed_ms, change.renewed_ms)
                if change.renewed_ms != _RELEASED and not self._is_expired(lock, now_ms):
                    self._add(lock)

    def _save(self, locks: list[QueueLock], renewed_ms: int) -> None:
        """Write that these locks of one owner were renewed or released at this time."""
        if not locks:
            return
        if self._journal.is_long and self._begin_file():
            return
        if self._journal.append([_change(locks, renewed_ms)]):
            for lock in locks:
                lock.saved_ms = renewed_ms

    def _begin_file(self) -> bool:
        """Write all locks into a new file."""
        owners: dict[tuple[str, str, int], list[QueueLock]] = {}
        for lock in self._by_renewal:
            owners.setdefault((lock.group, lock.owner, lock.renewed_ms), []).append(lock)
        changes = [_change(locks, renewed_ms) for (_, _, renewed_ms), locks in owners.items()]
        written = self._journal.begin_file(changes, self._grants_from_ms)
        if written:
            for lock in self._by_renewal:
                lock.saved_ms = lock.renewed_ms
        return written

    def _save_lag_max_ms(self) -> int:
        """How far the journal may lag behind a renewal that was confirmed."""
        return self._settings.current.broker.lock_lease_ms // 2

    # --- leases

    def _may_grant(self, now_ms: int) -> bool:
        # If the clock was set back, the wait must not last until the old time.
        lease_ms = self._settings.current.broker.lock_lease_ms
        self._grants_from_ms = min(self._grants_from_ms, now_ms + lease_ms)
        return now_ms > self._grants_from_ms  # at that time a lease is still valid

    def _refuse_too_many(
        self, locks: dict[LockedQueue, QueueLock], queues: list[MessageQueue]
    ) -> None:
        count = len(self._by_renewal)
        if count + len(queues) <= LOCKS_MAX:
            return
        count += sum(LockedQueue(queue.topic, queue.queue_id) not in locks for queue in queues)
        if count > LOCKS_MAX:
            raise SystemBusy.over(
                "queue locks of all groups", figure=count, limit=LOCKS_MAX, unit="locks"
            )

    def _is_expired(self, lock: QueueLock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self._settings.current.broker.lock_lease_ms

    def _add(self, lock: QueueLock) -> QueueLock:
        self._groups.setdefault(lock.group, {})[lock.queue] = lock
        self._by_renewal[lock] = None
        return lock

    def _remove(self, lock: QueueLock) -> None:
        del self._by_renewal[lock]
        locks = self._groups[lock.group]
        del locks[lock.queue]
        if not locks:
            del self._groups[lock.group]

    def _remove_expired(self, most: int, now_ms: int) -> None:
        """Remove up to `most` expired locks: their owners may never return."""
        for _ in range(min(most, len(self._by_renewal))):
            lock = next(iter(self._by_renewal))
            if lock.renewed_ms > now_ms:  # the clock was set back
                lock.renewed_ms = now_ms
                self._by_renewal.move_to_end(lock)
            elif self._is_expired(lock, now_ms):
                self._remove(lock)
            else:
                break


def _change(locks: list[QueueLock], renewed_ms: int) -> LockChange:
    queues: dict[str, list[int]] = {}
    for lock in locks:
        queues.setdefault(lock.queue.topic, []).append(lock.queue.queue_id)
    return LockChange(locks[0].group, locks[0].owner, renewed_ms, queues)


class LockRequests:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    def __init__(self, locks: QueueLocks, groups: Groups, topics: Topics, clients: Clients) -> None:
        self._locks = locks
        self._clients = clients
        self._groups = groups
        self._topics = topics

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.LOCK_BATCH_MQ, self.lock),
            Row(RequestCode.UNLOCK_BATCH_MQ, self.unlock),
        ]

    def lock(self, command: Command) -> Answer:
        """LOCK_BATCH_MQ: lock free queues; the response has the queues that the client owns.

        Queues that do not exist are not locked, so that clients can't fill the memory with locks.
        """
        request = self._read_request(command)
        group, now_ms = request.consumer_group, command.now_ms
        self._groups.find(group, now_ms, command.client)
        owned: list[MessageQueue] = []

        def lock_some(queues: list[MessageQueue]) -> None:
            existing = [queue for queue in queues if self._exists(queue)]
            owned.extend(self._locks.lock(group, request.client_id, existing, now_ms))

        def reply() -> Answer:
            return Reply(body=_encoder.encode(LockBatchResponseBody(lock_ok_mq_set=owned)))

        return _in_steps(list(dict.fromkeys(request.mq_set)), lock_some, reply)

    def unlock(self, command: Command) -> Answer:
        """UNLOCK_BATCH_MQ."""
        request = self._read_request(command)

        def unlock_some(queues: list[MessageQueue]) -> None:
            self._locks.unlock(request.consumer_group, request.client_id, queues)

        return _in_steps(request.mq_set, unlock_some, Reply)

    def _read_request(self, command: Command) -> LockBatchRequestBody:
        request = _read_request(command)
        self._clients.refuse_stranger(request.consumer_group, request.client_id, command.user)
        return request

    def _exists(self, queue: MessageQueue) -> bool:
        config = self._topics.get(queue.topic)
        if config is None:
            return False
        return 0 <= queue.queue_id < max(config.read_queue_nums, config.write_queue_nums)


def _in_steps(
    queues: list[MessageQueue],
    do: Callable[[list[MessageQueue]], None],
    then: Callable[[], Answer],
) -> Answer:
    do(queues[:STEP_QUEUES])
    rest = queues[STEP_QUEUES:]
    return NextIteration(lambda: _in_steps(rest, do, then)) if rest else then()


def _read_request(command: Command) -> LockBatchRequestBody:
    request = command.body_as(LockBatchRequestBody, bytes_max=BODY_BYTES_MAX)
    if not request.consumer_group or not request.client_id:
        raise InvalidParameter("a lock needs consumerGroup and clientId")
    if len(request.client_id) > CLIENT_ID_MAX:
        raise InvalidParameter.over(
            "the clientId is too long",
            figure=len(request.client_id),
            limit=CLIENT_ID_MAX,
            unit="characters",
            hint="choose a shorter instance name",
        )
    if len(request.mq_set) > QUEUES_MAX:
        raise InvalidParameter.over(
            "too many queues in one request",
            figure=len(request.mq_set),
            limit=QUEUES_MAX,
            unit="queues",
            hint="lock them in several requests",
        )
    return request
