"""Living replicas in etcd: one key with a lease for each.

A controller that gets heartbeats of a replica keeps its lease alive, whichever controller has
created it. Renewals of many leases go in one request. The key is written again

- when the epoch or the priority of the replica changes,
- when it has connected again: the revision of the key then tells other controllers that somebody
  has heard from it,
- at a low rate while its offsets change; the controllers that get its heartbeats know them anyway.

A key is created only with a new lease. So a controller may delete a key and leave the lease alone:
nobody uses it again, and it expires.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from penstock.clock import Clock, pause
from penstock.controller.broker_set import Heartbeat, LiveReplica
from penstock.errors import EtcdError, EtcdRefused
from penstock.server.controller.etcd.client import FAILED_PRECONDITION, EtcdClient, parse
from penstock.server.controller.etcd.keys import Keys
from penstock.server.controller.etcd.messages import (
    KeepAliveLine,
    KeyValue,
    LeaseAnswer,
    Message,
    PutAnswer,
    RangeAnswer,
    TxnAnswer,
    create_revision_is,
    delete,
    encode_text,
    get,
    mod_revision_is,
    prefix_request,
    put,
)
from penstock.server.controller.etcd.view import LeasedReplica, LiveValue, View, leased_replica
from penstock.server.controller.etcd.watch import LEASE_MAX
from penstock.server.controller.living_replicas import ReplicaKey

log = logging.getLogger(__name__)

TTL_S_MIN: Final = 2
"""etcd has no shorter leases with its default settings."""
WINDOW_MS: Final = 50
"""How long a renewal or a write waits for others, to be sent with them."""
RENEWALS_MAX: Final = 18
"""In one request. The gateway reads the first 512 bytes of a body; when the first renewal is
answered, Go's HTTP server discards what has not been read by then."""
WRITES_MAX: Final = 100
"""In one transaction; etcd allows 128."""
OFFSETS_MS: Final = 60_000
"""How often the key is written because of offsets."""
CREATIONS_MAX: Final = 16
"""Keys that are created at a time."""


_Item = TypeVar("_Item")
_Write = tuple[ReplicaKey, tuple[LeasedReplica, LiveValue]]
"""What was known of a key, and its new value."""


@dataclass(slots=True)
class _Upkeep:
    """What this controller has done for a replica."""

    client: int = 0
    """The connection for which the key was written last."""
    renewed_ms: int = 0
    written_ms: int = 0
    creating: bool = False


