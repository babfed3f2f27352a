"""Admin on groups: settings, members, progress and resets."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from penstock import Message, MessageQueue
from penstock.client.admin.async_admin import AsyncAdmin, ResetPlan
from penstock.errors import ConsumerNotOnline, InvalidParameter, Refused

from .environment import Environment, Inbox, eventually, numbers, running, send_all


async def fill(env: Environment, topic: str, per_queue: int) -> list[MessageQueue]:
    """Send this many messages to each queue."""
    async with env.producer() as producer:
        queues = sorted(await producer.queues(topic))
        for queue in queues:
            await producer.send_batch(
                [Message(topic, body) for body in numbers(per_queue)], queue=queue
            )
    return queues


async def test_create_update_and_delete_a_group(env: Environment) -> None:
    group = env.name("g")
    async with AsyncAdmin(env.nameservers) as admin:
        made = await admin.create_group(group, retries_max=3, orderly=True)
        assert set(made.brokers) == {"broker-a", "broker-b"}
        changed = await admin.update_group(group, broadcast_enabled=False)
        listed = {info.name: info for info in await admin.groups()}
        assert listed[group] == changed
        for settings in changed.brokers.values():
            assert (settings.retries_max, settings.orderly) == (3, True)
            assert not settings.broadcast_enabled
        assert "TOOLS_CONSUMER" not in listed
        assert "TOOLS_CONSUMER" in {info.name for info in await admin.groups(system=True)}
        assert await admin.delete_group(group) == ["broker-a", "broker-b"]
        assert group not in {info.name for info in await admin.groups()}


async def test_progress_without_a_committed_offset_is_none(env: Environment) -> None:
    topic, group = env.topic(queues=2), env.name("g")
    queues = await fill(env, topic, 5)
    async with AsyncAdmin(env.nameservers) as admin:
        await admin.create_group(group)
        progress = await admin.progress(group, topic)
        assert [at.queue for at in progress.queues] == queues
        assert {at.committed for at in progress.queues} == {None}
        assert {at.lag for at in progress.queues} == {None}
        assert progress.lag is None
        assert progress.lag_ms is None

        await admin.apply_reset(await admin.plan_reset(group, topic, {queues[0]: 0, queues[1]: 2}))
        by_queue = {at.queue: at for at in (await admin.progress(group, topic)).queues}
        assert (by_queue[queues[0]].committed, by_queue[queues[0]].lag) == (0, 5)
        assert (by_queue[queues[1]].committed, by_queue[queues[1]].lag) == (2, 3)
        assert by_queue[queues[1]].consumed_ms is not None
        assert by_queue[queues[2]].committed is None

        await admin.apply_reset(await admin.plan_reset(group, topic, "last"))
        progress = await admin.progress(group)
        assert (progress.lag, progress.lag_ms) == (0, 0)
        assert await admin.topics_of_group(group) == [topic]
        assert await admin.groups_of_topic(topic) == [group]


async def test_members_of_a_group_and_their_queues(env: Environment) -> None:
    topic, group = env.topic(queues=2), env.name("c")
    async with AsyncAdmin(env.nameservers) as admin:
        nothing = await admin.members(group)
        assert (nothing.members, nothing.subscriptions, nothing.model) == ((), (), None)
        consumer = env.consumer(start_at="first")
        consumer.subscribe(topic, tags="a || b")
        inbox = Inbox()
        consumer.on(topic, tags="a || b")(inbox)
        async with running(consumer):
            await eventually(lambda: _all_have_owners(admin, group, topic))
            found = await admin.members(group)
            (member,) = found.members
            assert (member.language, member.version_text) == ("PYTHON", "5.4.0")
            assert member.brokers == ("broker-a", "broker-b")
            assert found.model == "CLUSTERING"
            wanted = {at.topic: (at.kind, at.tags) for at in found.subscriptions}
            assert wanted[topic] == ("TAG", frozenset({"a", "b"}))
            info = await admin.running_info(group, member.client_id)
            assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
            assert {queue.topic for queue in info.mq_table} >= {topic}
            with pytest.raises(ConsumerNotOnline, match="nobody@nowhere"):
                await admin.running_info(group, "nobody@nowhere")


async def _all_have_owners(admin: AsyncAdmin, group: str, topic: str) -> bool:
    progress = await admin.progress(group, topic, owners=True)
    return bool(progress.queues) and all(at.client_id for at in progress.queues)


async def test_the_reset_of_an_offline_group_can_be_undone(env: Environment) -> None:
    topic, group = env.topic(queues=2), env.name("g")
    queues = await fill(env, topic, 10)
    async with AsyncAdmin(env.nameservers) as admin:
        await admin.create_group(group)
        first = await admin.plan_reset(group, topic, "first")
        assert [(move.queue, move.old, move.new) for move in first.moves] == [
            (queue, None, 0) for queue in queues
        ]
        assert {env.committed(topic, group, q.broker_name, q.queue_id) for q in queues} == {-1}
        result = await admin.apply_reset(first)
        assert (result.live, result.failed, result.undo.moves) == ((), (), ())

        await admin.apply_reset(await admin.plan_reset(group, topic, "last"))
        back = await admin.plan_reset(group, topic, -4)
        assert (back.skipped, back.repeated) == (0, 16)
        result = await admin.apply_reset(back)
        assert {(move.old, move.new) for move in result.moves} == {(10, 6)}
        assert env.progress(topic, group, 2) == 24

        on = await admin.plan_reset(group, topic, 100)
        assert {move.new for move in on.moves} == {10}
        undone = await admin.apply_reset(result.undo)
        assert {(move.old, move.new) for move in undone.moves} == {(6, 10)}
        assert env.progress(topic, group, 2) == 40


async def test_a_reset_to_a_time(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("g")
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        await send_all(producer, topic, numbers(3))
        messages = (await admin.browse(topic)).messages
        last_ms = messages[-1].store_ms
        await eventually(lambda: datetime.now().timestamp() * 1000 > last_ms + 20)
        await send_all(producer, topic, numbers(3))
        await admin.create_group(group)

        async def target(moment: datetime) -> int:
            (move,) = (await admin.plan_reset(group, topic, moment)).moves
            return move.new

        between = datetime.fromtimestamp(last_ms / 1000) + timedelta(milliseconds=5)
        assert await target(between) == 3
        assert await target(between - timedelta(days=1)) == 0
        assert await target(between + timedelta(days=1)) == 6
        plan = await admin.plan_reset(group, topic, between)
        await admin.apply_reset(plan)
        assert env.committed(topic, group, "broker-a", 0) == 3


async def test_a_reset_of_running_consumers(env: Environment) -> None:
    topic, group = env.topic(queues=2), env.name("c")
    await fill(env, topic, 5)
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with AsyncAdmin(env.nameservers) as admin, running(consumer):
        await inbox.count(20)
        await eventually(lambda: env.progress(topic, group, 2) == 20)
        result = await admin.apply_reset(await admin.plan_reset(group, topic, -2))
        assert result.live == ("broker-a", "broker-b")
        assert result.failed == ()
        assert {(move.old, move.new) for move in result.moves} == {(5, 3)}
        await inbox.count(28)
        again = {(m.queue_id, m.queue_offset) for m in inbox.messages[20:28]}
        assert {offset for _, offset in again} == {3, 4}
        await eventually(lambda: env.progress(topic, group, 2) == 20)


async def test_a_later_reset_replaces_a_pending_one(env: Environment) -> None:
    """A broker with a pending reset accepts commits and discards them."""
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("g")
    (queue,) = await fill(env, topic, 10)
    async with AsyncAdmin(env.nameservers) as admin:
        await admin.create_group(group)
        address = (await admin.broker("broker-a")).address
        fields = {
            "topic": topic, "group": group, "timestamp": "0", "isForce": "true", "queueId": "0",
            "offset": "2",
        }  # fmt: skip
        await admin.ask(address, 222, fields)
        result = await admin.apply_reset(await admin.plan_reset(group, topic, {queue: 7}))
        assert result.failed == ()
        assert env.committed(topic, group, "broker-a", 0) == 7


async def test_offsets_are_cloned_from_another_group(env: Environment) -> None:
    topic = env.topic(queues=2)
    source, group = env.name("source"), env.name("g")
    queues = await fill(env, topic, 10)
    async with AsyncAdmin(env.nameservers) as admin:
        await admin.create_group(source)
        await admin.create_group(group)
        with pytest.raises(InvalidParameter, match="has no offsets"):
            await admin.plan_clone(source, group, topic)
        place = {queue: number for number, queue in enumerate(queues)}
        await admin.apply_reset(await admin.plan_reset(source, topic, place))
        result = await admin.clone_offsets(source, group, topic)
        assert {move.queue: move.new for move in result.moves} == place
        assert env.progress(topic, group, 2) == sum(place.values())


async def test_invalid_resets_are_refused(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("g")
    (queue,) = await fill(env, topic, 3)
    async with AsyncAdmin(env.nameservers) as admin:
        with pytest.raises(InvalidParameter, match="has the offsets 0 to 3, not 4"):
            await admin.plan_reset(group, topic, {queue: 4})
        with pytest.raises(InvalidParameter, match="there is no queue 9"):
            await admin.plan_reset(group, topic, {MessageQueue(topic, "broker-a", 9): 0})
        with pytest.raises(InvalidParameter, match="is not a target of a reset"):
            await admin.plan_reset(group, topic, "middle")  # type: ignore[arg-type]
        plan = await admin.plan_reset(group, topic, "first")
        with pytest.raises(Refused, match=group):  # no broker knows the group
            await admin.apply_reset(plan)
        empty = await admin.apply_reset(ResetPlan(group, topic, ()))
        assert (empty.moves, empty.failed) == ((), ())


async def test_broadcasting_groups_can_not_be_reset(env: Environment) -> None:
    topic, group = env.topic(queues=1), env.name("c")
    await fill(env, topic, 1)
    inbox = Inbox()
    consumer = env.consumer(start_at="first", model="broadcast")
    consumer.on(topic)(inbox)
    async with AsyncAdmin(env.nameservers) as admin, running(consumer):
        await inbox.count(2)
        plan = await admin.plan_reset(group, topic, "first")
        with pytest.raises(Refused, match="broadcast"):
            await admin.apply_reset(plan)
