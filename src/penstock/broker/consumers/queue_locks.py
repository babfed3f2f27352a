"""Queue locks for orderly consumption: one owner per group and queue, by a lease.

A consumer owns a queue until it unlocks it or has not renewed the lock for `lock_lease_ms`. The end
of a connection does not release locks: the consumer may reconnect while it still processes a
message, and no other consumer may start before the lease expires. For the same reason locks survive
a restart of the broker: they are saved in a file, and a new owner gets its response only after the
save (`are_saved`). A renewal waits for a save only if the file is more than half a lease behind. At
start a lock therefore counts as renewed half a lease later than the file says.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import msgspec

from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.groups import Groups
from penstock.broker.topics import Topics
from penstock.config import LiveSettings
from penstock.errors import BodyError, InvalidParameter, StoreDamaged
from penstock.rpc.answers import Answer, EffectQueue, InThread, PersistSoon, PersistTable, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
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
"""Maximum number of queues in one request: a lock costs about 2 µs."""
CLIENT_ID_MAX = 1_024
"""Maximum length of a client id in characters: the file has one for every lock."""

_NEVER: Final = -(1 << 62)


class LockedQueue(NamedTuple):
    """A queue of this broker; the broker name in the request does not matter."""

    topic: str
    queue_id: int


@dataclass(slots=True)
class QueueLock:
    owner: str
    renewed_ms: int
    snapshot_ms: int = _NEVER  # `renewed_ms` in the last snapshot
    saved_ms: int = _NEVER  # `renewed_ms` in the file


class LockRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A lock in the file: an array without names, because there may be thousands."""

    group: str
    topic: str
    queue_id: int
    owner: str
    renewed_ms: int


class LocksFile(msgspec.Struct, frozen=True):
    """Content of config/penstock-locks.json."""

    locks: list[LockRow]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LocksFile)


