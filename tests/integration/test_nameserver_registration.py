"""Registration with all NameServers: none delays the others, and a restarted one is found again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.clock import LoopClock
from penstock.config import BrokerConfig, LiveSettings, Settings
from penstock.config.replication_settings import ReplicationConfig
from penstock.server.registration.nameserver_registration import (
    NameServerRegistration,
    parse_nameservers,
)
from penstock.testing.virtual_clock import VirtualClock
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, QueueData, TopicConfig, TopicRouteData
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody, body_crc32, decode_register
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from tests.integration.loops import Frame, Server, Wire, serving

REGISTER, UNREGISTER, SINGLE, MEMBERS = 103, 104, 217, 901
MASTER_FIELDS, MASTER = ("masterAddr", "haServerAddr"), ("10.0.0.1:10911", "10.0.0.1:10912")


class Topics:
    """The topics that a broker registers."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.version = DataVersion(counter=1, timestamp=5)
        self.described = 0

    def add(self, name: str) -> None:
        self.names.append(name)
        self.version = self.version.next(6)

    def describe(self) -> RegisterBrokerBody:
        self.described += 1
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                topic_config_table={name: TopicConfig(topic_name=name) for name in self.names},
                data_version=self.version,
            )
        )


class NameServer:
    """Records its requests and answers with `reply`; who has a broker name is `members`."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.reply: dict[str, Any] = {}
        self.members: dict[str, Any] = {}
        self.code = 0
        self.codes: dict[int, int] = {}  # by request
        self.silent = False
        self.heard = asyncio.Event()

    async def serve(self, wire: Wire) -> None:
        while True:
            frame = await wire.read()
            if frame.code == MEMBERS:
                wire.answer(frame, **self.members)
                continue
            self.frames.append(frame)
            self.heard.set()
            if not self.silent:
                wire.answer(frame, self.codes.get(frame.code, self.code), **self.reply)

    async def next(self) -> Frame:
        """The next frame."""
        await self.heard.wait()
        self.heard.clear()
        return self.frames[-1]

    def topics(self) -> list[set[str]]:
        """The topics of each registration."""
        return [
            set(
                decode_register(
                    frame.body, compressed=False, version=493
                ).topic_config_serialize_wrapper.topic_config_table
            )
            for frame in self.frames
            if frame.code == REGISTER
        ]


def settings(*addresses: str, **broker: Any) -> LiveSettings:
    return LiveSettings(Settings(broker=BrokerConfig(nameservers=";".join(addresses), **broker)))


@asynccontextmanager
async def registered_at(
    *addresses: str,
    topics: Topics,
    clock: VirtualClock | None = None,
    on_order_config: Callable[[Mapping[str, str]], None] | None = None,
    **broker: Any,
) -> AsyncIterator[NameServerRegistration]:
    registration = NameServerRegistration(
        settings(*addresses, **broker),
        topics.describe,
        "10.0.0.7:10911",
        "10.0.0.7:10912",
        on_order_config=on_order_config,
        clock=clock,
    )
    registration.start()
    try:
        yield registration
    finally:
        await registration.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_registration_matches_apache_and_stop_unregisters() -> None:
    async def body() -> None:
        names = NameServer()
        names.reply = {"body": b'{"table":{"orders":"broker-a:8"}}'}
        async with serving(names.serve) as server:
            topics = Topics("a", "b")
            taken: list[Mapping[str, str]] = []
            async with registered_at(
                server.address, topics=topics, on_order_config=taken.append, id=1, cluster="C"
            ) as registration:
                assert await registration.first_round()
                assert taken == [{"orders": "broker-a:8"}]
                frame = names.frames[0]
                assert frame.ext == {
                    "brokerName": "broker-a", "brokerAddr": "10.0.0.7:10911", "clusterName": "C",
                    "haServerAddr": "10.0.0.7:10912", "brokerId": "1",
                    "enableActingMaster": "false", "compressed": "false",
                    "bootTimestamp": str(registration.name.booted_ms),
                    "bodyCrc32": str(body_crc32(frame.body)),
                }  # fmt: skip
                assert names.topics() == [{"a", "b"}]
                assert registration.not_ready() is None
                (state,) = registration.states
                assert state.registered
                assert state.success_ms > 0
            assert names.frames[-1].code == UNREGISTER
            assert names.frames[-1].ext == {
                "brokerName": "broker-a", "brokerAddr": "10.0.0.7:10911", "clusterName": "C",
                "brokerId": "1",
            }  # fmt: skip

    asyncio.run(body())


def test_registration_is_periodic_and_encoded_once_per_version() -> None:
    async def body() -> None:
        clock, names, topics = VirtualClock(), NameServer(), Topics("a", "b")
        async with (
            serving(names.serve) as server,
            registered_at(server.address, topics=topics, clock=clock) as registration,
        ):
            await registration.first_round()
            for count in range(2, 5):
                names.heard.clear()
                await clock.elapse(30_001)
                await names.next()
                await until(lambda: not registration.states[0].failures)
                assert len(names.frames) == count
            assert registration.register_request()[1] is registration.register_request()[1]

    asyncio.run(body())


@pytest.mark.parametrize("ha_address", ["", "10.0.0.1:10912"])
def test_a_slave_registers_every_second_until_it_knows_its_master(ha_address: str) -> None:
    async def body() -> None:
        clock, names = VirtualClock(), NameServer()
        async with serving(names.serve) as server:
            config = settings(server.address, id=1)
            replication = ReplicationConfig(role="slave", master=ha_address)
            config.current = msgspec.structs.replace(config.current, replication=replication)
            found: list[tuple[str, str]] = []
            registration = NameServerRegistration(
                config,
                Topics("a").describe,
                "10.0.0.7:10911",
                "10.0.0.7:10912",
                on_master=lambda *addresses: found.append(addresses),
                clock=clock,
            )
            await registration.first_round()
            for count in range(2, 2 if ha_address else 5):
                names.heard.clear()
                await clock.elapse(1_001)
                await names.next()
                assert len(names.frames) == count
                if count == 3:
                    names.reply = {"ext": dict(zip(MASTER_FIELDS, MASTER, strict=True))}
            await until(lambda: found == ([] if ha_address else [MASTER]))
            count = len(names.frames)
            await clock.elapse(20_000)
            assert len(names.frames) == count
            names.heard.clear()
            await clock.elapse(10_001)
            await names.next()
            await registration.close()

    asyncio.run(body())


def test_changes_are_registered_at_once_and_coalesced() -> None:
    async def body() -> None:
        clock, names, topics = VirtualClock(), NameServer(), Topics("a", "b")
        async with (
            serving(names.serve) as server,
            registered_at(server.address, topics=topics, clock=clock) as registration,
        ):
            await registration.first_round()
            for n in range(100):
                topics.add(f"t{n}")
                registration.register_soon()
            await clock.elapse(0)
            await until(lambda: len(names.topics()[-1]) == 102)
            assert len(names.frames) <= 3

    asyncio.run(body())


def test_few_new_topics_are_registered_singly_between_full_registrations() -> None:
    async def body() -> None:
        clock, names, topics = VirtualClock(), NameServer(), Topics("a", "b")
        async with (
            serving(names.serve) as server,
            registered_at(server.address, topics=topics, clock=clock) as registration,
        ):
            await registration.first_round()
            registration._encode_ms = 1_000  # a large table: the next one has to wait 10 s
            for name in ("new", "newer"):
                topics.add(name)
            await registration.register_topics(
                ("new", "newer", "gone again"), clock.now_ms() + 3_000
            )
            singles = [frame for frame in names.frames if frame.code == SINGLE]
            assert [frame.ext for frame in singles] == [{"topic": "new"}, {"topic": "newer"}]
            route = fastjson.decode(singles[0].body, TopicRouteData)
            assert route.queue_datas == [
                QueueData(broker_name="broker-a", read_queue_nums=16, write_queue_nums=16, perm=6)
            ]
            assert len(names.topics()) == 1

    asyncio.run(body())


@pytest.mark.parametrize(
    "why", ["no topic is named", "too many topics", "single topics are not supported"]
)
def test_full_table_is_registered_where_single_topics_are_not_enough(why: str) -> None:
    async def body() -> None:
        names, topics = NameServer(), Topics("a", "b")
        async with (
            serving(names.serve) as server,
            registered_at(server.address, topics=topics) as registration,
        ):
            await registration.first_round()
            new = [f"t{n}" for n in range(33 if why == "too many topics" else 1)]
            for name in new:
                topics.add(name)
            if why == "single topics are not supported":
                names.codes[SINGLE] = 3
            named = () if why == "no topic is named" else tuple(new)
            deadline_ms = LoopClock().now_ms() + 20_000
            calls = [registration.register_topics(named, deadline_ms) for _ in range(5)]
            await asyncio.gather(*calls)
            assert names.topics()[-1] == {"a", "b", *new}
            assert len(names.topics()) <= 3, "five waiting calls share a round"

    asyncio.run(body())


def test_a_change_during_a_registration_waits_for_the_next_one() -> None:
    async def body() -> None:
        names, topics = NameServer(), Topics("a", "b")
        async with (
            serving(names.serve) as server,
            registered_at(server.address, topics=topics) as registration,
        ):
            await registration.first_round()
            names.silent = True
            registration.register_soon()
            await until(lambda: len(names.frames) == 2)
            topics.names.remove("b")
            topics.version = topics.version.next(7)
            registration_result = registration.register_topics((), LoopClock().now_ms() + 20_000)
            names.silent = False
            server.wires[0].answer(names.frames[1])
            await registration_result
            assert names.topics()[1:] == [{"a", "b"}, {"a"}]

    asyncio.run(body())


def test_nameservers_that_do_not_answer_are_waited_for_until_the_deadline() -> None:
    async def body() -> None:
        clock, alive, mute, topics = VirtualClock(), NameServer(), NameServer(), Topics("a", "b")
        async with serving(alive.serve) as one, serving(mute.serve) as two:
            async with serving(alive.serve) as gone:
                refused = gone.address
            async with registered_at(
                refused, one.address, two.address, topics=topics, clock=clock
            ) as registration:
                await registration.first_round()
                topics.add("c")
                await registration.register_topics(
                    ("c",), clock.now_ms() + 3_000
                )  # the one that refuses is skipped
                mute.silent = True
                registration_result = registration.register_topics(("c",), clock.now_ms() + 3_000)
                await until(lambda: len(mute.frames) == 3)
                await clock.elapse(2_999)
                assert not registration_result.done()
                await clock.elapse(1)
                await registration_result
                mute.silent = False

    asyncio.run(body())


def test_close_cancels_waiting_registrations() -> None:
    async def body() -> None:
        names, topics = NameServer(), Topics("a", "b")
        async with serving(names.serve) as server:
            async with registered_at(server.address, topics=topics) as registration:
                await registration.first_round()
                names.silent = True
                registration_result = registration.register_topics(
                    ("a",), LoopClock().now_ms() + 60_000
                )
                await until(lambda: len(names.frames) == 2)
                names.silent = False
            assert registration_result.cancelled()
            await registration.register_topics(("a",), LoopClock().now_ms() + 60_000)
        async with registered_at(topics=topics) as lonely:
            await lonely.register_topics(("a",), LoopClock().now_ms() + 60_000)

    asyncio.run(body())


def test_dead_nameserver_does_not_delay_others() -> None:
    async def body() -> None:
        clock, alive, mute = VirtualClock(), NameServer(), NameServer()
        mute.silent = True
        async with serving(alive.serve) as one, serving(mute.serve) as two:
            async with serving(alive.serve) as gone:
                refused = gone.address
            topics = Topics("a", "b")
            async with registered_at(
                refused, two.address, one.address, topics=topics, clock=clock
            ) as registration:
                await alive.next()
                await mute.next()
                assert registration.not_ready() is None or not registration.states[2].registered
                round_one = asyncio.ensure_future(registration.first_round())
                await until(lambda: registration.states[2].registered)
                await until(lambda: registration.states[0].tried)
                assert not round_one.done()  # the silent one may still answer
                await clock.elapse(6_001)
                assert await round_one
                assert [state.registered for state in registration.states] == [False, False, True]
                assert "refused" in registration.states[0].error
                assert "no response" in registration.states[1].error

    asyncio.run(body())


def test_failures_are_logged_once_and_retried_with_back_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        clock, names, topics = VirtualClock(), NameServer(), Topics("a", "b")
        names.code, names.reply = 16, {"remark": "who are you"}
        async with (
            serving(names.serve) as server,
            registered_at(server.address, topics=topics, clock=clock) as registration,
        ):
            assert not await registration.first_round()
            assert "who are you" in (registration.not_ready() or "")
            for count, wait_ms in ((2, 1000), (3, 2000), (4, 4000), (5, 8000)):
                await clock.elapse(wait_ms + 1)
                await until(lambda: registration.states[0].failures == count)  # noqa: B023
                assert len(names.frames) == count
            names.code, names.reply = 0, {}
            await clock.elapse(16_001)
            await until(lambda: registration.states[0].registered)
            assert registration.not_ready() is None

    with caplog.at_level(logging.INFO):
        asyncio.run(body())
    said = [
        r.message
        for r in caplog.records
        if r.name == "penstock.server.registration.nameserver_registration"
    ]
    assert len(said) == 2
    assert "NO_PERMISSION: who are you" in said[0]
    assert said[1].startswith("registered with")


def test_restarted_nameserver_is_registered_with_again_at_once() -> None:
    async def body() -> None:
        clock, names, topics = VirtualClock(), NameServer(), Topics("a", "b")
        server = Server(names.serve)
        await server.start()
        async with registered_at(server.address, topics=topics, clock=clock) as registration:
            await registration.first_round()
            await server.stop()
            await until(lambda: not registration.states[0].registered)
            again = Server(names.serve)
            await again.start(server.port)
            await clock.elapse(2_000)  # far below the period
            await until(lambda: registration.states[0].registered)
            await registration.close()
            await again.stop()

    asyncio.run(body())


def test_nameserver_that_closes_connections_is_retried_once_a_second() -> None:
    async def body() -> None:
        clock, topics = VirtualClock(), Topics("a", "b")
        heard: list[Frame] = []

        async def rude(wire: Wire) -> None:
            heard.append(await wire.read())
            wire.answer(heard[-1])

        async with (
            serving(rude) as server,
            registered_at(server.address, topics=topics, clock=clock),
        ):
            for _ in range(5):
                await clock.elapse(1000)
            assert 1 <= len(heard) <= 6

    asyncio.run(body())


def test_broker_without_nameservers_is_ready() -> None:
    async def body() -> None:
        async with registered_at(topics=Topics("a")) as registration:
            assert await registration.first_round()
            assert registration.not_ready() is None
            registration.register_soon()

    asyncio.run(body())


def test_stop_is_bounded_when_no_nameserver_answers() -> None:
    async def body() -> None:
        clock, names = VirtualClock(), NameServer()
        async with serving(names.serve) as server:
            registration = NameServerRegistration(
                settings(server.address), Topics("a").describe, "h:1", "h:2", clock=clock
            )
            await registration.first_round()
            names.silent = True
            stopping = asyncio.ensure_future(registration.close())
            await until(lambda: len(names.frames) == 2)
            await clock.elapse(3_001)
            await clock.elapse(1_001)
            await stopping

    asyncio.run(body())


def test_period_stays_within_the_expiry_of_nameservers() -> None:
    for wanted, used in ((1, 10_000), (25_000, 25_000), (900_000, 60_000)):
        live = settings(register_ms=wanted)
        assert NameServerRegistration(live, Topics().describe, "h:1", "h:2").period_ms == used


def test_addresses_are_parsed_and_deduplicated() -> None:
    assert parse_nameservers(" a:1;b:2 ; a:1;;c:3,") == ["a:1", "b:2", "c:3"]
    with pytest.raises(ValueError, match="nameservers: 'nowhere' is not an address"):
        parse_nameservers("a:1;nowhere")


def test_body_equals_that_of_the_typed_encoder() -> None:
    body = Topics("a", "ü", "b").describe()
    registration = NameServerRegistration(settings(), lambda: body, "h:1", "h:2")
    sent = registration.register_request()[1]
    assert decode_register(sent, compressed=False, version=493) == body
    assert msgspec.json.decode(sent)["topicConfigSerializeWrapper"]["mappingDataVersion"]


@pytest.mark.parametrize(("fails", "reason"), [(True, "a bug"), (False, "frame too long")])
def test_failed_encoding_of_the_table_is_reported_and_retried(fails: bool, reason: str) -> None:
    async def body() -> None:
        clock, names, topics = VirtualClock(), NameServer(), Topics("a", "b")
        trouble = True

        def describe() -> RegisterBrokerBody:
            if trouble and fails:
                raise LookupError("no topics")
            body = topics.describe()
            return msgspec.structs.replace(body, filter_server_list=["x" * (17 << 20)] * trouble)

        async with serving(names.serve) as server:
            registration = NameServerRegistration(
                settings(server.address), describe, "h:1", "h:2", clock=clock
            )
            assert not await registration.first_round()
            assert reason in (registration.not_ready() or "")
            trouble = False
            topics.add("c")
            await clock.elapse(1_001)
            await until(lambda: registration.states[0].registered)
            await registration.close()

    asyncio.run(body())
