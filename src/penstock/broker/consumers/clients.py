"""Who is connected: producers and consumers by group, from their heartbeats.

A member is a connection. It goes when it says so, when its connection closes, or when it is silent
for `client_expire_ms`; the rest of a consumer group is then told to share the queues anew. They
are told as well when a member comes or the group's topics change, but not in a group that
broadcasts (nobody shares there), nor where the group's config forbids it.

A client id may have several connections: two processes that broadcast are both `address@DEFAULT`,
and the old connection of a client that came back may hang half-open for minutes. Each stays until
it ends by itself. Among the consumers that share the queues the id counts once, so that no share
is left unread, and the others are told only when its first connection comes or its last one goes.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.broker.consumers.groups import Groups
from penstock.config import Live
from penstock.rpc.answers import ClientId, CloseConnection, EffectQueue, NotifyClient
from penstock.wire.bodies.client_bodies import ConsumerData, SubscriptionData
from penstock.wire.codes import RequestCode

log = logging.getLogger(__name__)

NEVER_MS = 1 << 62
BROADCASTING = "BROADCASTING"


@dataclass(slots=True)
class Member:
    """One client's connection."""

    client: ClientId
    client_id: str
    address: str  # host:port
    language: int
    version: int
    seen_ms: int


@dataclass(slots=True)
class ClientGroup:
    """The connected members of a group."""

    name: str
    members: dict[ClientId, Member] = field(default_factory=dict, kw_only=True)
    connections: dict[str, dict[ClientId, None]] = field(default_factory=dict, kw_only=True)
    """By client id, the newest connection last."""

    def find(self, client_id: str) -> Member | None:
        """The newest member with this client id."""
        clients = self.connections.get(client_id)
        return None if clients is None else self.members[next(reversed(clients))]

    def enter(self, member: Member) -> bool:
        """Let a member in, or see it again; True if the group has other client ids than before."""
        old = self.members.get(member.client)
        if old is not None and old.client_id == member.client_id:
            self.members[member.client] = member
            return False
        gone = old is not None and self.leave(old.client)
        came = member.client_id not in self.connections
        self.members[member.client] = member
        self.connections.setdefault(member.client_id, {})[member.client] = None
        return gone or came

    def leave(self, client: ClientId) -> bool:
        """Let a member go; True if its client id has gone with it."""
        client_id = self.members.pop(client).client_id
        clients = self.connections[client_id]
        del clients[client]
        if not clients:
            del self.connections[client_id]
        return not clients


@dataclass(slots=True)
class ConsumerGroup(ClientGroup):
    """The connected consumers of a group and what they subscribe to, as the newest of them says."""

    consume_type: str
    message_model: str
    consume_from_where: str
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)

    def describe(self, data: ConsumerData) -> None:
        """Take over how the group consumes; clients of other languages may leave things out."""
        self.consume_type = data.consume_type or self.consume_type
        self.message_model = data.message_model or self.message_model
        self.consume_from_where = data.consume_from_where or self.consume_from_where

    def subscribe(self, subscriptions: Iterable[SubscriptionData]) -> bool:
        """Take over subscriptions that are newer, forget other topics; True if topics changed."""
        before = set(self.subscriptions)
        wanted = set()
        for subscription in subscriptions:
            topic = subscription.topic
            wanted.add(topic)
            old = self.subscriptions.get(topic)
            if old is None or subscription.sub_version > old.sub_version:
                self.subscriptions[topic] = subscription
        for topic in before - wanted:
            del self.subscriptions[topic]
        return before != wanted


class Seat(NamedTuple):
    """A connection's membership in a group."""

    client: ClientId
    consumes: bool
    group: str


