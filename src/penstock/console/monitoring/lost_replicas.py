"""Replicas that are not registered with the NameServers any more, and what is still known of them.

Controllers know all replicas of a broker. Without controllers, the console's memory of the last
hour has to do: a broker whose name and id were registered, and are not any more.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.client.admin.admin_values import BrokerAddress, BrokerState
from penstock.client.admin.async_admin import ElectionHistory, ReplicaStatus

REMEMBER_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class SeenReplica:
    """The last answer of a broker."""

    at_ms: int
    state: BrokerState
    status: ReplicaStatus | None


@dataclass(frozen=True, slots=True)
class LostReplica:
    """A replica that is not registered. An unknown value is None."""

    cluster: str
    name: str
    id: int | None
    """By which the controllers know it; None if only the console remembers it."""
    address: str
    is_alive: bool | None = None
    """Whether it still sends heartbeats to the controllers."""
    in_sync: bool | None = None
    """Whether the controllers count it as in sync: a master may be elected from those only."""
    seen: SeenReplica | None = None


def remember(
    seen: Mapping[str, SeenReplica],
    brokers: Iterable[BrokerState],
    replicas: Iterable[ReplicaStatus],
    now_ms: int,
) -> dict[str, SeenReplica]:
    """The last answer of each broker of the last hour, by address."""
    statuses = {one.broker: one for one in replicas if one.problem is None}
    kept = {address: one for address, one in seen.items() if now_ms - one.at_ms < REMEMBER_MS}
    for state in brokers:
        if state.problem is None:
            address = state.broker.address
            old = kept.get(address)
            status = statuses.get(state.broker) or (old.status if old is not None else None)
            kept[address] = SeenReplica(now_ms, state, status)
    return kept


def lost_replicas(
    registered: Iterable[BrokerAddress],
    histories: Iterable[ElectionHistory],
    seen: Mapping[str, SeenReplica],
) -> list[LostReplica]:
    """The replicas that are not registered, sorted by name, id and address."""
    brokers = list(registered)
    controlled = {history.broker: history for history in histories if history.replicas}
    found = [
        *_known_to_controllers(brokers, controlled, seen),
        *(
            LostReplica(one.state.broker.cluster, one.state.broker.name, None, address, seen=one)
            for address, one in seen.items()
            if one.state.broker.name not in controlled and not _is_registered(one, brokers)
        ),
    ]
    return sorted(found, key=lambda one: (one.name, one.id or 0, one.address))


def _known_to_controllers(
    brokers: Iterable[BrokerAddress],
    controlled: Mapping[str, ElectionHistory],
    seen: Mapping[str, SeenReplica],
) -> Iterator[LostReplica]:
    addresses = {broker.address for broker in brokers}
    earlier = [one.state.broker for one in seen.values()]
    clusters = {broker.name: broker.cluster for broker in (*earlier, *brokers)}
    for name, history in controlled.items():
        for replica in history.replicas:
            if replica.address in addresses:
                continue
            yield LostReplica(
                cluster=clusters.get(name, ""),
                name=name,
                id=replica.id,
                address=replica.address,
                is_alive=replica.is_alive,
                in_sync=replica.in_sync,
                seen=seen.get(replica.address),
            )


def _is_registered(one: SeenReplica, brokers: Iterable[BrokerAddress]) -> bool:
    """Whether the broker is registered, possibly at another address or with another id."""
    old = one.state.broker
    return any(
        broker.address == old.address
        or (broker.cluster, broker.name, broker.id) == (old.cluster, old.name, old.id)
        for broker in brokers
    )
