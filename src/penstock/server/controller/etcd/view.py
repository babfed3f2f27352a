"""What a controller knows of the keys in etcd: states of broker sets, living replicas.

A watch keeps it up to date, so it is usually a few milliseconds old, and older while the watch is
interrupted. It says where to look: decisions read the keys again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from penstock.controller.broker_set import BrokerSet, LiveReplica, decode_broker_set
from penstock.errors import StoreDamaged
from penstock.server.controller.etcd.keys import Keys
from penstock.server.controller.etcd.messages import KeyValue
from penstock.server.controller.living_replicas import ReplicaKey

log = logging.getLogger(__name__)


class LiveValue(msgspec.Struct, frozen=True):
    """The value of the key of a living replica."""

    epoch: int = 0
    max_offset: int = 0
    confirm_offset: int = 0
    priority: int = LiveReplica().priority
    timeout_ms: int = 0
    """Without a heartbeat for this long it is dead."""
    heard_by: str = ""
    """The controller that wrote this, and its connection to the replica. Another connection writes
    another value, so that the revision of the key tells whether somebody has heard from the replica
    again."""

    @property
    def live(self) -> LiveReplica:
        return LiveReplica(self.epoch, self.max_offset, self.confirm_offset, self.priority)


class LeasedReplica(NamedTuple):
    """The key of a living replica."""

    value: LiveValue
    lease: int
    create_revision: int
    mod_revision: int


class View:
    """The last known keys."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.states: dict[str, tuple[int, BrokerSet]] = {}
        """By broker name, with the revision of the key."""
        self.replicas: dict[ReplicaKey, LeasedReplica] = {}
        self.gone: asyncio.Queue[ReplicaKey] = asyncio.Queue()
        """Living replicas whose key was deleted while the watch was not interrupted."""
        self.interruptions = 0
        """How often changes may have been missed, or came late."""
        self.revision = 0
        """All changes up to this revision are here."""
        self.own_ticks: dict[bytes, int] = {}
        """The last revision of each controller's own key."""

    def reset(self, found: Iterable[KeyValue], revision: int) -> None:
        """Replace everything by what there is at a revision."""
        self.interruptions += 1
        self.states, self.replicas, self.own_ticks = {}, {}, {}
        self.revision = revision
        for kv in found:
            self._take(kv)

    def changed(self, kv: KeyValue) -> None:
        """The watch reports that a key was written."""
        self.revision = max(self.revision, kv.mod_revision)
        self._take(kv)

    def deleted(self, kv: KeyValue, *, late: bool = False) -> None:
        """The watch reports that a key was deleted; `late`: it was interrupted then."""
        self.revision = max(self.revision, kv.mod_revision)
        name = self._keys.set_of(kv.key)
        if name is not None:
            self.forget_state(name, kv.mod_revision)
            return
        replica = self._keys.replica_of(kv.key)
        if replica is not None:
            found = self.replicas.get(replica)
            if found is not None and found.mod_revision < kv.mod_revision:
                self.forget(replica, late=late)
        else:
            self.own_ticks.pop(kv.key, None)

    def learn(self, kv: KeyValue) -> None:
        """This controller has read or written a key; the watch may report it later."""
        if kv.mod_revision > self.revision:
            self._take(kv)

    def forget_state(self, name: str, revision: int) -> None:
        """A state was deleted at this revision."""
        known = self.states.get(name)
        if known is not None and known[0] < revision:
            del self.states[name]

    def forget(self, replica: ReplicaKey, *, late: bool = False) -> None:
        """The key of a replica is gone."""
        if self.replicas.pop(replica, None) is not None and not late:
            self.gone.put_nowait(replica)

    def _take(self, kv: KeyValue) -> None:
        name = self._keys.set_of(kv.key)
        if name is not None:
            known = self.states.get(name)
            if known is None or known[0] < kv.mod_revision:
                self._take_state(name, kv)
            return
        replica = self._keys.replica_of(kv.key)
        if replica is None:
            self.own_ticks[kv.key] = kv.mod_revision
            return
        found = self.replicas.get(replica)
        if found is None or found.mod_revision < kv.mod_revision:
            self.replicas[replica] = leased_replica(kv)

    def _take_state(self, name: str, kv: KeyValue) -> None:
        try:
            self.states[name] = kv.mod_revision, decode_broker_set(kv.value)
        except StoreDamaged as error:  # the others must be served
            log.error("the state of %s in etcd can't be used: %s", name, error)


def leased_replica(kv: KeyValue) -> LeasedReplica:
    """What a key of a living replica says; a damaged value counts as alive."""
    try:
        value = msgspec.json.decode(kv.value, type=LiveValue)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = LiveValue()
    return LeasedReplica(value, kv.lease, kv.create_revision, kv.mod_revision)
