"""Broadcast: every consumer of a group gets every message, and keeps its own progress."""

from __future__ import annotations

import json
from pathlib import Path

from penstock import ReceivedMessage

from .environment import Environment, Inbox, eventually, numbers, running, send_all


async def test_every_consumer_gets_every_message(env: Environment) -> None:
    topic = env.topic()
    inboxes = [Inbox(), Inbox(), Inbox()]
    consumers = []
    for inbox in inboxes:
        consumer = env.consumer(model="broadcast", start_at="first")
        consumer.on(topic)(inbox)
        consumers.append(consumer)
    async with env.producer() as producer:
        await send_all(producer, topic, numbers(40))
        async with running(*consumers):
            await send_all(producer, topic, numbers(40, 100))
            for inbox in inboxes:
                await inbox.count(80)
    for inbox in inboxes:
        assert sorted(inbox.bodies, key=int) == [*numbers(40), *numbers(40, 100)]
    assert env.progress(topic, env.name("c")) == 0, "brokers keep no progress of it"


async def test_progress_is_stored_in_a_file_in_the_java_format(
    env: Environment, tmp_path: Path
) -> None:
    topic = env.topic(queues=2)
    path = tmp_path / "here" / "offsets.json"
    first, second = Inbox(), Inbox()
    async with env.producer() as producer:
        for inbox, bodies in ((first, numbers(40)), (second, numbers(40, 100))):
            await send_all(producer, topic, bodies)
            consumer = env.consumer(model="broadcast", start_at="first", offsets_path=path)
            consumer.on(topic)(inbox)
            async with running(consumer):
                await inbox.count(40)
    assert sorted(second.bodies, key=int) == numbers(40, 100), "goes on where it was"
    table = _offsets(path)
    assert sum(table.values()) == 80
    assert {(name, topic_) for name, topic_, _ in table} == {
        ("broker-a", topic), ("broker-b", topic)
    }  # fmt: skip


def _offsets(path: Path) -> dict[tuple[str, str, int], int]:
    """Java's offset file, whose keys are objects: they are quoted to make it valid JSON."""
    text = path.read_text()
    try:
        table = json.loads(text)["offsetTable"]
    except json.JSONDecodeError:
        import re

        quoted = re.sub(r"(\{[^{}]*\})\s*:", lambda m: json.dumps(m[1]) + ":", text)
        table = json.loads(quoted)["offsetTable"]
    found = {}
    for key, offset in table.items():
        queue = json.loads(key)
        found[queue["brokerName"], queue["topic"], queue["queueId"]] = offset
    return found


async def test_without_a_path_nothing_is_written(
    env: Environment, tmp_path: Path, monkeypatch: object
) -> None:
    monkeypatch.chdir(tmp_path)  # type: ignore[attr-defined]
    monkeypatch.setenv("HOME", str(tmp_path))  # type: ignore[attr-defined]
    topic = env.topic()
    inbox = Inbox()
    consumer = env.consumer(model="broadcast", start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer() as producer:
        await send_all(producer, topic, numbers(8))
        await inbox.count(8)
    assert list(tmp_path.iterdir()) == []


async def test_a_failed_message_is_dropped(env: Environment) -> None:
    """As in RocketMQ: there is no retry topic for one consumer of many."""
    topic, group = env.topic(), env.name("c")
    inbox = Inbox()
    calls: list[str] = []
    consumer = env.consumer(model="broadcast", start_at="first")

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        calls.append(message.body.decode())
        inbox.add(message)
        if message.body == b"0":
            raise RuntimeError("as a test wants it")

    async with running(consumer), env.producer() as producer:
        await send_all(producer, topic, numbers(8))
        await inbox.count(8)
        await send_all(producer, topic, numbers(8, 100))
        await inbox.count(16)
        await eventually(lambda: not any(state.in_work for state in consumer.queues()))
    assert sorted(calls, key=int) == [*numbers(8), *numbers(8, 100)]
    assert env.stored(f"%RETRY%{group}") == []
