"""The connected members of producer and consumer groups.

Nothing here takes longer in a group with many members, because each of them sends heartbeats.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from sys import getsizeof

from penstock.rpc.answers import ClientId
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    SubscriptionData,
)

BROADCASTING = "BROADCASTING"
CLIENT_ID_MAX = 1_024
"""Maximum length of a client id in characters."""
_SUBSCRIPTION_BYTES = 180  # beside its texts and sets
_HASH_BYTES = 32


@dataclass(slots=True)
class GroupMember:
    """One connection of a client in a group."""

    client: ClientId
    client_id: str
    address: str  # host:port
    language: int
    version: int
    seen_ms: int
    user: str = ""  # who signed the last heartbeat; empty without access control


@dataclass(slots=True)
class ClientGroup:
    """The connected members of a group."""

    name: str
    members: dict[ClientId, GroupMember] = field(default_factory=dict, kw_only=True)
    connections: dict[str, dict[ClientId, None]] = field(default_factory=dict, kw_only=True)
    """By client id; the newest connection is last."""
    owners: dict[str, str] = field(default_factory=dict, kw_only=True)
    """The user of each client id."""
    _owned: dict[str, int] = field(default_factory=dict, kw_only=True)
    """By client id: the number of its connections that are its owner's."""
    _sorted_ids: tuple[str, ...] | None = field(default=None, kw_only=True)

    def client_ids(self) -> tuple[str, ...]:
        """All client ids, sorted. The tuple is the same until they change."""
        if self._sorted_ids is None:
            self._sorted_ids = tuple(sorted(self.connections))
        return self._sorted_ids

    def find(self, client_id: str) -> GroupMember | None:
        """The newest member with this client id, of the user that owns the id."""
        owner = self.owners.get(client_id)
        newest_first = reversed(self.connections.get(client_id, {}))
        members = (self.members[client] for client in newest_first)
        return next((member for member in members if member.user == owner), None)

    def add(self, member: GroupMember) -> bool:
        """Add or refresh a member; True if the set of client ids has changed."""
        old = self.members.get(member.client)
        if old is not None and old.client_id == member.client_id:
            self.members[member.client] = member
            if old.user != member.user:
                self._count_user(member, 1)
                self._count_user(old, -1)
            return False
        gone = old is not None and self.remove(old.client)
        came = member.client_id not in self.connections
        self.members[member.client] = member
        self.connections.setdefault(member.client_id, {})[member.client] = None
        self._count_user(member, 1)
        if came:
            self._sorted_ids = None
        return gone or came

    def remove(self, client: ClientId) -> bool:
        """Remove a member; True if it was the last one with its client id."""
        member = self.members.pop(client)
        clients = self.connections[member.client_id]
        del clients[client]
        if clients:
            self._count_user(member, -1)
            return False
        for table in (self.connections, self.owners, self._owned):
            del table[member.client_id]
        self._sorted_ids = None
        return True

    def _count_user(self, member: GroupMember, change: int) -> None:
        """Count a connection of the client id's owner; if that was its last one, the client id
        belongs to the user of the oldest connection from now on."""
        client_id = member.client_id
        if self.owners.setdefault(client_id, member.user) != member.user:
            return
        count = self._owned.get(client_id, 0) + change
        if not count:
            users = [self.members[client].user for client in self.connections[client_id]]
            self.owners[client_id] = users[0]
            count = users.count(users[0])
        self._owned[client_id] = count


@dataclass(slots=True)
class ConsumerGroup(ClientGroup):
    """The connected consumers of a group, and its subscriptions by the latest heartbeat."""

    consume_type: str
    message_model: str
    consume_from_where: str
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    memory: int = 0
    """About how many bytes the subscriptions take."""
    version: int = 0
    """Increased whenever a heartbeat changes how the group consumes, or its subscriptions."""
    _listed_ids: tuple[str, ...] = ()
    _list_body: bytes = b""

    def list_body(self) -> bytes:
        """The response to GET_CONSUMER_LIST_BY_GROUP, which each member sends after a change."""
        ids = self.client_ids()
        if self._listed_ids is not ids:
            body = GetConsumerListByGroupResponseBody(consumer_id_list=list(ids))
            self._listed_ids, self._list_body = ids, fastjson.encode(body)
        return self._list_body

    def describe(self, data: ConsumerData) -> None:
        """Set how the group consumes; clients in some languages omit fields."""
        before = (self.consume_type, self.message_model, self.consume_from_where)
        self.consume_type = data.consume_type or self.consume_type
        self.message_model = data.message_model or self.message_model
        self.consume_from_where = data.consume_from_where or self.consume_from_where
        if before != (self.consume_type, self.message_model, self.consume_from_where):
            self.version += 1

    def subscribe(self, subscriptions: Iterable[SubscriptionData]) -> bool:
        """Set newer subscriptions, remove other topics; True if the topics have changed."""
        before = set(self.subscriptions)
        wanted = set()
        for subscription in subscriptions:
            topic = subscription.topic
            wanted.add(topic)
            old = self.subscriptions.get(topic)
            if old is None or subscription.sub_version > old.sub_version:
                self.subscriptions[topic] = subscription
                self.version += 1
                self.memory += memory_of(subscription) - (0 if old is None else memory_of(old))
        for topic in before - wanted:
            self.version += 1
            self.memory -= memory_of(self.subscriptions.pop(topic))
        return before != wanted


def memory_of(subscription: SubscriptionData) -> int:
    """About how many bytes the broker needs for a subscription."""
    tags, hashes = subscription.tags_set, subscription.code_set
    return (
        _SUBSCRIPTION_BYTES
        + getsizeof(subscription.topic)
        + getsizeof(subscription.sub_string)
        + getsizeof(tags)
        + sum(map(getsizeof, tags))
        + getsizeof(hashes)
        + len(hashes) * _HASH_BYTES
    )
