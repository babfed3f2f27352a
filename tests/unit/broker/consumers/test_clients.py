"""Connected clients: registration, removal, expiry and notifications."""

import random

import pytest

from penstock.broker.auto_creations import AutoCreations
from penstock.broker.consumers import clients as clients_module
from penstock.broker.consumers.client_groups import ClientGroup
from penstock.broker.consumers.clients import (
    EXPIRED_PER_TICK,
    MEMBERSHIPS_PER_CLIENT_MAX,
    NEVER_MS,
    Clients,
)
from penstock.broker.consumers.groups import Groups
from penstock.config import LiveSettings
from penstock.errors import SystemBusy
from penstock.rpc.answers import CloseConnection, EffectQueue, NotifyMembers
from penstock.store.tables.config_tables import SubscriptionGroupTable
from penstock.wire.bodies.client_bodies import ConsumerData, SubscriptionGroupConfig
from tests.unit.broker.consumers.membership_kit import (
    NOW_MS,
    change,
    consumer,
    member,
    notified,
    settings,
    subscription,
)

EXPIRE_MS = 120_000


@pytest.fixture
def live() -> LiveSettings:
    return settings()


@pytest.fixture
def groups(live: LiveSettings) -> Groups:
    return Groups(SubscriptionGroupTable(), live, EffectQueue(), AutoCreations(live))


@pytest.fixture
def effects() -> EffectQueue:
    return EffectQueue()


@pytest.fixture
def clients(live: LiveSettings, groups: Groups, effects: EffectQueue) -> Clients:
    return Clients(live, groups, effects)


def ids(clients: Clients, group: str) -> list[str]:
    found = clients.consumer_group(group)
    return [] if found is None else sorted(m.client_id for m in found.members.values())


def test_all_members_are_notified_of_a_new_member(clients: Clients, effects: EffectQueue) -> None:
    assert clients.register_consumer(consumer("g", "T"), member(1))
    assert notified(effects) == [(1, "g")]
    assert clients.register_consumer(consumer("g", "T"), member(2))
    assert notified(effects) == [(1, "g"), (2, "g")]
    assert not clients.register_consumer(consumer("g", "T"), member(2, seen_ms=NOW_MS + 9))
    assert notified(effects) == []
    assert ids(clients, "g") == ["id1", "id2"]
    found = clients.find_consumer("g", "id2")
    assert found is not None
    assert (found.client, found.seen_ms) == (2, NOW_MS + 9)


def test_members_are_notified_when_one_leaves(clients: Clients, effects: EffectQueue) -> None:
    for client in (1, 2, 3):
        clients.register_consumer(consumer("g", "T"), member(client))
    notified(effects)
    clients.unregister(2, "", "g")
    assert notified(effects) == [(1, "g"), (3, "g")]
    clients.unregister(2, "", "g")
    assert notified(effects) == []
    clients.disconnected(1)
    assert notified(effects) == [(3, "g")]
    clients.disconnected(3)
    assert notified(effects) == []
    assert clients.consumer_group("g") is None
    assert list(clients.consumer_groups()) == []


def test_broadcasting_groups_are_not_notified(
    clients: Clients, groups: Groups, effects: EffectQueue
) -> None:
    silent = SubscriptionGroupConfig(group_name="s", notify_consumer_ids_changed_enable=False)
    groups.put(silent, NOW_MS)
    for data in (consumer("b", "T", message_model="BROADCASTING"), consumer("s", "T")):
        assert clients.register_consumer(data, member(1))
        assert clients.register_consumer(data, member(2))
        clients.unregister(1, "", data.group_name)
    clients.disconnected(2)
    assert notified(effects) == []


def test_a_change_is_one_effect_however_many_members_there_are(
    clients: Clients, effects: EffectQueue
) -> None:
    for client in range(500):
        clients.register_consumer(consumer("g", "T"), member(client))
    effects.take()
    clients.disconnected(0)
    (effect,) = effects.take()
    assert isinstance(effect, NotifyMembers)
    assert (effect.group, list(effect.members)) == ("g", list(range(1, 500)))


