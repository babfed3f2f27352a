"""Find, explain and resend messages, on Penstock's and Apache's servers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial

from penstock import AsyncTransactionProducer, Message, ReceivedMessage
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.diagnosis import (
    Explanation,
    FactKind,
    FactStatus,
    GroupExplanation,
    GroupVerdict,
    ResendProgress,
    SearchResult,
    Verdict,
    explain_group,
    explain_message,
    find_messages,
    plan_resend,
    resend,
    select_dead_letters,
    select_messages,
)

from .environment import Environment, Inbox, eventually, running, send_all


async def until_verdict(
    admin: AsyncAdmin, message_id: str, group: str, verdict: Verdict, topic: str | None = None
) -> Explanation:
    """Explain a message until the verdict is this one."""
    last: list[Explanation] = []

    async def look() -> Explanation | None:
        last[:] = [await explain_message(admin, message_id, group, topic)]
        return last[0] if last[0].verdict is verdict else None

    try:
        found = await eventually(look, 30)
    except AssertionError:
        raise AssertionError(last) from None
    assert found is not None
    return found


async def until_group(admin: AsyncAdmin, group: str, verdict: GroupVerdict) -> GroupExplanation:
    """Explain a group until the verdict is this one."""
    last: list[GroupExplanation] = []

    async def look() -> GroupExplanation | None:
        last[:] = [await explain_group(admin, group)]
        return last[0] if last[0].verdict is verdict else None

    try:
        found = await eventually(look, 30)
    except AssertionError:
        raise AssertionError(last) from None
    assert found is not None
    return found


def statuses(explanation: Explanation) -> dict[FactKind, FactStatus]:
    return {fact.kind: fact.status for fact in explanation.facts}


async def test_a_message_is_found_by_whatever_is_known_of_it(env: Environment) -> None:
    topic, key = env.topic(queues=1, brokers=["broker-a"]), env.name("key")
    env.topic("second", queues=1, brokers=["broker-a"])
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        sent = await producer.send(Message(topic, "hello", keys=[key]))
        place = f"{topic}/broker-a/0@{sent.queue_offset}"
        for what in (sent.message_id, key):
            found = await eventually(partial(found_any, admin, what, topic))
            assert found is not None
            assert [m.message_id for m in found.messages] == [sent.message_id]
            everywhere = await find_messages(admin, what, topics_max=10_000)
            assert [m.message_id for m in everywhere.messages] == [sent.message_id]
            assert not everywhere.is_partial
            assert topic in everywhere.topics
        for what in (sent.offset_id, place):
            (message,) = (await find_messages(admin, what)).messages
            assert message.body == b"hello"
        (by_key,) = (await find_messages(admin, key=key, topic=topic)).messages
        (by_time,) = (await find_messages(admin, topic=topic)).messages
        assert by_key.message_id == by_time.message_id == sent.message_id
        bounded = await find_messages(admin, "no such id", topics_max=1)
        assert bounded.messages == ()
        assert "topics were not searched" in bounded.partial[0]


async def found_any(admin: AsyncAdmin, what: str, topic: str) -> SearchResult | None:
    found = await find_messages(admin, what, topic=topic)
    return found if found.messages else None


async def test_consumed_filtered_and_not_subscribed(env: Environment) -> None:
    topic, other, group = env.topic(queues=1), env.topic("other", queues=1), env.name("c")
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic, tags="wanted")(inbox)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        wanted = await producer.send(Message(topic, "1", tags="wanted"))
        unwanted = await producer.send(Message(topic, "2", tags="unwanted"))
        elsewhere = await producer.send(Message(other, "3"))
        before = await until_verdict(admin, wanted.message_id, group, Verdict.NO_GROUP, topic)
        assert before.message is not None
        assert before.message.text == f"{topic}/{wanted.queue.broker_name}/0@{wanted.queue_offset}"
        async with running(consumer):
            await inbox.count(1)
            done = await until_verdict(admin, wanted.message_id, group, Verdict.CONSUMED)
            assert set(statuses(done).values()) == {FactStatus.OK}
            assert done.is_consumed
            filtered = await until_verdict(admin, unwanted.message_id, group, Verdict.FILTERED)
            assert "'unwanted'" in filtered.text
            assert statuses(filtered)[FactKind.FILTER] is FactStatus.PROBLEM
            not_mine = await until_verdict(
                admin, elsewhere.message_id, group, Verdict.NOT_SUBSCRIBED, other
            )
            assert statuses(not_mine)[FactKind.SUBSCRIPTION] is FactStatus.PROBLEM
        late = await producer.send(Message(topic, "4", tags="wanted"))
        gone = await until_verdict(admin, late.message_id, group, Verdict.NO_MEMBER, topic)
        assert gone.command == f"penstock explain group {group}"


async def test_an_sql_filter_is_evaluated_by_the_broker(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    consumer = env.consumer(start_at="first")
    inbox = Inbox()
    consumer.on(topic, sql="colour = 'blue'")(inbox)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        red = await producer.send(Message(topic, "1", properties={"colour": "red"}))
        blue = await producer.send(Message(topic, "2", properties={"colour": "blue"}))
        async with running(consumer):
            await inbox.count(1)
            await until_verdict(admin, blue.message_id, group, Verdict.CONSUMED, topic)
            await until_verdict(admin, red.message_id, group, Verdict.FILTERED, topic)


async def test_in_work_behind_and_paused(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    release = asyncio.Event()
    consumer = env.consumer(start_at="first", concurrency=1)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        await release.wait()

    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        first, second = [await producer.send(Message(topic, body)) for body in "12"]
        async with running(consumer):
            try:
                busy = await until_verdict(admin, first.message_id, group, Verdict.IN_WORK, topic)
                assert ", in work for " in busy.text
                behind = await until_verdict(
                    admin, second.message_id, group, Verdict.IN_WORK, topic
                )
                assert f"from offset {first.queue_offset} on" in behind.text
                (fact,) = [f for f in behind.facts if f.kind is FactKind.PROGRESS]
                assert fact.evidence["offset"] == second.queue_offset
            finally:
                release.set()
            await until_verdict(admin, second.message_id, group, Verdict.CONSUMED, topic)
            healthy = await until_group(admin, group, GroupVerdict.HEALTHY)
            assert {fact.status for fact in healthy.facts} == {FactStatus.OK}
            consumer.pause(topic)
            await until_group(admin, group, GroupVerdict.PAUSED)
            third = await producer.send(Message(topic, "3"))
            await until_verdict(admin, third.message_id, group, Verdict.PAUSED, topic)
        await until_group(admin, group, GroupVerdict.NO_MEMBER)


async def test_retries_and_dead_letters(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    inbox = Inbox()
    consumer = env.consumer(start_at="first", retries_max=2)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> bool:
        inbox.add(message)
        return message.body == b"good"

    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        bad = await producer.send(Message(topic, "bad"))
        async with running(consumer):
            retrying = await until_verdict(admin, bad.message_id, group, Verdict.RETRYING, topic)
            assert statuses(retrying)[FactKind.RETRY] is FactStatus.PROBLEM
            dead = await until_verdict(admin, bad.message_id, group, Verdict.DEAD_LETTER, topic)
            assert dead.command == f"penstock dlq resend {group} --id {bad.message_id}"
            (letter,) = (await admin.dead_letters(group)).messages
            same = await explain_message(admin, letter.offset_id, group)
            assert same.verdict is Verdict.DEAD_LETTER
            assert same.message is not None
            assert same.message.topic == topic
            group_state = await until_group(admin, group, GroupVerdict.DEAD_LETTERS)
            assert group_state.command == f"penstock dlq list {group}"


async def test_delayed_messages_and_transactions(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    async with (
        AsyncAdmin(env.nameservers) as admin,
        env.producer() as producer,
        env.make(AsyncTransactionProducer) as sender,
    ):
        later = await producer.send(Message(topic, "later", delay=timedelta(hours=1)))
        delayed = await until_verdict(admin, later.message_id, group, Verdict.DELAYED, topic)
        assert "59 min" in delayed.text or "in 1 h" in delayed.text
        anywhere = await explain_message(admin, later.message_id, group)
        assert anywhere.verdict is Verdict.DELAYED

        half = await sender.prepare(Message(topic, "half"))
        await until_verdict(admin, half.message_id, group, Verdict.HALF, topic)
        await sender.rollback(half)
        await until_verdict(admin, half.message_id, group, Verdict.ROLLED_BACK, topic)


async def test_broadcast_groups(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    inbox = Inbox()
    consumer = env.consumer(start_at="first", model="broadcast")
    consumer.on(topic)(inbox)
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        sent = await producer.send(Message(topic, "hello"))
        async with running(consumer):
            await inbox.count(1)
            await until_verdict(admin, sent.message_id, group, Verdict.CONSUMED, topic)


async def test_messages_that_do_not_exist(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        (sent,) = await send_all(producer, topic, ["one"])
        missing = await explain_message(admin, "0" * 34, group, topic)
        assert missing.verdict is Verdict.NOT_FOUND
        ahead = await explain_message(admin, f"{topic}/broker-a/0@7", group)
        assert ahead.verdict is Verdict.NOT_FOUND
        assert "the next offset is 1" in ahead.facts[0].text
        assert (await explain_message(admin, "x", group, env.name("nothing"))).verdict in (
            Verdict.NOT_FOUND,
            Verdict.NO_ROUTE,
        )
        assert sent.queue_offset == 0


async def test_members_with_different_subscriptions(env: Environment) -> None:
    topic, group = env.topic(queues=2, brokers=["broker-a"]), env.name("c")
    consumers = []
    for tags in ("a", "b"):
        consumer = env.consumer(start_at="first")
        consumer.on(topic, tags=tags)(Inbox())
        consumers.append(consumer)
    async with AsyncAdmin(env.nameservers) as admin, running(*consumers):
        found = await until_group(admin, group, GroupVerdict.DIFFERENT_SUBSCRIPTIONS)
        assert ": a, " in found.text
        assert ": b)" in found.text


async def test_a_selection_of_dead_letters_is_sent_again(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    inbox = Inbox()
    fails = True
    consumer = env.consumer(start_at="first", retries_max=0)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> bool:
        inbox.add(message)
        return not fails

    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        nothing = await select_dead_letters(admin, group, ids=["missing"])
        assert (nothing.messages, len(nothing.partial)) == ((), 1)
        ids = []
        for number in range(6):
            tags = "odd" if number % 2 else "even"
            sent = await producer.send(Message(topic, str(number), tags=tags, keys=[f"k{number}"]))
            ids.append(sent.message_id)
        async with running(consumer):
            await eventually(partial(count_dead, admin, group, 6))
            fails = False
            by_tag = await select_dead_letters(admin, group, tags="odd")
            assert sorted(m.body for m in by_tag.messages) == [b"1", b"3", b"5"]
            by_key = await select_dead_letters(admin, group, key="k2")
            assert [m.body for m in by_key.messages] == [b"2"]
            few = await select_dead_letters(admin, group, count_max=2)
            assert (len(few.messages), len(few.partial)) == (2, 1)
            chosen = await select_dead_letters(admin, group, ids=[ids[0], ids[4], "missing"])
            assert sorted(m.body for m in chosen.messages) == [b"0", b"4"]
            assert chosen.partial == ("the dead letter missing was not found",)

            seen: list[ResendProgress] = []
            plan = await plan_resend(admin, chosen.messages, group=group)
            assert plan.targets == {f"%RETRY%{group}": 2}
            assert len(inbox.messages) == 6, "a plan sends nothing"
            report = await resend(admin, plan, rate=100, progress=seen.append)
            assert report.is_complete
            assert {receipt.message_id for _, receipt in report.sent} == {ids[0], ids[4]}
            assert seen[-1] == ResendProgress(2, 0, 2)
            await inbox.count(8)
            again = await until_verdict(admin, ids[0], group, Verdict.CONSUMED, topic)
            assert "sent again" in again.text

            fresh = await select_messages(admin, topic, key="k1")
            report = await resend(admin, await plan_resend(admin, fresh.messages))
            assert report.sent[0][1].queue.topic == topic
            await inbox.count(9)
            assert inbox.messages[-1].body == b"1"


async def count_dead(admin: AsyncAdmin, group: str, count: int) -> bool:
    return len((await select_dead_letters(admin, group)).messages) == count


async def test_groups_that_do_not_exist_or_may_not_consume(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    async with AsyncAdmin(env.nameservers) as admin, env.producer() as producer:
        assert (await explain_group(admin, group)).verdict is GroupVerdict.NO_GROUP
        sent = await producer.send(Message(topic, "hello"))
        await admin.create_group(group)
        assert (await explain_group(admin, group)).verdict is GroupVerdict.NEVER_CONSUMED
        await until_verdict(admin, sent.message_id, group, Verdict.NO_MEMBER, topic)
        await admin.update_group(group, consume_enabled=False)
        assert (await explain_group(admin, group)).verdict is GroupVerdict.CONSUME_DISABLED
        await until_verdict(admin, sent.message_id, group, Verdict.CONSUME_DISABLED, topic)