class QueueLocks:
    """The owners of queues, by group."""

    FILE: ClassVar[str] = "config/penstock-locks.json"

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._groups: dict[str, dict[LockedQueue, QueueLock]] = {}
        self._cleaned_ms = 0
        self._snapshot_taken = False
        self.dirty = False

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int
    ) -> list[MessageQueue]:
        """Lock or renew; returns the queues that the client owns now."""
        self._remove_expired(now_ms)
        locks = self._groups.setdefault(group, {})
        lag_max_ms = self._save_lag_max_ms()
        owned = []
        for queue in dict.fromkeys(queues):
            key = LockedQueue(queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is None or self._is_expired(lock, now_ms):
                lock = locks[key] = QueueLock(client_id, now_ms)
            elif lock.owner != client_id:
                # If the clock was set back, a lease must not last until the old time.
                lock.renewed_ms = min(lock.renewed_ms, now_ms)
                continue
            lock.renewed_ms = now_ms
            if not 0 <= now_ms - lock.snapshot_ms <= lag_max_ms:
                self.dirty = True
            owned.append(queue)
        if not locks:
            del self._groups[group]
        return owned

    def are_saved(self, group: str, queues: Iterable[MessageQueue]) -> bool:
        """Whether the file is recent enough to confirm these locks to their owner."""
        locks, lag_max_ms = self._groups.get(group, {}), self._save_lag_max_ms()
        found = (locks.get(LockedQueue(queue.topic, queue.queue_id)) for queue in queues)
        return all(
            lock is None or 0 <= lock.renewed_ms - lock.saved_ms <= lag_max_ms for lock in found
        )

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> bool:
        """Release the queues that the client owns; returns whether it owned any."""
        locks = self._groups.get(group, {})
        released = False
        for queue in queues:
            key = LockedQueue(queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is not None and lock.owner == client_id:
                del locks[key]
                self.dirty = released = True
                if not locks:
                    del self._groups[group]
        return released

    def is_locked(self, group: str, now_ms: int) -> bool:
        """Whether any queue of the group is locked."""
        locks = self._groups.get(group, {})
        return any(not self._is_expired(lock, now_ms) for lock in locks.values())

    # --- the file

    def load(self, file: ConfigFile, now_ms: int) -> None:
        """Load the locks of the last run, without expired leases."""
        try:
            found = file.load(_parse)
        except StoreDamaged as error:
            log.warning("can't read the queue locks of the last run, all are released: %s", error)
            return
        for row in found.locks if found is not None else ():
            renewed_ms = min(row.renewed_ms + self._save_lag_max_ms(), now_ms)
            lock = QueueLock(row.owner, renewed_ms, row.renewed_ms, row.renewed_ms)
            if not self._is_expired(lock, now_ms):
                locks = self._groups.setdefault(row.group, {})
                locks[LockedQueue(row.topic, row.queue_id)] = lock

    def snapshot(self) -> bytes:
        self.dirty = False
        self._snapshot_taken = True
        rows = []
        for group, locks in self._groups.items():
            for (topic, queue_id), lock in locks.items():
                lock.snapshot_ms = at_ms = lock.renewed_ms
                rows.append(LockRow(group, topic, queue_id, lock.owner, at_ms))
        return _encoder.encode(LocksFile(rows))

    def mark_saved(self) -> None:
        """Record that the last snapshot is in the file."""
        if self._snapshot_taken:
            self._snapshot_taken = False
            for locks in self._groups.values():
                for lock in locks.values():
                    lock.saved_ms = lock.snapshot_ms

    def _save_lag_max_ms(self) -> int:
        """How far the file may lag behind a renewal that was confirmed."""
        return self._settings.current.broker.lock_lease_ms // 2

    # --- leases

    def _is_expired(self, lock: QueueLock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self._settings.current.broker.lock_lease_ms

    def _remove_expired(self, now_ms: int) -> None:
        """Remove expired locks once per lease: their owners may never return."""
        if 0 <= now_ms - self._cleaned_ms <= self._settings.current.broker.lock_lease_ms:
            return
        self._cleaned_ms = now_ms
        for group, locks in list(self._groups.items()):
            kept = {
                queue: lock for queue, lock in locks.items() if not self._is_expired(lock, now_ms)
            }
            if kept:
                self._groups[group] = kept
            else:
                del self._groups[group]


class LockRequests:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    def __init__(
        self,
        locks: QueueLocks,
        groups: Groups,
        topics: Topics,
        clients: Clients,
        effects: EffectQueue,
    ) -> None:
        self._locks = locks
        self._clients = clients
        self._groups = groups
        self._topics = topics
        self._effects = effects

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.LOCK_BATCH_MQ, self.lock),
            Row(RequestCode.UNLOCK_BATCH_MQ, self.unlock),
        ]

    def lock(self, command: Command) -> Answer:
        """LOCK_BATCH_MQ: lock free queues; the response has the queues that the client owns.

        It is sent when the owners are saved, so that a restart gives no queue to another client.
        Queues that do not exist are not locked, so that clients can't fill the memory with locks.
        """
        request = self._read_request(command)
        self._groups.find(request.consumer_group, command.now_ms)
        queues = [queue for queue in request.mq_set if self._exists(queue)]
        locks = self._locks
        owned = locks.lock(request.consumer_group, request.client_id, queues, command.now_ms)
        body = LockBatchResponseBody(lock_ok_mq_set=owned)
        # In the thread pool: the encoding of 10,000 queues takes 60 ms.
        answer = InThread(lambda: fastjson.encode(body), lambda data: Reply(body=data))
        if locks.are_saved(request.consumer_group, owned):
            return answer

        def mark_saved_and_reply(written: bool) -> Answer:
            if written:
                locks.mark_saved()
            # A failing disk must not keep consumers from reading.
            return answer

        return PersistTable(locks, mark_saved_and_reply)

    def unlock(self, command: Command) -> Answer:
        """UNLOCK_BATCH_MQ."""
        request = self._read_request(command)
        locks = self._locks
        if locks.unlock(request.consumer_group, request.client_id, request.mq_set):
            self._effects.put(PersistSoon(locks))
        return Reply()

    def _read_request(self, command: Command) -> LockBatchRequestBody:
        request = _read_request(command)
        self._clients.refuse_stranger(request.consumer_group, request.client_id, command.user)
        return request

    def _exists(self, queue: MessageQueue) -> bool:
        config = self._topics.get(queue.topic)
        if config is None:
            return False
        return 0 <= queue.queue_id < max(config.read_queue_nums, config.write_queue_nums)


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


def _parse(data: bytes) -> LocksFile:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BodyError(f"{QueueLocks.FILE} can't be read: {error}") from None
