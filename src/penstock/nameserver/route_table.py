"""The tables of a NameServer: the live brokers, and the queues of each topic.

| Table | Key → value |
|---|---|
| `brokers` | (cluster, address) → one broker process, and when it was last seen |
| `broker_sets` | broker name → its cluster and its addresses by broker id (0 is the master) |
| `clusters` | cluster → its broker names |
| `topics` | topic → broker name → its queues |
| `mappings` | static topic → broker name → the mapping of its logic queues |

The topics of a broker name come from its master. Without a master they come from the slave with the
smallest id if it runs RocketMQ 5.x. They replace the known ones when the DataVersion differs from
the last one of that process, or when the process is new under its id; otherwise only missing topics
are added. So a permission that a tool has wiped lasts until the broker changes its topics.

A name and id belong to one address. While its broker is alive, another address is refused, unless
its epoch (`state_version`) is greater or it changes its role: it is registered under this name with
another id.

All values are frozen and replaced when they change. The response to a route query is cached until
its topic or any broker changes.
"""

import logging
from collections.abc import Callable

from msgspec.structs import replace

from penstock.errors import BrokerNameTaken, Refused
from penstock.nameserver.broker_registration import BrokerRegistration
from penstock.rpc.answers import ClientId
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicQueueMappingInfo,
    TopicRouteData,
)
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody
from penstock.wire.codes import (
    MASTER_ID,
    PERM_READ_WRITE,
    PERM_WRITE,
    SYNC_BROKER_MEMBER_PREFIX,
)

log = logging.getLogger(__name__)

Key = tuple[str, str]


class RegisteredBroker:
    """One broker process."""

    __slots__ = ("filter_servers", "may_renew", "registration", "seen_ms", "version")

    def __init__(
        self,
        registration: BrokerRegistration,
        version: DataVersion,
        filter_servers: list[str],
        seen_ms: int,
    ) -> None:
        self.registration = registration
        self.version = version
        self.filter_servers = filter_servers
        self.seen_ms = seen_ms
        self.may_renew = True  # a repeated registration changes nothing