def test_client_ids_are_sorted_and_encoded_once_per_change(clients: Clients) -> None:
    for client in (2, 1, 3):
        clients.register_consumer(consumer("g", "T"), member(client))
    group = clients.consumer_group("g")
    assert group is not None
    ids_before, body = group.client_ids(), group.list_body()
    assert ids_before == ("id1", "id2", "id3")
    assert body == b'{"consumerIdList":["id1","id2","id3"]}'
    clients.register_consumer(consumer("g", "T"), member(1))
    clients.register_consumer(consumer("g", "T"), member(4, "id1"))
    assert group.client_ids() is ids_before
    assert group.list_body() is body
    clients.disconnected(2)
    assert group.client_ids() == ("id1", "id3")
    assert group.list_body() == b'{"consumerIdList":["id1","id3"]}'


def test_many_clients_expire_in_several_ticks(clients: Clients) -> None:
    for client in range(EXPIRED_PER_TICK + 1):
        clients.register_producer("p", member(client))
    clients.tick(NOW_MS + EXPIRE_MS)
    assert len(clients.producers("p")) == 1
    assert clients.due() == NOW_MS + EXPIRE_MS
    clients.tick(NOW_MS + EXPIRE_MS)
    assert clients.producers("p") == []


def test_topics_follow_the_latest_heartbeat(clients: Clients, effects: EffectQueue) -> None:
    clients.register_consumer(consumer("g", "T", "U"), member(1))
    clients.register_consumer(consumer("h", "U"), member(1))
    assert clients.groups_of_topic("U") == {"g", "h"}
    notified(effects)
    assert clients.register_consumer(consumer("g", "T", "V"), member(1))
    assert notified(effects) == [(1, "g")]
    assert clients.subscription("g", "U") is None
    assert clients.subscription("g", "V") is not None
    assert clients.groups_of_topic("U") == {"h"}
    assert clients.subscription("nobody", "U") is None


def test_subscriptions_change_by_version(clients: Clients, effects: EffectQueue) -> None:
    def beat(version: int, text: str) -> bool:
        data = ConsumerData(
            group_name="g",
            subscription_data_set=[subscription("T", version=version, text=text)],
        )
        return clients.register_consumer(data, member(1))

    assert beat(5, "a")
    notified(effects)
    assert not beat(4, "older")
    assert not beat(5, "same")
    assert clients.subscription("g", "T") == subscription("T", version=5, text="a")
    # The tags changed and not the topics: no rebalance is needed.
    assert not beat(6, "b")
    assert clients.subscription("g", "T") == subscription("T", version=6, text="b")
    assert notified(effects) == []


def test_known_subscriptions_stay_without_new_ones(clients: Clients) -> None:
    clients.register_consumer(consumer("g", "T"), member(1))
    assert clients.register_consumer(consumer("g"), member(2), with_subscriptions=False)
    assert clients.subscription("g", "T") is not None
    assert ids(clients, "g") == ["id1", "id2"]


def test_the_latest_member_defines_the_group(clients: Clients) -> None:
    clients.register_consumer(ConsumerData(group_name="g"), member(1))
    group = clients.consumer_group("g")
    assert group is not None
    assert (group.consume_type, group.message_model, group.consume_from_where) == (
        "CONSUME_PASSIVELY",
        "CLUSTERING",
        "CONSUME_FROM_LAST_OFFSET",
    )
    clients.register_consumer(
        ConsumerData(
            group_name="g",
            consume_type="CONSUME_ACTIVELY",
            message_model="BROADCASTING",
            consume_from_where="CONSUME_FROM_TIMESTAMP",
        ),
        member(2),
    )
    assert (group.consume_type, group.message_model, group.consume_from_where) == (
        "CONSUME_ACTIVELY",
        "BROADCASTING",
        "CONSUME_FROM_TIMESTAMP",
    )


