"""Admin on topics, brokers and NameServers."""

from __future__ import annotations

import pytest

from penstock.client.admin.async_admin import AsyncAdmin, TopicKind
from penstock.errors import GroupNotExist, InvalidParameter, NoRoute, Refused

from .environment import Environment, eventually, numbers, send_all


async def test_create_describe_and_delete_a_topic(env: Environment) -> None:
    topic = env.name()
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        made = await admin.create_topic(topic, queues=2, attributes={"message.type": "NORMAL"})
        assert made.kind is TopicKind.NORMAL
        assert set(made.brokers) == {"broker-a", "broker-b"}
        settings = made.brokers["broker-a"]
        assert (settings.read_queues, settings.write_queues, settings.perm_text) == (2, 2, "rw")
        assert settings.message_type == "NORMAL"
        await send_all(producer, topic, numbers(40))  # the route exists at once

        listed = {info.name: info for info in await admin.topics(kind=TopicKind.NORMAL)}
        assert listed[topic] == made
        assert topic in await admin.topic_names()
        found = await admin.describe_topic(topic)
        assert sum(state.count for state in found.queues) == 40
        assert len(found.queues) == 4
        assert all(state.updated_ms for state in found.queues if state.count)
        assert set(found.addresses) == {"broker-a", "broker-b"}
        assert found.groups == ()
        assert found.unreachable == ()

        assert await admin.delete_topic(topic) == ["broker-a", "broker-b"]
        assert topic not in await admin.topic_names()
        with pytest.raises(NoRoute, match=topic):
            await admin.describe_topic(topic)
        with pytest.raises(NoRoute):
            await admin.delete_topic(topic)


async def test_omitted_settings_keep_their_values(env: Environment) -> None:
    topic = env.topic(queues=3, attributes="+message.type=FIFO")
    async with AsyncAdmin(env.nameservers) as admin:
        changed = await admin.update_topic(topic, perm="r")
        for settings in changed.brokers.values():
            assert (settings.read_queues, settings.write_queues) == (3, 3)
            assert (settings.perm_text, settings.message_type) == ("r", "FIFO")
        changed = await admin.create_topic(topic, write_queues=1, brokers=["broker-b"])
        assert set(changed.brokers) == {"broker-b"}
        info = (await admin.describe_topic(topic)).topic
        assert info.brokers["broker-a"].write_queues == 3
        assert info.brokers["broker-b"].write_queues == 1
        assert info.brokers["broker-b"].read_queues == 3
        changed = await admin.update_topic(topic, attributes={"message.type": None}, perm="rw")
        assert changed.brokers["broker-a"].message_type == "UNSPECIFIED"


async def test_the_queues_of_an_ordered_topic_are_stored_in_the_nameservers(
    env: Environment,
) -> None:
    topic = env.name()
    async with AsyncAdmin(env.nameservers) as admin:
        await admin.create_topic(topic, queues=2, order=True, brokers=["broker-a"])
        assert await admin.kv("ORDER_TOPIC_CONFIG", topic) == "broker-a:2"
        await admin.create_topic(topic, queues=2, order=True, brokers=["broker-b"])
        table = await admin.kv_table("ORDER_TOPIC_CONFIG")
        assert table[topic] == "broker-a:2;broker-b:2"
        await admin.update_topic(topic, order=False)
        assert await admin.kv("ORDER_TOPIC_CONFIG", topic) is None
        await admin.update_topic(topic, order=True)
        await admin.delete_topic(topic)
        assert await admin.kv("ORDER_TOPIC_CONFIG", topic) is None


async def test_names_in_a_namespace(env: Environment) -> None:
    topic = env.name()
    async with (
        AsyncAdmin(env.nameservers, namespace="acme") as inside,
        AsyncAdmin(env.nameservers) as outside,
    ):
        assert (await inside.create_topic(topic, queues=1)).name == topic
        assert [info.name for info in await inside.topics()].count(topic) == 1
        assert "TBW102" not in await inside.topic_names()
        assert f"acme%{topic}" in await outside.topic_names()
        queues = (await inside.describe_topic(topic)).queues
        assert {state.queue.topic for state in queues} == {topic}
        await inside.create_group(env.name("g"))
        assert env.name("g") in [group.name for group in await inside.groups()]
        plan = await inside.plan_reset(env.name("g"), topic, "last")
        assert (await inside.apply_reset(plan)).failed == ()
        assert await inside.groups_of_topic(topic) == [env.name("g")]
        await inside.delete_topic(topic)


