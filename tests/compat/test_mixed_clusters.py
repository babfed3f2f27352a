"""Apache's servers and ours together, with real Java clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from . import apache, maven, penstock
from .clusters import Cluster
from .conftest import Sessions
from .java_session import JavaSession, eventually
from .reading import read_all

pytestmark = [pytest.mark.compat, pytest.mark.slow]

COUNT = 72
BODY = 3  # of what a push consumer tells of each message

each_version = pytest.mark.parametrize("version", maven.SERVER_VERSIONS)


def _exchange(java: JavaSession, namesrv: str, topic: str) -> Counter[str]:
    """Send, consume by push and read everything; how many messages each broker has got."""
    java.do("producer.start", producer=topic, namesrv=namesrv)
    java.do("producer.create_topic", producer=topic, topic=topic, queues=4)
    messages = [{"topic": topic, "body": str(n), "keys": [f"k{n}"]} for n in range(COUNT)]
    acked: list[Any] = java.do("producer.send", producer=topic, messages=messages)
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
    java.do("push.start", consumer=topic, namesrv=namesrv, group=topic, topics={topic: "*"})

    def complete() -> bool:
        rows = java.do("push.received", consumer=topic)
        return {int(row[BODY]) for row in rows} == set(range(COUNT))

    assert eventually(complete)
    java.do("push.stop", consumer=topic)
    java.do("producer.stop", producer=topic)
    where = {(line["queue_id"], line["queue_offset"], line["msg_id"]) for line in acked}
    read = read_all(java, Cluster(namesrv, "", ""), topic)
    assert {(line["queue_id"], line["queue_offset"], line["msg_id"]) for line in read} == where
    return Counter(line["broker"] for line in acked)


@pytest.fixture(scope="module")
def their_nameservers(
    java: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The addresses of Apache's NameServers by release; one broker of ours is at all of them."""
    directory = tmp_path_factory.mktemp("their-nameservers")
    with ExitStack() as stack:
        names = {
            version: stack.enter_context(apache.NameServer(directory / version, version=version))
            for version in maven.SERVER_VERSIONS
        }
        addresses = {version: server.address for version, server in names.items()}
        everywhere = ";".join(addresses.values())
        broker = penstock.Broker(directory, directory / "store", everywhere, brokerName="ours")
        stack.enter_context(broker)
        yield addresses


@each_version
def test_our_broker_at_their_nameserver(
    their_nameservers: dict[str, str], sessions: Sessions, fresh: str, version: str
) -> None:
    sent_to = _exchange(sessions(version), their_nameservers[version], fresh)
    assert sent_to == {"ours": COUNT}


@pytest.fixture(scope="module")
def our_nameserver(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of our NameServer, where a broker of each release of Apache's is."""
    directory = tmp_path_factory.mktemp("our-nameserver")
    with ExitStack() as stack:
        names = stack.enter_context(penstock.NameServer(directory / "names"))
        for version in maven.SERVER_VERSIONS:
            place, conf = directory / version, {"version": version, "brokerName": version}
            broker = apache.Broker(place, place / "store", names.address, **conf)
            stack.enter_context(broker)
        yield names.address


@each_version
def test_their_brokers_at_our_nameserver(
    our_nameserver: str, sessions: Sessions, fresh: str, version: str
) -> None:
    sent_to = _exchange(sessions(version), our_nameserver, fresh)
    assert sent_to == dict.fromkeys(maven.SERVER_VERSIONS, COUNT // 2)


@pytest.mark.parametrize("version", maven.VERSIONS)
def test_a_cluster_of_all(
    our_nameserver: str, sessions: Sessions, tmp_path: Path, fresh: str, version: str
) -> None:
    with penstock.Broker(tmp_path, tmp_path / "store", our_nameserver, brokerName="ours"):
        sent_to = _exchange(sessions(version), our_nameserver, fresh)
    assert sent_to == dict.fromkeys(("ours", *maven.SERVER_VERSIONS), COUNT // 3)