def test_a_new_connection_of_a_client_id_is_the_same_consumer(
    clients: Clients, effects: EffectQueue
) -> None:
    clients.register_consumer(consumer("g", "T"), member(1, "me"))
    clients.register_producer("p", member(1, "me"))
    notified(effects)
    assert not clients.register_consumer(consumer("g", "T"), member(2, "me"))
    clients.register_producer("p", member(2, "me"))
    group = clients.consumer_group("g")
    assert group is not None
    assert list(group.connections) == ["me"], "it gets one share of the queues"
    assert [m.client for m in clients.producers("p")] == [1, 2]
    clients.register_consumer(consumer("g", "T"), member(1, "me"))
    found = clients.find_consumer("g", "me")
    assert found is not None
    assert found.client == 2, "a heartbeat over the old connection does not make it the newest"
    clients.disconnected(1)  # the half-open connection is closed
    assert clients.find_consumer("g", "me") == found
    assert notified(effects) == []


def test_two_processes_may_share_a_client_id(clients: Clients, effects: EffectQueue) -> None:
    data = consumer("b", "T", message_model="BROADCASTING")
    for beat in range(3):
        for client in (1, 2):
            clients.register_consumer(data, member(client, "host@DEFAULT", NOW_MS + beat))
    group = clients.consumer_group("b")
    assert group is not None
    assert list(group.members) == [1, 2]
    clients.disconnected(2)
    assert list(group.members) == [1]
    assert clients.subscription("b", "T") is not None, "its pulls go on"
    found = clients.find_consumer("b", "host@DEFAULT")
    assert found is not None
    assert found.client == 1
    clients.disconnected(1)
    assert clients.consumer_group("b") is None


def test_members_are_notified_of_the_last_connection_of_a_client_id(
    clients: Clients, effects: EffectQueue
) -> None:
    clients.register_consumer(consumer("g", "T"), member(1, "me"))
    clients.register_consumer(consumer("g", "T"), member(2, "me"))
    clients.register_consumer(consumer("g", "T"), member(3, "you"))
    notified(effects)
    clients.unregister(2, "", "g")
    assert notified(effects) == []
    clients.disconnected(1)
    assert notified(effects) == [(3, "g")]


def test_a_connection_with_another_client_id_is_another_member(
    clients: Clients, effects: EffectQueue
) -> None:
    clients.register_consumer(consumer("g", "T"), member(1, "a"))
    clients.register_consumer(consumer("g", "T"), member(2, "b"))
    notified(effects)
    assert clients.register_consumer(consumer("g", "T"), member(1, "b"))
    assert sorted(notified(effects)) == [(1, "g"), (2, "g")]
    assert ids(clients, "g") == ["b", "b"]
    clients.disconnected(2)
    assert notified(effects) == []
    clients.disconnected(1)
    assert clients.consumer_group("g") is None


def test_producers_are_added_and_removed(clients: Clients, effects: EffectQueue) -> None:
    clients.register_producer("p", member(1))
    clients.register_producer("p", member(2))
    clients.register_producer("q", member(1))
    assert {g: [m.client for m in ms] for g, ms in clients.producer_groups().items()} == {
        "p": [1, 2],
        "q": [1],
    }
    clients.unregister(1, "p", "")
    assert [m.client for m in clients.producers("p")] == [2]
    clients.disconnected(2)
    assert clients.producers("p") == []
    assert set(clients.producer_groups()) == {"q"}
    assert notified(effects) == []