async def test_invalid_requests_are_refused(env: Environment) -> None:
    async with AsyncAdmin(env.nameservers) as admin:
        with pytest.raises(InvalidParameter, match="is not a valid topic name"):
            await admin.create_topic("two words")
        with pytest.raises(InvalidParameter, match="is not a permission"):
            await admin.create_topic(env.name(), perm="x")
        with pytest.raises(NoRoute, match="know no cluster 'Nowhere'"):
            await admin.create_topic(env.name(), cluster="Nowhere")
        with pytest.raises(NoRoute, match="know no master broker-z"):
            await admin.create_topic(env.name(), brokers=["broker-z"])
        with pytest.raises(GroupNotExist, match=env.name()):
            await admin.update_group(env.name(), orderly=True)
        with pytest.raises(Refused, match=r"127\.0\.0\.1:\d+: .*TBW102"):
            await admin.delete_topic("TBW102")


async def test_runtime_statistics_of_brokers_are_read(env: Environment) -> None:
    async with AsyncAdmin(env.nameservers) as admin:

        async def asked() -> bool:
            """Apache 5.5 answers with an error until it has sampled its statistics."""
            return all(broker.problem is None for broker in (await admin.cluster()).brokers)

        await eventually(asked)
        state = await admin.cluster()
        assert state.clusters == ("DefaultCluster",)
        assert state.nameservers == (env.nameservers,)
        assert [s.broker.name for s in state.brokers] == ["broker-a", "broker-b"]
        for broker in state.brokers:
            assert broker.problem is None
            info = broker.runtime_info
            assert info is not None
            is_apache_5_5 = env.cluster.kind == "apache" and broker.broker.name == "broker-b"
            assert info.version == ("V5_5_1" if is_apache_5_5 else "V5_4_0")
            assert (info.penstock_version is not None) is (env.cluster.kind == "penstock")
            assert info.disk_used is not None
            assert 0 < info.disk_used < 1
            assert info.started_ms is not None
            assert info.log_end is not None
        assert (await admin.broker_runtime_info("broker-a")).raw["brokerVersionDesc"] == "V5_4_0"


async def test_the_replicas_of_a_cluster_are_listed(env: Environment) -> None:
    ours = env.cluster.kind == "penstock"
    async with AsyncAdmin(env.nameservers) as admin:

        async def asked() -> bool:
            """Apache 5.5 answers with an error until it has sampled its statistics."""
            return all(replica.problem is None for replica in await admin.replicas())

        await eventually(asked)
        replicas = await admin.replicas("DefaultCluster")
        assert [(r.broker.name, r.broker.id) for r in replicas] == [
            ("broker-a", 0),
            ("broker-b", 0),
        ]
        for replica in replicas:
            assert replica.role == ("async_master" if ours else "master")
            assert replica.epoch is None  # broker.conf: the static protocol
            assert replica.log_end is not None


async def test_settings_of_brokers_and_nameservers(env: Environment) -> None:
    async with AsyncAdmin(env.nameservers) as admin:
        before = await admin.broker_settings("broker-a")
        other = "60" if before["fileReservedTime"] != "60" else "61"
        await admin.update_broker_settings("broker-a", {"fileReservedTime": other})
        assert (await admin.broker_settings("broker-a"))["fileReservedTime"] == other
        assert (await admin.broker_settings("broker-b"))["fileReservedTime"] != other
        await admin.update_broker_settings(
            "broker-a", {"fileReservedTime": before["fileReservedTime"]}
        )
        settings = await admin.nameserver_settings()
        assert list(settings) == [env.nameservers]
        assert settings[env.nameservers]["listenPort"] in env.nameservers


async def test_kv_config_values_are_set_read_and_deleted(env: Environment) -> None:
    namespace = env.name()
    async with AsyncAdmin(env.nameservers) as admin:
        assert await admin.kv(namespace, "k") is None
        assert await admin.kv_table(namespace) == {}
        await admin.put_kv(namespace, "k", "v 1")
        await admin.put_kv(namespace, "l", "v 2")
        assert await admin.kv(namespace, "k") == "v 1"
        assert await admin.kv_table(namespace) == {"k": "v 1", "l": "v 2"}
        await admin.delete_kv(namespace, "k")
        assert await admin.kv_table(namespace) == {"l": "v 2"}


async def test_writes_to_a_broker_can_be_stopped_and_allowed(env: Environment) -> None:
    topic = env.topic(queues=1)
    async with AsyncAdmin(env.nameservers) as admin:
        await admin.stop_writes("broker-b")
        try:
            route = await admin.route(topic)
            assert {queue.broker_name for queue in route.write_queues} == {"broker-a"}
        finally:
            await admin.allow_writes("broker-b")
        assert len((await admin.route(topic)).write_queues) == 2


async def test_connected_producers_are_listed(env: Environment) -> None:
    topic = env.topic(queues=1)
    group = env.name("p")
    async with AsyncAdmin(env.nameservers) as admin:
        assert await admin.producers(group) == ()
        async with env.producer(heartbeat_ms=200) as producer:
            await send_all(producer, topic, numbers(4))
            members = await eventually(lambda: admin.producers(group))
            assert [member.language for member in members] == ["PYTHON"]
            assert (await admin.producer_groups())[group] == (members[0].client_id,)
        assert await admin.producers(group) == ()