class Clients:
    """All connected clients."""

    def __init__(self, settings: Live, groups: Groups, effects: EffectQueue) -> None:
        self._settings = settings
        self._configs = groups
        self._effects = effects
        self._producers: dict[str, ClientGroup] = {}
        self._all_producers = ClientGroup("")
        self._consumers: dict[str, ConsumerGroup] = {}
        self._seen_ms: dict[Seat, int] = {}  # longest silent first
        self._seats: dict[ClientId, set[Seat]] = {}

    # --- coming and going

    def register_producer(self, group: str, member: Member) -> None:
        """Note a producer, or that it is still there."""
        producers = self._producers.get(group)
        if producers is None:
            producers = self._producers[group] = ClientGroup(group)
        self._enter(producers, Seat(member.client, False, group), member)
        self._all_producers.enter(member)

    def register_consumer(
        self, data: ConsumerData, member: Member, *, with_subscriptions: bool = True
    ) -> bool:
        """Returns whether members or subscriptions changed (members are told by Tell 40).

        Without subscriptions those known stay.
        """
        group = self._consumers.get(data.group_name)
        if group is None:
            group = self._consumers[data.group_name] = ConsumerGroup(
                data.group_name, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET"
            )
        group.describe(data)
        changed = self._enter(group, Seat(member.client, True, data.group_name), member)
        if with_subscriptions:
            changed = group.subscribe(data.subscription_data_set) or changed
        if changed:
            self._notify(group)
        return changed

    def unregister(self, client: ClientId, producer_group: str, consumer_group: str) -> None:
        """The client leaves these groups; an empty name means none."""
        if producer_group:
            self._leave(Seat(client, False, producer_group))
        if consumer_group:
            self._leave(Seat(client, True, consumer_group))

    def disconnected(self, client: ClientId) -> None:
        """The connection is gone: so are its memberships."""
        for seat in list(self._seats.get(client, ())):
            self._leave(seat)

    # --- asking

    def consumer_group(self, group: str) -> ConsumerGroup | None:
        """The group, if any of its consumers is connected."""
        return self._consumers.get(group)

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """What the connected group wants of the topic."""
        consumers = self._consumers.get(group)
        return None if consumers is None else consumers.subscriptions.get(topic)

    def find_consumer(self, group: str, client_id: str) -> Member | None:
        """The connected consumer of this client id, over its newest connection."""
        consumers = self._consumers.get(group)
        return None if consumers is None else consumers.find(client_id)

    def find_producer(self, client_id: str) -> Member | None:
        """The connected producer of this client id, of whatever group, over its newest
        connection."""
        return self._all_producers.find(client_id)

    def producers(self, group: str) -> list[Member]:
        """The connected producers of a group."""
        producers = self._producers.get(group)
        return [] if producers is None else list(producers.members.values())

    def producer_groups(self) -> dict[str, list[Member]]:
        """All connected producers by group."""
        return {name: list(group.members.values()) for name, group in self._producers.items()}

    def consumer_groups(self) -> Iterable[ConsumerGroup]:
        """All groups with a connected consumer."""
        return self._consumers.values()

    def groups_of_topic(self, topic: str) -> set[str]:
        """Connected consumer groups that subscribe to the topic."""
        return {group.name for group in self._consumers.values() if topic in group.subscriptions}

    # --- time

    def due(self) -> int:
        """When `tick` has something to do."""
        for seen_ms in self._seen_ms.values():
            return seen_ms + self._settings.current.broker.client_expire_ms
        return NEVER_MS

    def tick(self, now_ms: int) -> None:
        """Forget clients that were silent too long.

        A connection that is left without any membership is closed, so that a client that was only
        stuck notices and begins again.
        """
        before_ms = now_ms - self._settings.current.broker.client_expire_ms
        silent = []
        for seat, seen_ms in self._seen_ms.items():
            if seen_ms > before_ms:
                break
            silent.append(seat)
        for seat in silent:
            member = self._leave(seat)
            if member is not None:
                log.warning(
                    "%s of the group %s sent no heartbeat for %d ms (client_expire_ms): removed",
                    member.client_id,
                    seat.group,
                    now_ms - member.seen_ms,
                )
            if seat.client not in self._seats:
                self._effects.put(CloseConnection(seat.client, "no heartbeat for client_expire_ms"))

    # --- inside

    def _enter(self, group: ClientGroup, seat: Seat, member: Member) -> bool:
        """Give a member its seat; True if the group has other client ids than before."""
        self._seen_ms.pop(seat, None)  # to the end of the row
        self._seen_ms[seat] = member.seen_ms
        self._seats.setdefault(member.client, set()).add(seat)
        return group.enter(member)

    def _leave(self, seat: Seat) -> Member | None:
        if self._seen_ms.pop(seat, None) is None:
            return None
        seats = self._seats[seat.client]
        seats.remove(seat)
        if not seats:
            del self._seats[seat.client]
        groups = self._consumers if seat.consumes else self._producers
        group = groups[seat.group]
        member = group.members[seat.client]
        gone = group.leave(seat.client)
        if not seat.consumes and all(other.consumes for other in seats):
            self._all_producers.leave(seat.client)
        if not group.members:
            del groups[seat.group]
        if gone and isinstance(group, ConsumerGroup):
            self._notify(group)
        return member

    def _notify(self, group: ConsumerGroup) -> None:
        config = self._configs.get(group.name)
        if group.message_model == BROADCASTING or (
            config is not None and not config.notify_consumer_ids_changed_enable
        ):
            return
        for client in group.members:
            self._effects.put(
                NotifyClient(
                    client,
                    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
                    {"consumerGroup": group.name},
                )
            )
