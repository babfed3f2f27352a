"""Groups with members of our Python client: shares, order, resets, tools, and Java beside them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.client.consumer.async_consumer import AsyncConsumer
from penstock.client.consumer.dispatch.handlers import Retry
from penstock.client.consumer.queue_assignment import Strategy, strategy_of
from penstock.client.received_message import ReceivedMessage
from penstock.wire.bodies.client_bodies import MessageQueue

from .clients import mqadmin
from .clusters import Cluster
from .java_session import ClientError, JavaSession

pytestmark = [pytest.mark.compat, pytest.mark.slow]

QUEUES = 8


class Site:
    """The cluster under test, with Java's admin client and producer."""

    def __init__(self, java: JavaSession, cluster: Cluster, topic: str) -> None:
        self.java = java
        self.cluster = cluster
        self.topic = topic
        self.sent = 0

    def do(self, command: str, **arguments: Any) -> Any:
        return self.java.do(command, **arguments)

    def call(self, method: str, *args: Any) -> Any:
        return self.do("admin.call", admin="pygroups", method=method, args=list(args))

    def create(self, **config: Any) -> None:
        fields = {"topicName": self.topic, "readQueueNums": QUEUES, "writeQueueNums": QUEUES,
                  "perm": 6, **config}  # fmt: skip
        self.call("createAndUpdateTopicConfig", self.cluster.broker_address, fields)

    def send(self, count: int, **how: Any) -> None:
        messages = [{"topic": self.topic, "body": str(self.sent + n)} for n in range(count)]
        acked = self.do("producer.send", producer="pygroups", messages=messages, **how)
        assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
        self.sent += count

    def consumer(self, name: str, **options: Any) -> AsyncConsumer:
        given = {"group": self.topic, "start_at": "first", "instance_name": name, **options}
        return AsyncConsumer(self.cluster.namesrv, **given)


@pytest.fixture(scope="module")
def tools(java54: JavaSession, cluster: Cluster) -> Iterator[JavaSession]:
    java54.do("admin.start", admin="pygroups", namesrv=cluster.namesrv)
    java54.do("producer.start", producer="pygroups", namesrv=cluster.namesrv)
    yield java54
    java54.do("producer.stop", producer="pygroups")
    java54.do("admin.stop", admin="pygroups", later_ms=0)


@pytest.fixture
def java_offsets(tools: JavaSession) -> Path:
    """Where the JVM keeps the offsets of its broadcast consumers."""
    return tools.log.parent / "offsets"


@pytest.fixture
def site(tools: JavaSession, cluster: Cluster, fresh: str) -> Site:
    one = Site(tools, cluster, fresh)
    one.create()
    return one


async def until(look: Callable[[], Any], *, within_s: float = 40.0) -> None:
    """Wait until something is true; the last look is the assertion."""
    deadline = time.monotonic() + within_s
    while not look() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert look()


class Member:
    """A consumer that notes what it gets."""

    def __init__(self, site: Site, name: str, **options: Any) -> None:
        self.consumer = site.consumer(name, **options)
        self.topic = site.topic
        self.got: list[tuple[int, int]] = []
        self.consumer.on(site.topic)(self.handle)

    async def handle(self, message: ReceivedMessage) -> Retry | None:
        self.got.append((message.queue_id, int(message.body)))
        return None

    def queues(self) -> set[int]:
        return {s.queue.queue_id for s in self.consumer.queues() if s.queue.topic == self.topic}


@asynccontextmanager
async def joined(*members: Member) -> AsyncIterator[None]:
    for member in members:
        await member.consumer.start()
    try:
        yield
    finally:
        for member in members:
            await member.consumer.close()


def shared(*parts: set[int]) -> bool:
    """Whether the queues are all there, once each, and fairly shared."""
    sizes = [len(part) for part in parts]
    return sum(sizes) == len(set().union(*parts)) == QUEUES and max(sizes) - min(sizes) <= 1