class Leases:
    """Keeps the keys of living replicas; also a `SharedLiveness`. `run` is a task."""

    def __init__(
        self, client: EtcdClient, keys: Keys, view: View, clock: Clock, *, address: str
    ) -> None:
        """`address` of this controller is a part of the values."""
        self._client = client
        self._keys = keys
        self._view = view
        self._clock = clock
        self._address = address
        self._upkeeps: dict[ReplicaKey, _Upkeep] = {}
        self._renewals: dict[int, ReplicaKey] = {}
        """Leases that are to be renewed."""
        self._writes: dict[ReplicaKey, tuple[LeasedReplica, LiveValue]] = {}
        """Values that are to be written."""
        self._wanted = asyncio.Event()
        self._creations = asyncio.Semaphore(CREATIONS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """A replica is alive."""
        key = ReplicaKey(heartbeat.name, heartbeat.replica_id)
        state = self._view.states.get(key.name)
        if state is None or key.replica_id not in state[1].replicas:
            return  # anybody may send heartbeats
        upkeep = self._upkeeps.get(key)
        if upkeep is None:
            upkeep = self._upkeeps[key] = _Upkeep()
        if upkeep.creating:
            return
        known = self._view.replicas.get(key)
        if known is None:
            self._create_soon(key, heartbeat, upkeep)
            return
        now_ms = self._clock.monotonic_ms()
        if self._is_news(heartbeat, known, upkeep, now_ms):
            upkeep.client, upkeep.written_ms = heartbeat.client, now_ms
            self._writes[key] = known, self._value(heartbeat)
            self._wanted.set()
        if now_ms - upkeep.renewed_ms >= _ttl_s(heartbeat.timeout_ms) * 1000 // 3:
            upkeep.renewed_ms = now_ms
            self._renewals[known.lease] = key
            self._wanted.set()

    def forget_upkeep(self, key: ReplicaKey) -> None:
        """This controller gets no heartbeats of a replica any more."""
        self._upkeeps.pop(key, None)

    async def of(self, name: str) -> dict[int, LiveReplica]:
        """The living replicas of a broker set; a linearizable read."""
        request = prefix_request(self._keys.living(name))
        answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        found = {}
        for kv in answer.kvs:
            self._view.learn(kv)
            key = self._keys.replica_of(kv.key)
            if key is not None:
                found[key.replica_id] = leased_replica(kv).value.live
        return found

    async def revision(self, key: ReplicaKey) -> int:
        request = {"key": encode_text(self._keys.replica(key))}
        answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        return answer.kvs[0].mod_revision if answer.kvs else 0

    async def forget(self, key: ReplicaKey, revision: int) -> bool:
        name = self._keys.replica(key)
        message = {
            "compare": [mod_revision_is(name, revision)],
            "success": [delete(name)] if revision else [],
            "failure": [get(name)],
        }
        answer = await self._client.call("/v3/kv/txn", message, TxnAnswer)
        # If the key is gone, its lease has expired, or the answer to an attempt was lost.
        if not answer.succeeded and answer.ranges()[0].kvs:
            return False
        self._view.forget(key)
        return True

    async def run(self) -> None:
        """Renew leases and write values until cancelled."""
        while True:
            await self._wanted.wait()
            await pause(self._clock, WINDOW_MS)
            self._wanted.clear()
            renewals, self._renewals = self._renewals, {}
            writes, self._writes = self._writes, {}
            results = await asyncio.gather(
                *(self._renew(part) for part in _parts(list(renewals.items()), RENEWALS_MAX)),
                *(self._write(part) for part in _parts(list(writes.items()), WRITES_MAX)),
                return_exceptions=True,
            )
            for error in results:
                if isinstance(error, EtcdError):
                    log.warning("can't keep replicas alive in etcd: %s", error)
                elif isinstance(error, BaseException):
                    raise error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- keys

    def _is_news(
        self, heartbeat: Heartbeat, known: LeasedReplica, upkeep: _Upkeep, now_ms: int
    ) -> bool:
        value, live = known.value, heartbeat.live
        if upkeep.client != heartbeat.client:
            return True
        if (value.epoch, value.priority) != (live.epoch, live.priority):
            return now_ms - upkeep.written_ms >= WINDOW_MS  # perhaps it is being written
        moved = (value.max_offset, value.confirm_offset) != (live.max_offset, live.confirm_offset)
        return moved and now_ms - upkeep.written_ms >= OFFSETS_MS

    def _value(self, heartbeat: Heartbeat) -> LiveValue:
        live = heartbeat.live
        return LiveValue(
            epoch=live.epoch,
            max_offset=live.max_offset,
            confirm_offset=live.confirm_offset,
            priority=live.priority,
            timeout_ms=heartbeat.timeout_ms,
            heard_by=f"{self._address} {heartbeat.client}",
        )

    def _create_soon(self, key: ReplicaKey, heartbeat: Heartbeat, upkeep: _Upkeep) -> None:
        upkeep.creating = True
        task = asyncio.ensure_future(self._create(key, heartbeat, upkeep))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _create(self, key: ReplicaKey, heartbeat: Heartbeat, upkeep: _Upkeep) -> None:
        try:
            async with self._creations:
                await self._create_key(key, heartbeat)
            upkeep.client = heartbeat.client
            upkeep.renewed_ms = upkeep.written_ms = self._clock.monotonic_ms()
        except EtcdError as error:
            log.warning("can't tell other controllers that %s is alive: %s", key, error)
        finally:
            upkeep.creating = False

    async def _create_key(self, key: ReplicaKey, heartbeat: Heartbeat) -> None:
        lease = secrets.randbelow(LEASE_MAX) + 1
        await self._grant(lease, _ttl_s(heartbeat.timeout_ms))
        name, value = self._keys.replica(key), msgspec.json.encode(self._value(heartbeat))
        message = {
            "compare": [create_revision_is(name, 0)],
            "success": [put(name, value, lease)],
            "failure": [get(name)],
        }
        answer = await self._client.call("/v3/kv/txn", message, TxnAnswer)
        revision = answer.header.revision
        if answer.succeeded:
            self._view.learn(KeyValue(name, value, revision, revision, lease))
            return
        for kv in answer.ranges()[0].kvs:
            self._view.learn(kv)
            if kv.lease == lease:
                return  # the answer to the first attempt was lost
        await self._client.call("/v3/lease/revoke", {"ID": str(lease)}, PutAnswer)

    async def _grant(self, lease: int, ttl_s: int) -> None:
        message = {"ID": str(lease), "TTL": str(ttl_s)}
        try:
            await self._client.call("/v3/lease/grant", message, LeaseAnswer)
        except EtcdRefused as error:
            # It exists already: the answer to the first attempt was lost.
            if error.grpc_code != FAILED_PRECONDITION:
                raise

    async def _write(self, part: Sequence[_Write]) -> None:
        """Write values, each if its key is still the one that was known."""
        wanted = [
            KeyValue(
                self._keys.replica(key),
                msgspec.json.encode(value),
                known.create_revision,
                lease=known.lease,
            )
            for key, (known, value) in part
        ]
        message = {"success": [_write_if_same(kv) for kv in wanted]}
        written: set[ReplicaKey] = set()
        try:
            answer = await self._client.call("/v3/kv/txn", message, TxnAnswer)
            revision = answer.header.revision
            for (key, _), kv, done in zip(part, wanted, answer.responses, strict=False):
                if done.response_txn is not None and done.response_txn.succeeded:
                    written.add(key)
                    self._view.learn(msgspec.structs.replace(kv, mod_revision=revision))
        finally:
            for key, _ in part:
                if key not in written and (upkeep := self._upkeeps.get(key)) is not None:
                    upkeep.client = 0  # the next heartbeat writes it

    async def _renew(self, part: Sequence[tuple[int, ReplicaKey]]) -> None:
        """Renew leases; forget the keys of those that have expired."""
        body = b"".join(b'{"ID":"%d"}' % lease for lease, _ in part)
        left = dict(part)
        for lease in await self._client.exchange("/v3/lease/keepalive", body, _leases):
            key = left.pop(lease.id, None)
            if key is None or lease.ttl_s > 0:
                continue
            known = self._view.replicas.get(key)
            if known is not None and known.lease == lease.id:
                self._view.forget(key)
        if left:  # the gateway did not read them
            self._renewals.update(left)
            self._wanted.set()


def _write_if_same(kv: KeyValue) -> Message:
    """Write a value, as a part of a transaction, if its key has not been created again."""
    inner = {
        "compare": [create_revision_is(kv.key, kv.create_revision)],
        "success": [put(kv.key, kv.value, kv.lease)],
    }
    return {"request_txn": inner}


def _ttl_s(timeout_ms: int) -> int:
    """The time of a lease for a replica with this timeout. A lease is renewed a little after a
    heartbeat, and etcd removes it up to a second late."""
    return max(timeout_ms // 1000 - 1, TTL_S_MIN)


def _leases(body: bytes) -> list[LeaseAnswer]:
    lines = (parse(line, KeepAliveLine).result for line in body.splitlines() if line.strip())
    return [lease for lease in lines if lease is not None]


def _parts(items: Sequence[_Item], size: int) -> Iterable[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
