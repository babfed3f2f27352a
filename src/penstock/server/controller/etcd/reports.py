"""Living replicas in etcd: each controller reports those from which it gets heartbeats.

A report is a key with the lease of its controller. So a controller at rest writes nothing, however
many replicas it hears from, and renews one lease; one lease per replica would be thousands of
renewals per second in a large cluster. A report is written

- when a replica is heard for the first time, or on a new connection: the revision of the key then
  tells other controllers that somebody has heard from it,
- when its epoch, its priority or the completeness of its log changes, or its offsets while the log
  is incomplete,
- at a low rate while its offsets change; the controllers that get its heartbeats know them anyway.

It is deleted when no heartbeat has arrived in time. A controller that finds that the process of a
replica has ended deletes all reports about it, unless one was written meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from penstock.clock import Clock, pause
from penstock.controller.broker_set import Heartbeat, LiveReplica
from penstock.errors import EtcdError
from penstock.server.controller.etcd.controller_lease import ControllerLease
from penstock.server.controller.etcd.etcd_client import EtcdClient
from penstock.server.controller.etcd.etcd_keys import Keys, ReportKey
from penstock.server.controller.etcd.etcd_messages import (
    KeyValue,
    Message,
    RangeAnswer,
    TxnAnswer,
    delete,
    delete_prefix,
    get_prefix,
    no_change_since,
    prefix_request,
    put,
)
from penstock.server.controller.etcd.view import LiveValue, View, live_value
from penstock.server.controller.living_replicas import ReplicaKey

log = logging.getLogger(__name__)

WINDOW_MS: Final = 20
"""How long a write waits for others, to be sent with them."""
WRITES_MAX: Final = 100
"""In one transaction; etcd allows 128."""
OFFSETS_MS: Final = 60_000
"""How often a report is written because of offsets."""
RETRY_MS: Final = 1_000
"""Until the next attempt after a failure."""

_Change = tuple[ReplicaKey, LiveValue | None]


class Reports:
    """The reports of this controller; also a `SharedLiveness`. `run` is a task."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        view: View,
        lease: ControllerLease,
        clock: Clock,
        *,
        own: int,
    ) -> None:
        """`own` is the number of this controller."""
        self._client = client
        self._keys = keys
        self._view = view
        self._lease = lease
        self._clock = clock
        self._own = own
        self._changes: dict[ReplicaKey, LiveValue | None] = {}
        """Reports that are to be written, or deleted if None."""
        self._writing: set[ReplicaKey] = set()
        self._written_ms: dict[ReplicaKey, int] = {}
        self._wanted = asyncio.Event()
        self._reported_with = 0
        """The lease of the reports."""

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """A replica is alive."""
        if self._lease.id != self._reported_with:  # the reports are gone with the old lease
            self._reported_with = self._lease.id
            self._view.own_reports.clear()
        key = ReplicaKey(heartbeat.name, heartbeat.replica_id)
        if key in self._changes or key in self._writing:
            return  # the next heartbeat is soon enough
        state = self._view.states.get(key.name)
        if state is None or key.replica_id not in state[1].replicas:
            return  # anybody may send heartbeats
        if self._is_news(key, heartbeat):
            live = heartbeat.live
            self._changes[key] = LiveValue.of(live, heartbeat.client)
            self._wanted.set()

    def lost(self, key: ReplicaKey) -> None:
        """This controller gets no heartbeats of a replica any more."""
        self._changes[key] = None
        self._written_ms.pop(key, None)
        self._wanted.set()

    async def of(self, name: str) -> dict[int, LiveReplica]:
        """The replicas of a broker set that other controllers report; a linearizable read."""
        request = prefix_request(self._keys.living(name))
        answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        found: dict[int, LiveReplica] = {}
        for kv in sorted(answer.kvs, key=lambda kv: kv.mod_revision):
            self._view.learn(kv)
            key = self._keys.report_of(kv.key)
            if key is not None and key.controller != self._own:
                found[key.replica.replica_id] = live_value(kv).live
        return found

    async def revision(self, key: ReplicaKey) -> int:
        request = {**prefix_request(self._keys.replica(key)), "count_only": True}
        answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        return answer.header.revision

    async def forget(self, key: ReplicaKey, revision: int) -> bool:
        prefix = self._keys.replica(key)
        message = {
            "compare": [no_change_since(prefix, revision)],
            "success": [delete_prefix(prefix)],
            "failure": [get_prefix(prefix)],
        }
        answer = await self._client.call("/v3/kv/txn", message, TxnAnswer)
        if not answer.succeeded:
            return False
        self._view.forget_replica(key, answer.header.revision + 1)
        self._written_ms.pop(key, None)
        return True

    async def run(self) -> None:
        """Write and delete reports until cancelled."""
        while True:
            await self._wanted.wait()
            await pause(self._clock, WINDOW_MS)
            self._wanted.clear()
            changes, self._changes = list(self._changes.items()), {}
            self._writing = {key for key, _ in changes}
            try:
                for part in _parts(changes):
                    await self._write(part)
            except EtcdError as error:
                log.warning("can't report replicas in etcd: %s", error)
                # Heartbeats write again what is alive. What was lost meanwhile stays lost.
                for key, value in changes:
                    if value is None:
                        self._changes.setdefault(key, None)
                if self._changes:
                    self._wanted.set()
                await pause(self._clock, RETRY_MS)
            finally:
                self._writing = set()

    def _is_news(self, key: ReplicaKey, heartbeat: Heartbeat) -> bool:
        report = self._view.own_reports.get(key)
        if report is None or report.value.connection != heartbeat.client:
            return True
        value, live = report.value, heartbeat.live
        if value.live._replace(max_offset=0, confirm_offset=0) != live._replace(
            max_offset=0, confirm_offset=0
        ):
            return True
        if (value.max_offset, value.confirm_offset) == (live.max_offset, live.confirm_offset):
            return False
        if not live.complete:  # such a replica may be elected because of them
            return True
        age_ms = self._clock.monotonic_ms() - self._written_ms.get(key, 0)
        return age_ms >= OFFSETS_MS

    async def _write(self, part: Sequence[_Change]) -> None:
        lease = self._lease.id
        if not lease:
            raise EtcdError("this controller has no lease")
        steps: list[Message] = []
        written: list[KeyValue] = []
        for key, value in part:
            name = self._keys.report(key, self._own)
            if value is None:
                steps.append(delete(name))
            else:
                data = msgspec.json.encode(value)
                steps.append(put(name, data, lease))
                written.append(KeyValue(name, data, lease=lease))
        answer = await self._client.call("/v3/kv/txn", {"success": steps}, TxnAnswer)
        now_ms, revision = self._clock.monotonic_ms(), answer.header.revision
        for kv in written:
            self._view.learn(msgspec.structs.replace(kv, mod_revision=revision))
        for key, value in part:
            if value is None:
                self._view.forget_report(ReportKey(key, self._own), revision)
            else:
                self._written_ms[key] = now_ms


def _parts(changes: Sequence[_Change]) -> Iterable[Sequence[_Change]]:
    return (changes[start : start + WRITES_MAX] for start in range(0, len(changes), WRITES_MAX))
