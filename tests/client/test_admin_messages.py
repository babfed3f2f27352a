"""Admin on single messages: lookups, tracking, direct consumption, dead letters."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta

import pytest

from penstock import Message, ReceivedMessage
from penstock.client.admin.async_admin import AsyncAdmin, MessagePage, TrackState
from penstock.errors import BadFilter, ConsumerNotOnline, InvalidParameter, NoRoute

from .environment import Environment, Inbox, eventually, numbers, running, send_all


async def test_a_message_is_found_by_each_of_its_ids_and_keys(env: Environment) -> None:
    topic = env.topic(queues=2)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        big = b"x" * 100_000  # compressed in transit
        receipt = await producer.send(
            Message(topic, big, tags="a", keys=["k1", "k2"], properties={"colour": "blue"})
        )
        await send_all(producer, topic, numbers(10), keys=["k2"])
        found = [
            await eventually(lambda: admin.message_by_unique_id(topic, receipt.message_id)),
            await admin.message_by_offset_id(receipt.offset_id, topic=topic),
            await admin.find_message(topic, receipt.message_id),
            await admin.find_message(topic, receipt.offset_id),
            await admin.message_at(receipt.queue, receipt.queue_offset),
            *await admin.messages_by_key(topic, "k1"),
        ]
        assert len(found) == 6
        for message in found:
            assert message is not None
            assert message.body == big
            assert message.queue == receipt.queue
            assert message.queue_offset == receipt.queue_offset
            assert message.message_id == receipt.message_id
            assert message.properties["colour"] == "blue"
        same = await eventually(lambda: _at_least(admin, topic, "k2", 11))
        assert [m.store_ms for m in same] == sorted(m.store_ms for m in same)


async def _at_least(admin: AsyncAdmin, topic: str, key: str, count: int) -> list[ReceivedMessage]:
    found = await admin.messages_by_key(topic, key)
    return found if len(found) >= count else []


async def test_missing_messages_are_reported(env: Environment) -> None:
    topic = env.topic(queues=1)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        (receipt,) = await send_all(producer, topic, ["one"])
        assert await admin.find_message(topic, "no id at all") is None
        nowhere = receipt.offset_id[:-16] + "000000000FFFFFFF"
        assert await admin.message_by_offset_id(nowhere) is None
        assert await admin.find_message(topic, nowhere) is None
        assert await admin.messages_by_key(topic, "nothing") == []
        assert await admin.message_at(receipt.queue, 1_000) is None
        late = datetime.now() + timedelta(days=1)
        assert await admin.messages_by_key(topic, "one", since=late) == []
        assert await admin.dead_letters(env.name("nobody")) == MessagePage((), None)
        with pytest.raises(NoRoute):
            await admin.browse(env.name("nothing"))


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_topic_is_browsed_in_pages(env: Environment, newest_first: bool) -> None:
    topic = env.topic(queues=3)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        for number in range(100):
            await producer.send(Message(topic, str(number)))
        resume, pages = None, []
        while True:
            page = await admin.browse(topic, count_max=30, newest_first=newest_first, resume=resume)
            pages.append(page)
            resume = page.resume
            if resume is None:
                break
        assert [len(page.messages) for page in pages[:3]] == [30, 30, 30]
        messages = [message for page in pages for message in page.messages]
        assert sorted(int(m.body) for m in messages) == list(range(100))
        times = [message.store_ms for message in messages]
        assert times == sorted(times, reverse=newest_first)


async def test_a_topic_is_browsed_by_time_tags_and_filter(env: Environment) -> None:
    topic = env.topic(queues=2)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        for number in range(40):
            colour = {"colour": "blue" if number % 4 == 0 else "red"}
            tags = "even" if number % 2 == 0 else "odd"
            await producer.send(Message(topic, str(number), tags=tags, properties=colour))
        everything = (await admin.browse(topic, count_max=100)).messages
        assert len(everything) == 40
        middle = datetime.fromtimestamp(everything[20].store_ms / 1000)
        before = (await admin.browse(topic, until=middle, count_max=100)).messages
        after = (await admin.browse(topic, since=middle, count_max=100)).messages
        same = [m for m in everything if m.store_ms == everything[20].store_ms]
        assert len(before) + len(after) == 40 + len(same)
        assert len((await admin.browse(topic, tags="even", count_max=100)).messages) == 20
        blue = await admin.browse(topic, sql="colour = 'blue'", count_max=100)
        assert [int(m.body) % 4 for m in blue.messages] == [0] * 10
        one = everything[0].queue
        of_one = (await admin.browse(topic, queue=one, count_max=100)).messages
        assert [m.queue_offset for m in of_one] == list(range(len(of_one)))
        with pytest.raises(BadFilter):
            await admin.browse(topic, sql="colour = ")


async def test_following_a_topic(env: Environment) -> None:
    topic = env.topic(queues=2)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        await send_all(producer, topic, numbers(10))
        async with contextlib.aclosing(admin.follow(topic, start_at="first")) as messages:
            seen = []
            async for message in messages:
                seen.append(int(message.body))
                if len(seen) == 10:
                    await send_all(producer, topic, numbers(5, first=10))
                if len(seen) == 15:
                    break
            assert sorted(seen) == list(range(15))
        assert await admin.groups_of_topic(topic) == []
        with pytest.raises(BadFilter):
            await anext(admin.follow(topic, sql="colour = "))


async def test_the_consumption_of_a_message_is_tracked_by_group(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    other, stranger = env.name("other"), env.name("stranger")
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic, tags="wanted")(inbox)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        for tags in ("unwanted", "wanted"):
            await producer.send(Message(topic, tags, tags=tags))
        unwanted, wanted = (await admin.browse(topic)).messages
        for name, offset in ((other, 1), (stranger, 0)):
            await admin.create_group(name)
            plan = await admin.plan_reset(name, topic, {wanted.queue: offset})
            await admin.apply_reset(plan)
        async with running(consumer):
            await inbox.count(1)
            await eventually(lambda: env.committed(topic, group, "broker-a", 0) == 2)
            of_wanted = {t.group: (t.state, t.online) for t in await admin.track(wanted)}
            of_unwanted = {t.group: (t.state, t.online) for t in await admin.track(unwanted)}
        assert of_wanted == {
            group: (TrackState.CONSUMED, True),
            other: (TrackState.PENDING, False),
            stranger: (TrackState.PENDING, False),
        }
        assert of_unwanted == {
            group: (TrackState.FILTERED, True),
            other: (TrackState.CONSUMED, False),
            stranger: (TrackState.PENDING, False),
        }


async def test_a_message_is_consumed_directly(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        await producer.send(Message(topic, "hello"))
        (message,) = (await admin.browse(topic)).messages
        with pytest.raises(ConsumerNotOnline, match=group):
            await admin.consume_directly(group, message)
        async with running(consumer):
            await inbox.count(1)
            result = await admin.consume_directly(group, message)
            assert result.is_success
            assert result.client_id == (await admin.members(group)).members[0].client_id
            assert inbox.bodies == ["hello", "hello"]
            with pytest.raises(ConsumerNotOnline, match="nobody@nowhere"):
                await admin.consume_directly(group, message, "nobody@nowhere")


@pytest.mark.parametrize("to", ["group", "topic"])
async def test_dead_letters_are_resent(env: Environment, to: str) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    inbox = Inbox()
    fails = True
    consumer = env.consumer(start_at="first", retries_max=1)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> bool:
        inbox.add(message)
        return not fails

    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        sent = await producer.send(
            Message(topic, "hello", tags="a", keys=["k"], properties={"colour": "blue"})
        )
        async with running(consumer):
            page = await eventually(lambda: _dead(admin, group))
            assert page is not None
            (letter,) = page.messages
            assert (letter.message_id, letter.body) == (sent.message_id, b"hello")
            fails = False
            seen = len(inbox.messages)
            (receipt,) = await admin.resend_dead_letters(
                group, page.messages, to="group" if to == "group" else "topic"
            )
            assert receipt.queue.topic == (f"%RETRY%{group}" if to == "group" else topic)
            await inbox.count(seen + 1)
            again = inbox.messages[-1]
            assert (again.topic, again.body, again.tags) == (topic, b"hello", "a")
            assert (again.message_id, again.keys) == (sent.message_id, ["k"])
            assert again.properties["colour"] == "blue"
            assert again.reconsume_times == 0
            with pytest.raises(InvalidParameter, match="not a dead letter"):
                await admin.resend_dead_letters(group, (await admin.browse(topic)).messages)


async def _dead(admin: AsyncAdmin, group: str) -> MessagePage | None:
    page = await admin.dead_letters(group, newest_first=True)
    return page if page.messages else None