class RouteTable:
    """The brokers and topics of one NameServer."""

    def __init__(self) -> None:
        self.brokers: dict[Key, RegisteredBroker] = {}
        self.broker_sets: dict[str, BrokerData] = {}
        self.clusters: dict[str, dict[str, None]] = {}  # names in the order of registration
        self.topics: dict[str, dict[str, QueueData]] = {}
        self.mappings: dict[str, dict[str, TopicQueueMappingInfo]] = {}
        self._clients: dict[ClientId, set[Key]] = {}
        # Connections whose registration under a broker name was refused.
        self._refused: dict[ClientId, set[str]] = {}
        # topic → strict → (variant, body)
        self._bodies: dict[str, dict[bool, tuple[object, bytes]]] = {}

    # --- brokers ---------------------------------------------------------------------------------

    def renew(self, registration: BrokerRegistration, now_ms: int) -> bool:
        """Whether the same registration is known already; if so, renew it."""
        broker = self.brokers.get(registration.key)
        if broker is None or not broker.may_renew or broker.registration != registration:
            return False
        broker.seen_ms = now_ms
        return True

    def register(
        self, registration: BrokerRegistration, body: RegisterBrokerBody, now_ms: int
    ) -> None:
        """Register an address and its topics.

        Raises BrokerNameTaken if the id belongs to a live broker at another address.
        """
        table = body.topic_config_serialize_wrapper
        name, key = registration.name, registration.key
        before = self.brokers.get(key)
        if before is not None and before.registration.name != name:
            self.unregister(*key, before.registration.name)
            before = None
        broker_set = self.broker_sets.get(name) or BrokerData(
            cluster=registration.cluster, broker_name=name
        )
        holder = broker_set.broker_addrs.get(registration.id)
        if holder is not None and holder != registration.address:
            self._replace_holder(registration, holder, table.data_version.state_version)
        if holder is None and len(table.topic_config_table) == 1:
            raise Refused(
                f"register broker failed: {name} at {key[1]} is not registered and sends only one "
                "topic",
                hint="register the broker with all its topics first",
            )
        addresses = self._set_address(broker_set, registration)
        if registration.is_master or (
            registration.acting_master is not None and registration.id == min(addresses)
        ):
            new = holder is None or before is None or before.version != table.data_version
            self._store_topics(registration, body, everything=new)
        if before is None:
            log.info("registered broker %s (id %d) at %s", name, registration.id, key[1])
        if before is None or before.filter_servers != body.filter_server_list:
            self._bodies.clear()
        self._forget(key)
        self.brokers[key] = RegisteredBroker(
            registration, table.data_version, body.filter_server_list, now_ms
        )
        self._clients.setdefault(registration.client, set()).add(key)
        self._refused.get(registration.client, set()).discard(name)

    def mark_seen(self, cluster: str, address: str, now_ms: int) -> None:
        """Note that a broker is alive; unknown ones are ignored."""
        broker = self.brokers.get((cluster, address))
        if broker is not None:
            broker.seen_ms = now_ms

    def unregister(self, cluster: str, address: str, name: str) -> None:
        """Remove an address, and with the last address of a broker name its topics."""
        for key, broker in list(self.brokers.items()):
            if key[1] == address and (key[0] == cluster or broker.registration.name == name):
                self._forget(key)
        self._remove_address(address, name)

    def remove_brokers_of(self, client: ClientId) -> None:
        """Remove the brokers that registered over a closed connection."""
        self._refused.pop(client, None)
        for key in self._clients.pop(client, ()):
            self._remove(key)

    def expire(self, now_ms: int) -> list[BrokerRegistration]:
        """Remove and return the brokers that have expired."""
        expired = []
        for broker in list(self.brokers.values()):
            last = broker.registration
            silent_ms = now_ms - broker.seen_ms
            if silent_ms > last.expire_ms:
                log.warning(
                    "broker %s at %s expired: no request for %d ms",
                    last.name,
                    last.address,
                    silent_ms,
                )
                self._remove(last.key)
                expired.append(last)
        return expired

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set: shift the times when brokers were seen."""
        for broker in self.brokers.values():
            broker.seen_ms += step_ms

    # --- topics ----------------------------------------------------------------------------------

    def add_topic(self, topic: str, queues: list[QueueData], client: ClientId) -> None:
        """Set the queues of one topic, if all their brokers are known.

        Raises BrokerNameTaken if the client's registration under one of their names was refused.
        """
        refused = self._refused.get(client, set())
        for data in queues:
            if data.broker_name in refused:
                raise BrokerNameTaken(f"another broker is registered as {data.broker_name}")
        if queues and all(data.broker_name in self.broker_sets for data in queues):
            self.topics.setdefault(topic, {}).update({data.broker_name: data for data in queues})
            self._bodies.pop(topic, None)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic, everywhere or in one cluster, until a broker registers it again."""
        wanted = self.topics.get(topic, {}) if cluster is None else self.clusters.get(cluster, {})
        for name in list(wanted):
            if self._remove_queues(topic, name):
                self._require_registration(name)

    def wipe_write(self, name: str) -> int:
        """Remove the write permission from all topics of a broker name; returns their number."""
        return self._set_perms(name, lambda perm: perm & ~PERM_WRITE)

    def add_write(self, name: str) -> int:
        """Allow reading and writing on all topics of a broker name; returns their number."""
        return self._set_perms(name, lambda perm: PERM_READ_WRITE)

    # --- queries ---------------------------------------------------------------------------------

    def route_body(
        self, topic: str, *, strict: bool, order: str | None, acting_master: bool
    ) -> bytes | None:
        """The encoded route of a topic; None if no broker has it."""
        variant = (order, acting_master)
        cached = self._bodies.get(topic)
        if cached is not None and strict in cached and cached[strict][0] == variant:
            return cached[strict][1]
        route = self.route(topic, order=order, acting_master=acting_master)
        if route is None:
            return None
        body = encode_route(route, strict=strict)
        self._bodies.setdefault(topic, {})[strict] = variant, body
        return body

    def route(
        self, topic: str, *, order: str | None = None, acting_master: bool = False
    ) -> TopicRouteData | None:
        """The route of a topic; None if no broker has it."""
        queues = self.topics.get(topic)
        if not queues:
            return None
        broker_sets = [self.broker_sets[name] for name in queues]
        if acting_master and not topic.startswith(SYNC_BROKER_MEMBER_PREFIX):
            broker_sets = [
                _with_acting_master(data, queues[data.broker_name]) for data in broker_sets
            ]
        filters = {}
        for data in broker_sets:
            for address in data.broker_addrs.values():
                broker = self.brokers.get((data.cluster or "", address))
                if broker is not None and broker.filter_servers:
                    filters[address] = broker.filter_servers
        return TopicRouteData(
            order_topic_conf=order,
            queue_datas=list(queues.values()),
            broker_datas=broker_sets,
            filter_server_table=filters,
            topic_queue_mapping_by_broker=self.mappings.get(topic),
        )

    def master_of(self, registration: BrokerRegistration) -> BrokerRegistration | None:
        """The master that a slave replicates from; None for a master, or if there is none."""
        broker_set = self.broker_sets.get(registration.name)
        if registration.is_master or broker_set is None:
            return None
        master = self.brokers.get(
            (registration.cluster, broker_set.broker_addrs.get(MASTER_ID, ""))
        )
        return master.registration if master is not None else None

    def booted_ms(self, name: str, id: int) -> int:
        """When the broker with this name and id was started; 0 if it is not known."""
        broker_set = self.broker_sets.get(name)
        address = broker_set.broker_addrs.get(id) if broker_set is not None else None
        broker = self._find(name, address) if address is not None else None
        return broker.registration.booted_ms if broker is not None else 0

    def cluster_info(self) -> ClusterInfo:
        """All brokers and clusters."""
        clusters = {cluster: list(names) for cluster, names in self.clusters.items()}
        return ClusterInfo(broker_addr_table=self.broker_sets, cluster_addr_table=clusters)

    def topics_of(self, cluster: str) -> list[str]:
        """The topics with queues on any broker of the cluster."""
        names = self.clusters.get(cluster, {}).keys()
        return [topic for topic, queues in self.topics.items() if not names.isdisjoint(queues)]

    def topics_by_flag(self, mask: int, flags: int) -> list[str]:
        """The topics with these system flags, according to their first broker."""
        return [
            topic
            for topic, queues in self.topics.items()
            if next(iter(queues.values())).topic_sys_flag & mask == flags
        ]

    # --- private ---------------------------------------------------------------------------------

    def _find(self, name: str, address: str) -> RegisteredBroker | None:
        """The process at an address under a broker name, in any cluster."""
        for broker in self.brokers.values():
            if broker.registration.address == address and broker.registration.name == name:
                return broker
        return None

    def _replace_holder(
        self, registration: BrokerRegistration, holder: str, state_version: int
    ) -> None:
        """Forget the address that has the id of a registration, or refuse the registration."""
        name, address = registration.name, registration.address
        live = self._find(name, holder)
        if live is None:
            return
        epoch = live.version.state_version
        changes_role = registration.key in self.brokers and state_version == epoch
        if state_version > epoch or changes_role:
            log.warning(
                "broker %s (id %d) moves from %s to %s", name, registration.id, holder, address
            )
            self._forget(live.registration.key)
            return
        self._remove(registration.key)
        refused = self._refused.setdefault(registration.client, set())
        error = BrokerNameTaken(
            f"the broker {name} (id {registration.id}) is registered at {holder}, and that broker "
            "is alive"
        )
        if name not in refused:  # a broker repeats its registration every 30 s
            log.warning("refused the registration of %s: %s", address, error.message)
            refused.add(name)
        raise error

    def _set_address(
        self, broker_set: BrokerData, registration: BrokerRegistration
    ) -> dict[int, str]:
        """Add a process to its broker name; returns all addresses of that name."""
        # A slave that became master must not stay under its old id too.
        addresses = {
            id: address
            for id, address in broker_set.broker_addrs.items()
            if address != registration.address
        }
        addresses[registration.id] = registration.address
        self.clusters.setdefault(registration.cluster, {})[registration.name] = None
        self._set_broker_set(
            replace(
                broker_set,
                broker_addrs=addresses,
                zone_name=registration.zone,
                enable_acting_master=registration.acting_master is True,
            )
        )
        return addresses

    def _set_broker_set(self, broker_set: BrokerData) -> None:
        if self.broker_sets.get(broker_set.broker_name) != broker_set:
            self.broker_sets[broker_set.broker_name] = broker_set
            self._require_registration(broker_set.broker_name)
            self._bodies.clear()

    def _require_registration(self, name: str) -> None:
        """Process the next registrations under this name even if they are repeated."""
        for broker in self.brokers.values():
            if broker.registration.name == name:
                broker.may_renew = False

    def _remove(self, key: Key) -> None:
        """Remove a process, unless the same address has registered again in another cluster."""
        broker = self.brokers.get(key)
        if broker is None:
            return
        name = broker.registration.name
        self._forget(key)
        others = [
            other.registration for other in self.brokers.values() if other.registration.name == name
        ]
        successor = next((other for other in others if other.address == key[1]), None)
        if successor is None:
            self._remove_address(key[1], name)
        broker_set = self.broker_sets.get(name)
        if broker_set is None or any(other.cluster == key[0] for other in others):
            return
        self._leave_cluster(key[0], name)
        if successor is not None and broker_set.cluster == key[0]:
            self._set_broker_set(replace(broker_set, cluster=successor.cluster))

    def _remove_address(self, address: str, name: str) -> None:
        """Remove an address, and with the last address of a broker name its topics."""
        broker_set = self.broker_sets.get(name)
        if broker_set is None:
            return
        addresses = {id: other for id, other in broker_set.broker_addrs.items() if other != address}
        if len(addresses) < len(broker_set.broker_addrs):
            log.info("removed broker %s at %s", name, address)
        if addresses:
            self._set_broker_set(replace(broker_set, broker_addrs=addresses))
            if broker_set.enable_acting_master and MASTER_ID not in addresses:
                self.wipe_write(name)
            return
        del self.broker_sets[name]
        for cluster in list(self.clusters):
            self._leave_cluster(cluster, name)
        for topic in [topic for topic, queues in self.topics.items() if name in queues]:
            self._remove_queues(topic, name)

    def _leave_cluster(self, cluster: str, name: str) -> None:
        names = self.clusters.get(cluster, {})
        names.pop(name, None)
        if not names:
            self.clusters.pop(cluster, None)

    def _forget(self, key: Key) -> None:
        broker = self.brokers.pop(key, None)
        if broker is not None:
            keys = self._clients.get(broker.registration.client)
            if keys is not None:
                keys.discard(key)
                if not keys:
                    del self._clients[broker.registration.client]

    def _store_topics(
        self, registration: BrokerRegistration, body: RegisterBrokerBody, *, everything: bool
    ) -> None:
        table = body.topic_config_serialize_wrapper
        name = registration.name
        read_only = registration.acting_master and not registration.is_master
        if registration.complete and not table.topic_queue_mapping_info_map:
            for topic in [topic for topic, queues in self.topics.items() if name in queues]:
                if topic not in table.topic_config_table:
                    self._remove_queues(topic, name)
        for key, config in table.topic_config_table.items():
            topic = config.topic_name or key
            queues = self.topics.setdefault(topic, {})
            old = queues.get(name)
            if old is not None and not everything:
                continue
            data = QueueData(
                broker_name=name,
                read_queue_nums=config.read_queue_nums,
                write_queue_nums=config.write_queue_nums,
                perm=config.perm & ~PERM_WRITE if read_only else config.perm,
                topic_sys_flag=config.topic_sys_flag,
            )
            if data != old:
                queues[name] = data
                self._bodies.pop(topic, None)
        for topic, mapping in table.topic_queue_mapping_info_map.items():
            owners = self.mappings.setdefault(topic, {})
            if everything or (mapping.bname or name) not in owners:
                owners[mapping.bname or name] = mapping
                self._bodies.pop(topic, None)

    def _remove_queues(self, topic: str, name: str) -> bool:
        queues = self.topics.get(topic)
        if queues is None or queues.pop(name, None) is None:
            return False
        if not queues:
            del self.topics[topic]
            self.mappings.pop(topic, None)
        self._bodies.pop(topic, None)
        return True

    def _set_perms(self, name: str, change: Callable[[int], int]) -> int:
        count = 0
        for queues in self.topics.values():
            data = queues.get(name)
            if data is not None:
                queues[name] = replace(data, perm=change(data.perm))
                count += 1
        self._bodies.clear()
        return count


