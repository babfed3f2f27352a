"""The state of one broker set, which the controllers keep under its broker name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from penstock.errors import StoreDamaged
from penstock.rpc.answers import ClientId

FIRST_ID = 1
"""The id of the first replica. Brokers tell a controller other ids than the NameServers: there the
master has the id 0."""
HEARTBEAT_MS = 10_000
"""A broker without a heartbeat for this long is dead, unless its heartbeats say otherwise."""
REPLICAS_MAX = 128
"""Replicas of a broker set."""
HISTORY_MAX = 20
"""Elections that are kept."""


class ReplicaRecord(msgspec.Struct, frozen=True):
    """A replica that has an id."""

    address: str
    check_code: str
    """What the broker said when it was given the id; it repeats that if the response was lost."""


class ElectionRecord(msgspec.Struct, frozen=True):
    """Who became the master, when and why."""

    epoch: int
    master_id: int | None
    """None if no replica could be elected: there is no master since then."""
    time_ms: int
    reason: str


class BrokerSet(msgspec.Struct, frozen=True, omit_defaults=True):
    """The replicas of one broker name, the master and the in-sync set."""

    cluster: str
    name: str
    replicas: Mapping[int, ReplicaRecord]
    next_id: int
    """The id for the next new replica; ids are never used again."""
    master_id: int | None = None
    master_epoch: int = 0
    in_sync: tuple[int, ...] = ()
    """Ids of the replicas that have every acknowledged message, sorted; the master among them.
    Without a master: those that may become it."""
    in_sync_epoch: int = 0
    master_incomplete: bool = False
    """The master was elected although the end of its log may be missing."""
    before: tuple[int, ...] = ()
    """The in-sync set before the election of a master that has not taken over yet. That one has
    acknowledged nothing so far: each of these can be elected instead."""
    history: tuple[ElectionRecord, ...] = ()
    """The last elections, the newest at the end."""
    writes: tuple[str, ...] = ()
    """The last write of each controller, by which a store finds a write whose answer was lost."""

    @property
    def master_address(self) -> str | None:
        replica = None if self.master_id is None else self.replicas.get(self.master_id)
        return None if replica is None else replica.address

    @property
    def never_elected(self) -> bool:
        return self.master_epoch == 0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def decode_broker_set(data: bytes) -> BrokerSet:
    """The opposite of `encode`; StoreDamaged if it is something else."""
    try:
        return msgspec.json.decode(data, type=BrokerSet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(f"the state of a broker set can't be read: {error}") from None


class LiveReplica(NamedTuple):
    """What a replica said in its last heartbeat."""

    epoch: int = 0
    """The last epoch of its log."""
    max_offset: int = 0
    confirm_offset: int = 0
    priority: int = 2**31 - 1
    """Smaller is better."""
    complete: bool = True
    """Nothing that it has acknowledged can be missing in its log."""
    takes_over: bool = False
    """When it is elected, it asks for its in-sync set before it acknowledges messages."""
    presumed: bool = False
    """Nothing was heard of it: the controller has started a moment ago. So nobody is elected in its
    place, but nothing is known of its log either."""
    changing: bool = False
    """No log of the set is complete, and what is known of them may be out of date."""


Living = Mapping[int, LiveReplica]
"""The replicas of one broker set that are alive, by id."""


class Heartbeat(NamedTuple):
    """A heartbeat of a replica."""

    name: str
    replica_id: int
    address: str
    """Where others reach the replica."""
    live: LiveReplica
    timeout_ms: int
    """Without another heartbeat for this long, the replica is dead."""
    client: ClientId
    """The connection that carried it."""