def test_one_connection_has_a_limited_number_of_groups(clients: Clients) -> None:
    """Each heartbeat may name other groups, which stay until they expire."""
    for n in range(MEMBERSHIPS_PER_CLIENT_MAX):
        clients.register_producer(f"p{n}", member(1))
    with pytest.raises(SystemBusy, match="groups of one connection: 2001 groups"):
        clients.register_producer("more", member(1))
    with pytest.raises(SystemBusy):
        clients.register_consumer(consumer("more", "T"), member(1))
    assert clients.producers("more") == []
    assert clients.consumer_group("more") is None
    clients.register_producer("p0", member(1))
    clients.register_producer("more", member(2))
    clients.unregister(1, "p0", "")
    clients.register_producer("more", member(1))


def test_all_connections_have_a_limited_number_of_groups(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MEMBERSHIPS_MAX", 2)
    clients.register_producer("p", member(1))
    clients.register_consumer(consumer("g", "T"), member(2))
    with pytest.raises(SystemBusy, match="groups of all connections: 3 groups, the limit is 2"):
        clients.register_producer("p", member(3))
    clients.register_producer("p", member(1))
    clients.disconnected(2)
    clients.register_producer("p", member(3))


def test_the_subscriptions_of_one_connection_have_a_limited_size(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MEMORY_PER_CLIENT_MAX", 10_000)
    wide = tuple(f"T{n}" for n in range(10))
    clients.register_consumer(consumer("g", *wide), member(1))
    with pytest.raises(SystemBusy, match="names and subscriptions of one connection"):
        clients.register_consumer(consumer("h", *wide), member(1))
    clients.register_consumer(consumer("g", *wide, version=2), member(1))
    clients.register_consumer(consumer("g"), member(1), with_subscriptions=False)
    with pytest.raises(SystemBusy):
        clients.register_consumer(consumer("h", *wide), member(1))
    assert clients.consumer_group("h") is None
    clients.register_consumer(consumer("h", *wide), member(2))
    clients.register_consumer(consumer("g", "T"), member(1))
    clients.register_consumer(consumer("h", *wide), member(1))
    with pytest.raises(SystemBusy):
        clients.register_producer("p" * 5_000, member(1))
    clients.unregister(1, "", "h")
    clients.register_producer("p" * 5_000, member(1))


def test_the_subscriptions_of_all_groups_have_a_limited_size(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "SUBSCRIPTIONS_MEMORY_MAX", 10_000)
    wide = tuple(f"T{n}" for n in range(10))
    for client in range(50):
        clients.register_consumer(consumer("g", *wide, version=client), member(client))
    with pytest.raises(SystemBusy, match="subscriptions of all groups"):
        clients.register_consumer(consumer("h", *wide), member(1))
    for client in range(50):
        clients.disconnected(client)
    clients.register_consumer(consumer("h", *wide), member(1))
    with pytest.raises(SystemBusy):
        clients.register_consumer(consumer("g", *wide), member(2))
    clients.register_consumer(consumer("h", "T"), member(1))
    clients.register_consumer(consumer("g", *wide), member(2))


def test_clients_without_heartbeat_are_removed_and_closed(
    clients: Clients, effects: EffectQueue
) -> None:
    assert clients.due() == NEVER_MS
    clients.register_consumer(consumer("g", "T"), member(1))
    clients.register_producer("p", member(1))
    clients.register_consumer(consumer("g", "T"), member(2, seen_ms=NOW_MS + 1))
    notified(effects)
    assert clients.due() == NOW_MS + EXPIRE_MS
    clients.tick(NOW_MS + EXPIRE_MS - 1)
    assert ids(clients, "g") == ["id1", "id2"]
    clients.tick(NOW_MS + EXPIRE_MS)
    assert ids(clients, "g") == ["id2"]
    assert clients.producers("p") == []
    taken = effects.take()
    assert [e.client for e in taken if isinstance(e, CloseConnection)] == [1]
    effects.pending = [e for e in taken if not isinstance(e, CloseConnection)]
    assert notified(effects) == [(2, "g")]
    assert clients.due() == NOW_MS + 1 + EXPIRE_MS


@pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
def test_a_step_of_the_clock_is_no_time_without_heartbeats(clients: Clients, step_ms: int) -> None:
    clients.register_producer("p", member(1))
    clients.register_consumer(consumer("g", "T"), member(1))
    clients.clock_stepped(step_ms)
    now_ms = NOW_MS + step_ms
    assert clients.due() == now_ms + EXPIRE_MS
    clients.tick(now_ms + EXPIRE_MS - 1)
    assert clients.producers("p")
    clients.tick(now_ms + EXPIRE_MS)
    assert not clients.producers("p")
    assert clients.consumer_group("g") is None


def test_a_group_missing_in_heartbeats_expires_alone(
    clients: Clients, effects: EffectQueue
) -> None:
    clients.register_consumer(consumer("g", "T"), member(1))
    clients.register_producer("p", member(1))
    later = member(1, seen_ms=NOW_MS + 60_000)
    clients.register_producer("p", later)
    notified(effects)
    clients.tick(NOW_MS + EXPIRE_MS)
    assert clients.consumer_group("g") is None
    assert clients.producers("p") == [later]
    assert effects.take() == []


def test_the_expiry_time_may_change(clients: Clients, live: LiveSettings) -> None:
    clients.register_producer("p", member(1))
    change(live, client_expire_ms=5_000)
    assert clients.due() == NOW_MS + 5_000
    clients.tick(NOW_MS + 5_000)
    assert clients.due() == NEVER_MS


@pytest.mark.parametrize("seed", range(20))
def test_removed_clients_leave_nothing(clients: Clients, effects: EffectQueue, seed: int) -> None:
    """After any sequence of events the tables agree with a simple model."""
    rng = random.Random(seed)
    memberships: dict[tuple[str, int], str] = {}  # (group, connection) → client id
    for step in range(300):
        client, name = rng.randrange(6), f"id{rng.randrange(4)}"
        group = rng.choice(("g", "h"))
        before = {i for (g, _), i in memberships.items() if g == group}
        act = rng.randrange(5)
        if act < 3:
            clients.register_consumer(consumer(group, "T"), member(client, name, NOW_MS + step))
            memberships[group, client] = name
        elif act == 3:
            clients.unregister(client, "", group)
            memberships.pop((group, client), None)
        else:
            clients.disconnected(client)
            memberships = {(g, c): i for (g, c), i in memberships.items() if c != client}
        after = {i for (g, _), i in memberships.items() if g == group}
        groups = {g for _, g in notified(effects)}
        assert (group in groups) == (before != after and bool(after))
        for one in ("g", "h"):
            found = clients.consumer_group(one)
            model = {c: i for (g, c), i in memberships.items() if g == one}
            assert ids(clients, one) == sorted(model.values())
            assert set(found.connections if found else ()) == set(model.values())
    clients.tick(NOW_MS + 10 * EXPIRE_MS)
    assert list(clients.consumer_groups()) == []
    assert clients.due() == NEVER_MS


@pytest.mark.parametrize("seed", range(10))
def test_a_client_id_belongs_to_a_user_while_the_user_is_connected(seed: int) -> None:
    """Also if a connection changes its user or its client id."""
    rng = random.Random(seed)
    group = ClientGroup("g")
    owners: dict[str, str] = {}
    for _ in range(400):
        client = rng.randrange(6)
        if rng.randrange(3):
            one = member(client, f"id{rng.randrange(2)}")
            one.user = f"user{rng.randrange(3)}"
            group.add(one)
        elif client in group.members:
            group.remove(client)
        users: dict[str, list[str]] = {}
        for client_id, connections in group.connections.items():
            users[client_id] = [group.members[connection].user for connection in connections]
        for client_id in {*owners, *users}:
            if client_id not in users:
                del owners[client_id]
            elif owners.get(client_id) not in users[client_id]:
                owners[client_id] = users[client_id][0]
        assert group.owners == owners
