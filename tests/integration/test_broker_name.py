"""Two brokers with one name: the first one stays registered, the second one gives way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import BrokerConfig, LiveSettings, NameServerConfig, Settings
from penstock.errors import BrokerNameTaken
from penstock.server.registration.nameserver_registration import NameServerRegistration
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.testing.virtual_clock import VirtualClock
from penstock.wire.bodies.client_bodies import DataVersion, TopicConfig
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import RequestCode
from tests.integration.loops import Frame, Wire, serving
from tests.integration.test_broker_service import free_port
from tests.store_kit import small_config

A, B = "10.0.0.1:10911", "10.0.0.2:10911"
LOGGER = "penstock.server.registration.nameserver_registration"


@asynccontextmanager
async def nameserver(port: int = 0) -> AsyncIterator[NameServerService]:
    port = port or free_port()
    service = NameServerService(Settings(nameserver=NameServerConfig(port=port)))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def port_of(service: NameServerService) -> int:
    assert service.server is not None
    return service.server.port


def listed(service: NameServerService) -> str | None:
    """The address of broker-a at this NameServer."""
    found = service.nameserver._routes.broker_sets.get("broker-a")
    return found.broker_addrs.get(0) if found is not None else None


async def replaced(address: str, *, starting: bool) -> int:
    """The broker has replaced all others."""
    return 1


def registration(
    address: str, clock: VirtualClock, *ports: int, id: int = 0, epoch: int = 0, **options: Any
) -> NameServerRegistration:
    """The registration of a broker that is started now."""
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            topic_config_table={name: TopicConfig(topic_name=name) for name in ("t", "u")},
            data_version=DataVersion(counter=1, timestamp=5, state_version=epoch),
        )
    )
    addresses = ";".join(f"127.0.0.1:{port}" for port in ports)
    live = LiveSettings(Settings(broker=BrokerConfig(nameservers=addresses, id=id)))
    return NameServerRegistration(live, lambda: body, address, address, clock=clock, **options)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def elapse_until(clock: VirtualClock, condition: Callable[[], object]) -> None:
    """Let seconds pass, as many as it takes."""
    while not condition():
        await clock.elapse(1_000)


@pytest.mark.slow
def test_a_second_broker_does_not_start_and_the_first_stays_registered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with nameserver() as names:
            services = []
            for number in range(2):
                config = BrokerConfig(
                    nameservers=f"127.0.0.1:{port_of(names)}", data=str(tmp_path / str(number)),
                    port=free_port(), probe_port=0, vip_port=0,
                )  # fmt: skip
                settings = Settings(broker=config, store=small_config(sync_flush=False))
                services.append(BrokerService(settings))
            first, second = services
            await first.start()
            address = f"127.0.0.1:{first.settings.current.broker.port}"
            assert listed(names) == address
            with pytest.raises(BrokerNameTaken) as refusal:
                await second.start()
            assert f"lists another broker broker-a (id 0) at {address}" in str(refusal.value)
            assert "broker.name" in refusal.value.hint
            assert listed(names) == address
            await first.stop()
            assert listed(names) is None
            await second.start()
            assert listed(names) == f"127.0.0.1:{second.settings.current.broker.port}"
            await second.stop()

    asyncio.run(body())
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert any("waiting" in text and "broker-a" in text for text in said)


def test_a_broker_starts_when_the_other_one_stops_in_time() -> None:
    async def body() -> None:
        clock = VirtualClock()
        async with nameserver() as names:
            first = registration(A, clock, port_of(names))
            await first.first_round()
            second = registration(B, clock, port_of(names))
            starting = asyncio.ensure_future(second.first_round())
            await clock.elapse(1_500)
            assert not starting.done()
            await first.close()
            await elapse_until(clock, starting.done)
            assert await starting
            assert listed(names) == B
            await second.close()

    asyncio.run(body())


def test_a_second_broker_does_not_start_at_an_apache_nameserver_either() -> None:
    """It would replace the first broker: nothing may be registered."""

    async def body() -> None:
        frames: list[Frame] = []

        async def apache(wire: Wire) -> None:
            while True:
                frames.append(frame := await wire.read())
                group = {"brokerAddrs": {"0": A}, "brokerName": "broker-a", "cluster": "c"}
                wire.answer(frame, body=msgspec.json.encode({"brokerMemberGroup": group}))

        clock = VirtualClock()
        async with serving(apache) as server, nameserver() as empty:
            second = registration(B, clock, server.port, port_of(empty))
            starting = asyncio.ensure_future(second.first_round())
            await elapse_until(clock, starting.done)
            with pytest.raises(BrokerNameTaken, match=A):
                await starting
            await second.close()
            assert listed(empty) is None
        assert {frame.code for frame in frames} == {RequestCode.GET_BROKER_MEMBER_GROUP}

    asyncio.run(body())


@pytest.mark.parametrize("later", [A, B])
def test_of_two_brokers_at_two_nameservers_the_later_one_gives_up(later: str) -> None:
    async def body() -> None:
        clock = VirtualClock()
        ports = free_port(), free_port()
        earlier = A if later == B else B
        first = registration(earlier, clock, *ports)
        await clock.elapse(1)
        second = registration(later, clock, *ports)
        async with nameserver(ports[0]) as one:
            first.start()
            await elapse_until(clock, lambda: listed(one) == earlier)
            async with nameserver(ports[1]) as two:
                second.start()
                # Until a broker has reached both: the second one may be first at the second.
                await elapse_until(clock, lambda: listed(two) == earlier)
                await elapse_until(clock, lambda: second.not_ready())
                assert f"at {earlier}" in (second.not_ready() or "")
                assert (listed(one), listed(two)) == (earlier, earlier)
                await second.close()
                await first.close()

    asyncio.run(body())


def test_a_registered_broker_gives_up_for_one_that_was_started_earlier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        clock = VirtualClock()
        ports = free_port(), free_port()
        first = registration(A, clock, *ports)
        await clock.elapse(1)
        second = registration(B, clock, *ports)
        async with nameserver(ports[1]) as two:
            await second.first_round()
            assert listed(two) == B
            async with nameserver(ports[0]) as one:
                first.start()
                await elapse_until(clock, lambda: (listed(one), listed(two)) == (A, A))
                assert first.not_ready() is None
                assert second.not_ready()
                await second.close()
                assert (listed(one), listed(two)) == (A, A)
                await first.close()

    asyncio.run(body())
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert any(f"lists another broker broker-a (id 0) at {A}; this one is {B}" in s for s in said)


@pytest.mark.parametrize("elected", [True, False], ids=["next master", "no next master"])
def test_a_master_that_becomes_a_slave_is_listed_until_the_next_one_is(elected: bool) -> None:
    async def body() -> None:
        clock, port = VirtualClock(), free_port()
        async with nameserver(port) as names:
            master = registration(A, clock, port, epoch=1)
            await master.first_round()
            connections = await master.detach()
            slave = registration(A, clock, port, id=1, connections=connections)
            assert not connections
            await slave.first_round()
            assert (listed(names), slave.awaits_successor) == (A, True)
            successor = registration(B, clock, port, epoch=2, compare=replaced)
            if elected:
                await successor.first_round()
                assert listed(names) == B
            await elapse_until(clock, lambda: slave.states[0].registered)
            assert listed(names) == (B if elected else None)
            assert not slave.awaits_successor
            await slave.close()
            await successor.close()

    asyncio.run(body())


def test_a_restarted_nameserver_gets_the_first_broker_back() -> None:
    async def body() -> None:
        clock = VirtualClock()
        port = free_port()
        first = registration(A, clock, port)
        await clock.elapse(1)
        second = registration(B, clock, port)
        async with nameserver(port) as names:
            await first.first_round()
            second.start()
            await until(lambda: second.states[0].failures)
            await first.close()  # it comes back late
        async with nameserver(port) as names:
            await elapse_until(clock, lambda: second.states[0].failures > 4)
            assert listed(names) is None, "it waits in case the first one comes back"
            again = registration(A, clock, port)
            again.name.booted_ms = first.name.booted_ms
            again.start()
            await elapse_until(clock, lambda: listed(names) == A)
            await clock.elapse(200_000)
            assert listed(names) == A
            await again.close()
            await elapse_until(clock, lambda: listed(names) == B)
            assert second.not_ready() is None
            await second.close()

    asyncio.run(body())


@pytest.mark.parametrize("reply", [{"code": 3, "remark": "not supported"}, {"body": b"?"}])
def test_a_nameserver_that_can_not_name_the_members_is_registered_with(
    reply: dict[str, Any],
) -> None:
    async def body() -> None:
        codes: list[int] = []

        async def old(wire: Wire) -> None:  # before 5.0
            while True:
                frame = await wire.read()
                codes.append(frame.code)
                wire.answer(frame, **(reply if frame.code == 901 else {}))

        clock = VirtualClock()
        async with serving(old) as server:
            broker = registration(A, clock, server.port)
            assert await broker.first_round()
            assert codes == [901, 901, 103]
            await broker.close()

    asyncio.run(body())
