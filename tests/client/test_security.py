"""Requests with a signature, and connections through TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Message
from penstock.errors import NoPermission, PenstockError
from penstock.wire.signing import signer
from tests.integration.certificates import Pair, make_pair

from .houses import House, ask
from .kit import Inbox, World, numbers, running, send_all

ROOT = {"access_key": "root", "secret_key": "root-secret"}
WRONG = {"access_key": "root", "secret_key": "not-the-secret"}


def _access() -> dict[str, Any]:
    conf: dict[str, Any] = {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "initAuthenticationUser": json.dumps({"username": "root", "password": "root-secret"}),
        # The broker's own calls are signed too.
        "innerClientAuthenticationCredentials": json.dumps(
            {"accessKey": "root", "secretKey": "root-secret"}
        ),
    }
    for area in ("authentication", "authorization"):
        provider = f"org.apache.rocketmq.auth.{area}.provider"
        conf[f"{area}Provider"] = f"{provider}.Default{area.capitalize()}Provider"
        conf[f"{area}MetadataProvider"] = f"{provider}.Local{area.capitalize()}MetadataProvider"
    return conf


@pytest.fixture(scope="module")
def guarded(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house of the same kind with one broker, which asks who one is."""
    directory = tmp_path_factory.mktemp("guarded")
    own = House(house.kind, directory, count=1, **_access(), authConfigPath=directory / "auth")
    own.start()
    yield own
    own.kill()


def _make_topic(house: House, topic: str) -> None:
    ext = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": "4", "writeQueueNums": "4",
        "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    signed = signer(ROOT["access_key"], ROOT["secret_key"], None)(17, ext, b"")
    answer = ask(house.brokers[0].address, 17, dict(signed))
    assert answer.code == 0, answer
    house.await_route(topic, [house.brokers[0].name])


async def test_who_signs_may_send_and_consume(world: World, guarded: House) -> None:
    topic = world.name()
    _make_topic(guarded, topic)
    inbox = Inbox()
    consumer = world.consumer(nameservers=guarded.nameservers, start_at="first", **ROOT)
    consumer.on(topic)(inbox)
    async with (
        running(consumer),
        world.producer(nameservers=guarded.nameservers, **ROOT) as producer,
    ):
        await send_all(producer, topic, numbers(8))
        await producer.send(Message(topic, "ünïcode", tags="ß", properties={"größe": "µ"}))
        await inbox.count(9)


@pytest.mark.parametrize("who", [WRONG, {}], ids=["wrong", "nobody"])
async def test_who_does_not_is_refused(world: World, guarded: House, who: dict[str, str]) -> None:
    topic = world.name()
    _make_topic(guarded, topic)
    producer = world.producer(nameservers=guarded.nameservers, retries=0, **who)
    with pytest.raises(PenstockError) as caught:
        async with producer:
            await producer.send(Message(topic, "x"))
    causes = (caught.value, *getattr(caught.value, "attempts", ()))
    assert any(isinstance(cause, NoPermission) for cause in causes), caught.value


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "penstock")


@pytest.fixture(scope="module")
def encrypted(
    house: House, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    """A house with a certificate that takes plain connections too, as RocketMQ by default."""
    if house.kind == "apache":
        # Apache makes a certificate of its own where it is given none: same client, no trust.
        yield house
        return
    conf = {
        "tls.server.mode": "permissive",
        "tls.server.certPath": pair.certificate,
        "tls.server.keyPath": pair.key,
    }
    own = House(house.kind, tmp_path_factory.mktemp("tls"), count=1, names_conf=conf, **conf)
    own.start()
    yield own
    own.kill()


async def _exchange(world: World, house: House, context: ssl.SSLContext | bool) -> None:
    topic = house.make_topic(world.name())
    inbox = Inbox()
    options = {"nameservers": house.nameservers, "ssl": context}
    consumer = world.consumer(start_at="first", **options)
    consumer.on(topic)(inbox)
    async with running(consumer), world.producer(**options) as producer:
        await send_all(producer, topic, numbers(8))
        await producer.send(Message(topic, "x" * 500_000), timeout_ms=10_000)
        await inbox.count(9)


async def test_tls_without_trust(world: World, encrypted: House) -> None:
    await _exchange(world, encrypted, True)


async def test_tls_with_a_checked_certificate(world: World, encrypted: House, pair: Pair) -> None:
    if world.house.kind == "apache":
        pytest.skip("Apache takes its TLS settings from system properties")
    context = ssl.create_default_context(cafile=str(pair.certificate))
    await _exchange(world, encrypted, context)


async def test_a_certificate_that_is_not_trusted(world: World, encrypted: House) -> None:
    context = ssl.create_default_context()
    with pytest.raises(PenstockError) as caught:
        async with world.producer(nameservers=encrypted.nameservers, ssl=context) as producer:
            await producer.send(Message(world.name(), "x"))
    assert "certificate" in str(caught.value).lower()


def test_a_key_without_its_secret(world: World, tmp_path: Path) -> None:
    with pytest.raises(PenstockError):
        world.producer(access_key="alice")
