"""Connected clients: producers and consumers by group, from their heartbeats.

A member is a connection. It is removed when it unregisters, when its connection closes, or when it
sends no heartbeat for `client_expire_ms`. The other members of a consumer group are then notified,
so that they rebalance. They are also notified when a member is added or the group's topics change,
except in a broadcasting group and where the group's config disables it.

A client id may have several connections: two broadcasting processes are both `address@DEFAULT`, and
the old connection of a reconnected client may stay half-open for minutes. Each connection stays
until it ends. For rebalance the client id counts once, so that no queue is left unread, and the
others are notified only about its first and last connection.

With access control, a client id belongs to the user of its first connection, as long as that user
has a connection. Replies and requests for the client id go only to connections of this user.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from sys import getsizeof
from typing import NamedTuple

from penstock.broker.consumers.client_groups import (
    BROADCASTING,
    ClientGroup,
    ConsumerGroup,
    GroupMember,
    memory_of,
)
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.repeated_heartbeats import AppliedHeartbeat
from penstock.config import LiveSettings
from penstock.errors import NoPermission, SystemBusy
from penstock.rpc.answers import ClientId, CloseConnection, EffectQueue, NotifyMembers
from penstock.wire.bodies.client_bodies import ConsumerData, SubscriptionData

log = logging.getLogger(__name__)

NEVER_MS = 1 << 62
MEMBERSHIPS_PER_CLIENT_MAX = 2_000
"""Groups of one connection, those of old heartbeats included: a membership takes about 1.1 KB."""
MEMBERSHIPS_MAX = 500_000
"""Groups of all connections."""
MEMORY_PER_CLIENT_MAX = 16 * 1024 * 1024
"""Bytes of names and subscriptions of one connection: enough for the largest heartbeat."""
SUBSCRIPTIONS_MEMORY_MAX = 256 * 1024 * 1024
"""Bytes of the subscriptions of all groups. A plain subscription takes about 0.7 KB."""
EXPIRED_PER_TICK = 200
"""Memberships that one tick removes: each takes about 20 µs, most of it for the log."""


class GroupMembership(NamedTuple):
    """The membership of a connection in a group."""

    client: ClientId
    consumes: bool
    group: str


@dataclass(slots=True, eq=False)
class UnfinishedHeartbeat:
    """A heartbeat that registers its groups while other requests are served."""

    member: GroupMember
    left: set[GroupMembership] = field(default_factory=set)
    """Groups that the client has left in the meantime."""
    disconnected: bool = False

    def includes(self, group: str, *, consumes: bool) -> bool:
        """Whether the client is still to be registered in the group."""
        return not self.disconnected and (
            GroupMembership(self.member.client, consumes, group) not in self.left
        )


@dataclass(slots=True)
class _Registrations:
    """The groups of one connection."""

    memberships: dict[GroupMembership, int] = field(default_factory=dict)
    """With the bytes of their names, and of the subscriptions in the last heartbeat."""
    memory: int = 0
    producers: int = 0
    applied: AppliedHeartbeat | None = None
    """The last heartbeat that was applied to all its groups."""

    def put(self, membership: GroupMembership, memory: int) -> None:
        """Add or refresh a membership."""
        if membership not in self.memberships:
            self.producers += not membership.consumes
        self.memory += memory - self.memberships.get(membership, 0)
        self.memberships[membership] = memory

    def remove(self, membership: GroupMembership) -> None:
        self.memory -= self.memberships.pop(membership)
        self.producers -= not membership.consumes


class Clients:
    """All connected clients."""

    def __init__(self, settings: LiveSettings, groups: Groups, effects: EffectQueue) -> None:
        self._settings = settings
        self._configs = groups
        self._effects = effects
        self._producers: dict[str, ClientGroup] = {}
        self._all_producers = ClientGroup("")
        self._consumers: dict[str, ConsumerGroup] = {}
        self._seen_ms: dict[GroupMembership, int] = {}  # oldest heartbeat first
        self._registrations: dict[ClientId, _Registrations] = {}
        self._subscriptions_memory = 0
        self._unfinished: dict[ClientId, list[UnfinishedHeartbeat]] = {}

    # --- registration

    @contextmanager
    def registering(self, member: GroupMember) -> Iterator[UnfinishedHeartbeat]:
        """While a heartbeat registers its groups: tells which of them the client has left."""
        heartbeat = UnfinishedHeartbeat(member)
        self._unfinished.setdefault(member.client, []).append(heartbeat)
        try:
            yield heartbeat
        finally:
            unfinished = self._unfinished.get(member.client, [])
            if heartbeat in unfinished:
                unfinished.remove(heartbeat)
            if not unfinished:
                self._unfinished.pop(member.client, None)

    def register_producer(self, group: str, member: GroupMember) -> None:
        """Add or refresh a producer; raises SystemBusy."""
        membership = GroupMembership(member.client, False, group)
        memory = getsizeof(group) + getsizeof(member.client_id)
        self._refuse_too_many(membership, memory)
        producers = self._producers.get(group)
        if producers is None:
            producers = self._producers[group] = ClientGroup(group)
        self._add(producers, membership, member, memory)

    def register_consumer(
        self, data: ConsumerData, member: GroupMember, *, with_subscriptions: bool = True
    ) -> bool:
        """Add or refresh a consumer; returns whether members or subscriptions have changed.

        Without subscriptions the known ones stay. Members are notified of changes. Raises
        SystemBusy.
        """
        membership = GroupMembership(member.client, True, data.group_name)
        group = self._consumers.get(data.group_name)
        memory = getsizeof(data.group_name) + getsizeof(member.client_id)
        if with_subscriptions:
            subscriptions_memory = sum(map(memory_of, data.subscription_data_set))
            self._refuse_growth(subscriptions_memory - (0 if group is None else group.memory))
            memory += subscriptions_memory
        elif member.client in self._registrations:
            known = self._registrations[member.client].memberships.get(membership, 0)
            memory = max(memory, known)
        self._refuse_too_many(membership, memory)
        if group is None:
            group = self._consumers[data.group_name] = ConsumerGroup(
                data.group_name, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET"
            )
        group.describe(data)
        changed = self._add(group, membership, member, memory)
        if with_subscriptions:
            before = group.memory
            changed = group.subscribe(data.subscription_data_set) or changed
            self._subscriptions_memory += group.memory - before
        if changed:
            self._notify(group)
        return changed

    def applied_heartbeat(self, client: ClientId) -> AppliedHeartbeat | None:
        """The last heartbeat of a connection that was applied to all its groups."""
        registrations = self._registrations.get(client)
        return None if registrations is None else registrations.applied

    def keep_applied(self, heartbeat: AppliedHeartbeat) -> None:
        """Keep the last heartbeat of a connection until its memberships end."""
        registrations = self._registrations.get(heartbeat.member.client)
        if registrations is not None:
            registrations.applied = heartbeat

    def renew(self, heartbeat: AppliedHeartbeat, now_ms: int) -> bool:
        """Refresh all memberships of a heartbeat; False if applying it again may change anything
        else, and then nothing is refreshed."""
        member, client = heartbeat.member, heartbeat.member.client
        memberships = []
        for group, version in heartbeat.consumers:
            if (
                self._consumers.get(group.name) is not group
                or group.version != version
                or group.members.get(client) is not member
            ):
                return False
            memberships.append(GroupMembership(client, True, group.name))
        for producers in heartbeat.producers:
            if (
                self._producers.get(producers.name) is not producers
                or producers.members.get(client) is not member
                or self._all_producers.members.get(client) is not member
            ):
                return False
            memberships.append(GroupMembership(client, False, producers.name))
        member.seen_ms = now_ms
        for membership in memberships:
            del self._seen_ms[membership]  # moves to the end
            self._seen_ms[membership] = now_ms
        return True

    def unregister(self, client: ClientId, producer_group: str, consumer_group: str) -> None:
        """Remove the client from these groups; an empty name means none."""
        for consumes, group in ((False, producer_group), (True, consumer_group)):
            if group:
                membership = GroupMembership(client, consumes, group)
                self._remove(membership)
                for heartbeat in self._unfinished.get(client, ()):
                    heartbeat.left.add(membership)

    def disconnected(self, client: ClientId) -> None:
        """Remove all memberships of a closed connection."""
        for heartbeat in self._unfinished.pop(client, ()):
            heartbeat.disconnected = True
        registrations = self._registrations.get(client)
        for membership in list(registrations.memberships) if registrations is not None else ():
            self._remove(membership)

    # --- queries

    def consumer_group(self, group: str) -> ConsumerGroup | None:
        """The group, if any of its consumers is connected."""
        return self._consumers.get(group)

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """The subscription of a connected group to a topic."""
        consumers = self._consumers.get(group)
        return None if consumers is None else consumers.subscriptions.get(topic)

    def find_consumer(self, group: str, client_id: str) -> GroupMember | None:
        """The newest connection of the consumer with this client id."""
        consumers = self._consumers.get(group)
        return None if consumers is None else consumers.find(client_id)

    def find_producer(self, client_id: str) -> GroupMember | None:
        """The newest connection of the producer with this client id, in any group."""
        return self._all_producers.find(client_id)

    def refuse_stranger(self, group: str, client_id: str, user: str) -> None:
        """Raise NoPermission if the client id of a connected consumer belongs to another user."""
        consumers = self._consumers.get(group)
        owner = None if consumers is None else consumers.owners.get(client_id)
        if owner is not None and owner != user:
            raise NoPermission(
                f"the client id {client_id} of the group {group} belongs to another user",
                hint="set another instance name",
            )

    def producer_group(self, group: str) -> ClientGroup | None:
        """The group, if any of its producers is connected."""
        return self._producers.get(group)

    def producers(self, group: str) -> list[GroupMember]:
        """The connected producers of a group."""
        producers = self._producers.get(group)
        return [] if producers is None else list(producers.members.values())

    def producer_groups(self) -> dict[str, list[GroupMember]]:
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
        """When `tick` has to be called."""
        for seen_ms in self._seen_ms.values():
            return seen_ms + self._settings.current.broker.client_expire_ms
        return NEVER_MS

    def tick(self, now_ms: int) -> None:
        """Remove clients without a heartbeat for `client_expire_ms`; the rest of very many in the
        next tick.

        A connection without memberships is closed, so that a client that was only blocked notices
        and reconnects.
        """
        before_ms = now_ms - self._settings.current.broker.client_expire_ms
        expired = []
        for membership, seen_ms in islice(self._seen_ms.items(), EXPIRED_PER_TICK):
            if seen_ms > before_ms:
                break
            expired.append((membership, seen_ms))
        for membership, seen_ms in expired:
            member = self._remove(membership)
            if member is not None:
                log.warning(
                    "removed client %s of group %s: no heartbeat for %d ms (client_expire_ms)",
                    member.client_id,
                    membership.group,
                    now_ms - seen_ms,
                )
            if membership.client not in self._registrations:
                self._effects.put(
                    CloseConnection(membership.client, "no heartbeat for client_expire_ms")
                )

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set: shift the times of all heartbeats."""
        for membership in self._seen_ms:
            self._seen_ms[membership] += step_ms
        for heartbeats in self._unfinished.values():
            for heartbeat in heartbeats:
                heartbeat.member.seen_ms += step_ms

    # --- inside

    def _refuse_too_many(self, membership: GroupMembership, memory: int) -> None:
        """Refuse a membership if its connection, or all of them together, have too many."""
        mine = self._registrations.get(membership.client) or _Registrations()
        used = mine.memory - mine.memberships.get(membership, 0) + memory
        if used > MEMORY_PER_CLIENT_MAX:
            raise SystemBusy.over(
                "names and subscriptions of one connection",
                figure=used,
                limit=MEMORY_PER_CLIENT_MAX,
                hint="subscribe to fewer topics and tags, or use several clients with different "
                "instance names",
            )
        if membership in self._seen_ms:
            return
        own = len(mine.memberships)
        if own >= MEMBERSHIPS_PER_CLIENT_MAX:
            raise SystemBusy.over(
                "groups of one connection",
                figure=own + 1,
                limit=MEMBERSHIPS_PER_CLIENT_MAX,
                unit="groups",
                hint="use several clients with different instance names",
            )
        if len(self._seen_ms) >= MEMBERSHIPS_MAX:
            raise SystemBusy.over(
                "groups of all connections",
                figure=len(self._seen_ms) + 1,
                limit=MEMBERSHIPS_MAX,
                unit="groups",
            )

    def _refuse_growth(self, growth: int) -> None:
        """Refuse subscriptions that make those of all groups too large."""
        used = self._subscriptions_memory + growth
        if growth > 0 and used > SUBSCRIPTIONS_MEMORY_MAX:
            raise SystemBusy.over(
                "subscriptions of all groups", figure=used, limit=SUBSCRIPTIONS_MEMORY_MAX
            )

    def _add(
        self, group: ClientGroup, membership: GroupMembership, member: GroupMember, memory: int
    ) -> bool:
        """Add or refresh a membership; True if the group's set of client ids has changed."""
        is_new = self._seen_ms.pop(membership, None) is None  # moves to the end
        self._seen_ms[membership] = member.seen_ms
        self._registrations.setdefault(member.client, _Registrations()).put(membership, memory)
        changed = group.add(member)
        if not membership.consumes:
            self._all_producers.add(member)
        ids = group if membership.consumes else self._all_producers
        owner = ids.owners[member.client_id]
        if is_new and owner != member.user:
            log.warning(
                "user %s at %s uses the client id %s of user %s in group %s; replies and requests "
                "for this client id go to user %s",
                member.user,
                member.address,
                member.client_id,
                owner,
                group.name,
                owner,
            )
        return changed

    def _remove(self, membership: GroupMembership) -> GroupMember | None:
        if self._seen_ms.pop(membership, None) is None:
            return None
        registrations = self._registrations[membership.client]
        registrations.remove(membership)
        if not registrations.memberships:
            del self._registrations[membership.client]
        groups = self._consumers if membership.consumes else self._producers
        group = groups[membership.group]
        member = group.members[membership.client]
        gone = group.remove(membership.client)
        if not membership.consumes and not registrations.producers:
            self._all_producers.remove(membership.client)
        if not group.members:
            del groups[membership.group]
        if isinstance(group, ConsumerGroup):
            if not group.members:
                self._subscriptions_memory -= group.memory
            if gone:
                self._notify(group)
        return member

    def _notify(self, group: ConsumerGroup) -> None:
        config = self._configs.get(group.name)
        if group.message_model == BROADCASTING or (
            config is not None and not config.notify_consumer_ids_changed_enable
        ):
            return
        if group.members:
            self._effects.put(NotifyMembers(group.name, group.members))