def route_of_zone(route: TopicRouteData, zone: str) -> TopicRouteData:
    """The route only with brokers of this zone and broker sets without a master."""
    kept = [
        data
        for data in route.broker_datas
        if MASTER_ID not in data.broker_addrs or (data.zone_name or "").lower() == zone.lower()
    ]
    names = {data.broker_name for data in kept}
    addresses = {address for data in kept for address in data.broker_addrs.values()}
    return replace(
        route,
        broker_datas=kept,
        queue_datas=[data for data in route.queue_datas if data.broker_name in names],
        filter_server_table={
            address: filters
            for address, filters in route.filter_server_table.items()
            if address in addresses
        },
    )


def encode_route(route: TopicRouteData, *, strict: bool) -> bytes:
    """A route as strict JSON, or with unquoted numbers as keys for older clients."""
    return fastjson.encode_strict(route) if strict else fastjson.encode(route)


def _with_acting_master(broker_set: BrokerData, queues: QueueData) -> BrokerData:
    """The broker with the smallest id as master, if it is allowed and the topic is not writable."""
    addresses = broker_set.broker_addrs
    if not broker_set.enable_acting_master or MASTER_ID in addresses or queues.perm & PERM_WRITE:
        return broker_set
    acting = min(addresses)
    others = {number: address for number, address in addresses.items() if number != acting}
    return replace(broker_set, broker_addrs={MASTER_ID: addresses[acting], **others})
