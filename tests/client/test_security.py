"""Requests with a signature, and connections through TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Message
from penstock.errors import NoPermission, PenstockError
from penstock.wire.signing import signer
from tests.compat import apache
from tests.integration.certificates import Pair, make_pair

from .clusters import Cluster, ask
from .environment import Environment, Inbox, numbers, running, send_all

ROOT = {"access_key": "root", "secret_key": "root-secret"}
WRONG = {"access_key": "root", "secret_key": "not-the-secret"}


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of the same kind with one broker that requires signatures."""
    directory = tmp_path_factory.mktemp("guarded")
    user, password = ROOT.values()
    conf = {
        **apache.access_control(user, password),
        "authConfigPath": directory / "auth",
        # The broker's own calls are signed too.
        "innerClientAuthenticationCredentials": json.dumps(
            {"accessKey": user, "secretKey": password}
        ),
    }
    own = Cluster(cluster.kind, directory, count=1, **conf)
    own.start()
    yield own
    own.kill()


def _make_topic(cluster: Cluster, topic: str) -> None:
    ext = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": "4", "writeQueueNums": "4",
        "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    signed = signer(ROOT["access_key"], ROOT["secret_key"], None)(17, ext, b"")
    answer = ask(cluster.brokers[0].address, 17, dict(signed))
    assert answer.code == 0, answer
    cluster.await_route(topic, [cluster.brokers[0].name])


async def test_signed_clients_may_send_and_consume(env: Environment, guarded: Cluster) -> None:
    topic = env.name()
    _make_topic(guarded, topic)
    inbox = Inbox()
    consumer = env.consumer(nameservers=guarded.nameservers, start_at="first", **ROOT)
    consumer.on(topic)(inbox)
    async with (
        running(consumer),
        env.producer(nameservers=guarded.nameservers, **ROOT) as producer,
    ):
        await send_all(producer, topic, numbers(8))
        await producer.send(Message(topic, "ünïcode", tags="ß", properties={"größe": "µ"}))
        await inbox.count(9)


@pytest.mark.parametrize("credentials", [WRONG, {}], ids=["wrong", "unsigned"])
async def test_unsigned_clients_are_refused(
    env: Environment, guarded: Cluster, credentials: dict[str, str]
) -> None:
    topic = env.name()
    _make_topic(guarded, topic)
    producer = env.producer(nameservers=guarded.nameservers, retries=0, **credentials)
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
    cluster: Cluster, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster with a certificate that also accepts plain connections, as RocketMQ by default."""
    if cluster.kind == "apache":
        # Apache generates a certificate if none is configured.
        yield cluster
        return
    conf = {
        "tls.server.mode": "permissive",
        "tls.server.certPath": pair.certificate,
        "tls.server.keyPath": pair.key,
    }
    own = Cluster(cluster.kind, tmp_path_factory.mktemp("tls"), count=1, names_conf=conf, **conf)
    own.start()
    yield own
    own.kill()


async def _exchange(env: Environment, cluster: Cluster, context: ssl.SSLContext | bool) -> None:
    topic = cluster.make_topic(env.name())
    inbox = Inbox()
    options = {"nameservers": cluster.nameservers, "ssl": context}
    consumer = env.consumer(start_at="first", **options)
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer(**options) as producer:
        await send_all(producer, topic, numbers(8))
        await producer.send(Message(topic, "x" * 500_000), timeout_ms=10_000)
        await inbox.count(9)


async def test_tls_without_certificate_verification(env: Environment, encrypted: Cluster) -> None:
    await _exchange(env, encrypted, True)


async def test_tls_with_certificate_verification(
    env: Environment, encrypted: Cluster, pair: Pair
) -> None:
    if env.cluster.kind == "apache":
        pytest.skip("Apache takes its TLS settings from system properties")
    context = ssl.create_default_context(cafile=str(pair.certificate))
    await _exchange(env, encrypted, context)


async def test_an_untrusted_certificate_is_refused(env: Environment, encrypted: Cluster) -> None:
    context = ssl.create_default_context()
    with pytest.raises(PenstockError) as caught:
        async with env.producer(nameservers=encrypted.nameservers, ssl=context) as producer:
            await producer.send(Message(env.name(), "x"))
    assert "certificate" in str(caught.value).lower()


def test_an_access_key_without_its_secret_is_refused(env: Environment, tmp_path: Path) -> None:
    with pytest.raises(PenstockError):
        env.producer(access_key="alice")