def numbers(*members: Member) -> Counter[int]:
    return Counter(number for member in members for _, number in member.got)


def parts(*queues: set[int]) -> list[list[int]]:
    """Who has what, without saying who."""
    return sorted(map(sorted, queues))


def noted(name: str, topic: str, deals: dict[str, set[int]]) -> Strategy:
    """A strategy that notes what each of two members gets of a topic."""
    strategy = strategy_of(name)

    def deal(
        group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> Sequence[MessageQueue]:
        mine = strategy(group, client_id, queues, clients)
        if len(clients) == 2 and queues[0].topic == topic:
            deals[client_id] = {queue.queue_id for queue in mine}
        return mine

    return deal


@pytest.mark.parametrize("strategy", ["averagely", "circle", "sticky", "consistent_hash"])
def test_two_share_and_one_leaves(site: Site, strategy: str) -> None:
    async def body() -> None:
        deals: dict[str, set[int]] = {}
        dealt = noted(strategy, site.topic, deals)
        one, two = (Member(site, name, strategy=dealt) for name in ("one", "two"))
        async with joined(one, two):
            # A ring need not be fair: both have what they were dealt once they knew of each other.
            await until(lambda: len(deals) == 2)
            await until(lambda: parts(one.queues(), two.queues()) == parts(*deals.values()))
            assert one.queues() | two.queues() == set(range(QUEUES))
            assert strategy == "consistent_hash" or shared(one.queues(), two.queues())
            await asyncio.to_thread(site.send, 200)
            await until(lambda: set(numbers(one, two)) == set(range(200)))
            assert numbers(one, two).total() == 200, "nothing comes twice"
            await two.consumer.close()
            begun = time.monotonic()
            await until(lambda: shared(one.queues()))
            print(f"{strategy}: took over after {time.monotonic() - begun:.2f} s")
            await asyncio.to_thread(site.send, 100)
            await until(lambda: set(numbers(one, two)) == set(range(300)))
            assert numbers(one, two).total() == 300, "progress was handed over"

    asyncio.run(body())


class Picky(Member):
    """Fails the first two times on every seventh message."""

    async def handle(self, message: ReceivedMessage) -> Retry | None:
        number = int(message.body)
        if number % 7 == 0 and message.reconsume_times < 2:
            if number % 2:
                raise ValueError(f"{number} is picky")
            return Retry()
        return await super().handle(message)


def test_order_outlives_failures_and_new_members(site: Site) -> None:
    async def body() -> None:
        await asyncio.to_thread(site.send, 80)
        one, two = (Picky(site, name, orderly=True) for name in ("one", "two"))
        async with joined(one):
            await until(lambda: len(one.got) > 20)
            async with joined(two):
                await until(lambda: shared(one.queues(), two.queues()))
                await until(lambda: set(numbers(one, two)) == set(range(80)))
        assert numbers(one, two).total() == 80
        for queue in range(QUEUES):
            order = [number for q, number in one.got + two.got if q == queue]
            assert order == sorted(order), queue

    asyncio.run(body())


def test_a_hopeless_message_in_order_becomes_a_dead_letter(site: Site) -> None:
    async def body() -> None:
        one = Member(site, "one", orderly=True, retries_max=1)
        tried: list[int] = []

        async def handle(message: ReceivedMessage) -> None:
            tried.append(int(message.body))
            if message.body == b"0":
                raise ValueError("hopeless")

        one.consumer = site.consumer("one", orderly=True, retries_max=1)
        one.consumer.on(site.topic)(handle)
        place = {"how": "queue", "broker": site.cluster.broker, "queue_id": 3}
        await asyncio.to_thread(site.send, 2, **place)
        async with joined(one):
            await until(lambda: tried == [0, 0, 1])
            await until(lambda: [s.progress for s in one.consumer.queues() if s.received] == [2])

        def is_dead() -> bool:
            try:
                stats = site.call("examineTopicStats", f"%DLQ%{site.topic}")
            except ClientError:
                return False  # no such topic yet
            return [row["maxOffset"] for _, row in stats["offsetTable"]] == [1]

        await awaited(is_dead)

    asyncio.run(body())


def test_a_reset_by_mqadmin_reaches_it(site: Site) -> None:
    async def body() -> None:
        await asyncio.to_thread(site.send, 40)
        one = Member(site, "one")
        async with joined(one):
            await until(lambda: numbers(one).total() == 40)
            await asyncio.sleep(6)  # progress is at the broker
            await asyncio.to_thread(
                mqadmin, site.java, site.cluster.namesrv, "resetOffsetByTime",
                "-g", site.topic, "-t", site.topic, "-s", "0",
            )  # fmt: skip
            await until(lambda: numbers(one).total() >= 80)
            assert set(numbers(one).values()) == {2}
            await asyncio.to_thread(site.send, 10)
            await until(lambda: set(numbers(one)) == set(range(50)))

    asyncio.run(body())


def test_tools_see_it(site: Site) -> None:
    async def body() -> None:
        await asyncio.to_thread(site.send, 8)
        one = Member(site, "one")
        fails: list[str] = []

        async def handle(message: ReceivedMessage) -> None:
            one.got.append((message.queue_id, int(message.body)))
            if fails:
                raise ValueError(fails[0])

        one.consumer = site.consumer("one")
        one.consumer.on(site.topic)(handle)
        async with joined(one):
            await until(lambda: len(one.got) == 8)
            client = one.consumer._session.client_id
            info = await asyncio.to_thread(
                site.call, "getConsumerRunningInfo", site.topic, client, True
            )
            assert info["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
            assert "test_python_groups" in info["jstack"]
            status = await asyncio.to_thread(
                site.call, "getConsumeStatus", site.topic, site.topic, client
            )
            assert sum(offset for _, offset in status[client]) == 8
            [acked] = await asyncio.to_thread(
                site.do, "producer.send", producer="pygroups",
                messages=[{"topic": site.topic, "body": "8"}],
            )  # fmt: skip
            await until(lambda: len(one.got) == 9)
            await check_directly(site, client, acked, "CR_SUCCESS")
            assert numbers(one)[8] == 2
            fails.append("not today")
            await check_directly(site, client, acked, "CR_THROW_EXCEPTION")

    asyncio.run(body())


async def check_directly(site: Site, client: str, acked: Any, expected: str) -> None:
    result = await asyncio.to_thread(
        site.call, "consumeMessageDirectly", site.topic, client, site.topic, acked["msg_id"]
    )
    assert result["consumeResult"] == expected


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrently", "orderly"])
def test_java_and_python_share(site: Site, orderly: bool) -> None:
    def java_queues() -> set[int]:
        held = site.do("push.queues", consumer=site.topic, topic=site.topic)
        return {number for _, number in held}

    def java_numbers() -> Counter[int]:
        rows = site.do("push.received", consumer=site.topic)
        return Counter(int(row[3]) for row in rows)

    async def body() -> None:
        one = Member(site, "one", orderly=orderly)
        await asyncio.to_thread(
            site.do, "push.start", consumer=site.topic, namesrv=site.cluster.namesrv,
            group=site.topic, topics={site.topic: "*"}, orderly=orderly,
        )  # fmt: skip
        async with joined(one):
            await awaited(lambda: shared(one.queues(), java_queues()))
            await asyncio.to_thread(site.send, 200)
            await awaited(lambda: set(numbers(one) + java_numbers()) == set(range(200)))
            assert (numbers(one) + java_numbers()).total() == 200
            assert len(numbers(one)) > 50
            assert len(java_numbers()) > 50
        await awaited(lambda: shared(java_queues()))
        await asyncio.to_thread(site.send, 50)
        await awaited(lambda: set(numbers(one) + java_numbers()) == set(range(250)))
        assert (numbers(one) + java_numbers()).total() == 250
        two = Member(site, "two", orderly=orderly)
        async with joined(two):
            await awaited(lambda: shared(two.queues(), java_queues()))
            await asyncio.to_thread(site.do, "push.stop", consumer=site.topic)
            await until(lambda: shared(two.queues()))

    asyncio.run(body())


async def awaited(look: Callable[[], Any], *, within_s: float = 60.0) -> None:
    """As `until`, for what a JVM has to be asked: in a thread."""

    async def ask() -> Any:
        return await asyncio.to_thread(look)

    await _until(ask, within_s)


async def _until(ask: Callable[[], Awaitable[Any]], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not (seen := await ask()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    assert seen


def test_broadcast_offsets_are_java_s_both_ways(site: Site, java_offsets: Path) -> None:
    """Java begins, Python goes on with its file, and Java with Python's."""

    def java(count: int) -> list[int]:
        site.do(
            "push.start", consumer=site.topic, namesrv=site.cluster.namesrv, group=site.topic,
            topics={site.topic: "*"}, broadcast=True,
        )  # fmt: skip
        rows = site.do("push.received", consumer=site.topic, count=count, within_ms=30_000)
        time.sleep(1)  # whatever else comes
        rows = site.do("push.received", consumer=site.topic)
        site.do("push.stop", consumer=site.topic)
        return sorted(int(row[3]) for row in rows)

    async def body() -> None:
        await asyncio.to_thread(site.send, 40)
        assert await asyncio.to_thread(java, 40) == list(range(40))
        [path] = java_offsets.rglob(f"{site.topic}/offsets.json")
        await asyncio.to_thread(site.send, 20)
        one = Member(site, "one", model="broadcast", offsets_path=path)
        async with joined(one):
            await until(lambda: set(numbers(one)) == set(range(40, 60)))
        assert numbers(one).total() == 20
        await asyncio.to_thread(site.send, 20)
        assert await asyncio.to_thread(java, 20) == list(range(60, 80))

    asyncio.run(body())


def test_a_consumer_without_queues_says_why(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        members = [Member(site, f"m{n}", heartbeat_ms=2_000) for n in range(QUEUES + 1)]
        async with joined(*members):
            last = members[-1]
            await until(lambda: shared(*(m.queues() for m in members[:-1])))
            await until(lambda: "m0 has 1" in caplog.text, within_s=10)
            assert f"its {QUEUES} queues go to {QUEUES} of the {QUEUES + 1} members" in caplog.text
            assert not last.queues()
            assert len(await last.consumer.explain()) == 1
            assert "no new messages" in (await members[0].consumer.explain())[0]

    asyncio.run(body())


def test_a_filter_that_fits_nothing_says_so(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        await asyncio.to_thread(site.send, 16)
        one = site.consumer("one", heartbeat_ms=2_000)
        one.subscribe(site.topic, "gold")
        async with one:
            await until(lambda: "has matched 'gold' (TAG)" in caplog.text)

    asyncio.run(body())


def test_members_that_subscribe_differently_say_so(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        one, two = (site.consumer(name, heartbeat_ms=2_000) for name in ("one", "two"))
        one.subscribe(site.topic, "gold")
        two.subscribe(site.topic, "silver")
        async with one, two:
            await until(lambda: f"subscribe to {site.topic} differently" in caplog.text)

    asyncio.run(body())


def test_a_topic_that_is_missing_is_said_and_taken_when_it_appears(
    tools: JavaSession, cluster: Cluster, fresh: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        site = Site(tools, cluster, fresh)
        one = Member(site, "one", heartbeat_ms=1_000)
        async with joined(one):
            await until(lambda: f"no broker has the topic '{fresh}'" in caplog.text)
            await asyncio.to_thread(site.create)
            await until(lambda: shared(one.queues()), within_s=10)
            await asyncio.to_thread(site.send, 10)
            await until(lambda: numbers(one).total() == 10)

    asyncio.run(body())
