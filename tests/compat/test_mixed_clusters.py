"""Apache's servers and ours together, with real Java clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import apache, clusters, penstock
from .java_session import JavaSession, eventually
from .reading import read_all

pytestmark = [pytest.mark.compat, pytest.mark.slow]

COUNT = 64


def _exchange(jvm: JavaSession, namesrv: str, topic: str) -> list[Any]:
    """Send, consume by push and read everything; gives the acknowledgements."""
    jvm.do("producer.start", producer=topic, namesrv=namesrv)
    jvm.do("producer.create_topic", producer=topic, topic=topic, queues=4)
    messages = [{"topic": topic, "body": str(n), "keys": [f"k{n}"]} for n in range(COUNT)]
    acked: list[Any] = jvm.do("producer.send", producer=topic, messages=messages)
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
    jvm.do("push.start", consumer=topic, namesrv=namesrv, group=topic, topics={topic: "*"})

    def complete() -> bool:
        rows = jvm.do("push.received", consumer=topic)
        return {int(row[3]) for row in rows} == set(range(COUNT))

    assert eventually(complete)
    jvm.do("push.stop", consumer=topic)
    jvm.do("producer.stop", producer=topic)
    cluster = clusters.Cluster(namesrv, "", "")
    where = {(line["queue_id"], line["queue_offset"], line["msg_id"]) for line in acked}
    read = read_all(jvm, cluster, topic)
    assert {(line["queue_id"], line["queue_offset"], line["msg_id"]) for line in read} == where
    return acked


@pytest.fixture(scope="module")
def apache_names(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with apache.NameServer(tmp_path_factory.mktemp("apache-names")) as names:
        yield names.address


@pytest.fixture(scope="module")
def our_names(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with penstock.NameServer(tmp_path_factory.mktemp("our-names")) as names:
        yield names.address


def test_our_broker_at_their_nameserver(
    latest: JavaSession, apache_names: str, tmp_path: Path, fresh: str
) -> None:
    with penstock.Broker(tmp_path, tmp_path / "store", apache_names, brokerName="ours"):
        acked = _exchange(latest, apache_names, fresh)
    assert {line["broker"] for line in acked} == {"ours"}


@pytest.fixture(scope="module")
def their_broker(our_names: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("their-broker")
    broker = apache.Broker(directory, directory / "store", our_names, brokerName="theirs")
    with broker:
        yield
        # A clean stop takes seconds, and nobody looks at this store again.
        broker.kill()


@pytest.mark.usefixtures("their_broker")
def test_their_broker_at_our_nameserver(latest: JavaSession, our_names: str, fresh: str) -> None:
    acked = _exchange(latest, our_names, fresh)
    assert {line["broker"] for line in acked} == {"theirs"}


@pytest.mark.usefixtures("their_broker")
def test_a_cluster_of_both(latest: JavaSession, our_names: str, tmp_path: Path, fresh: str) -> None:
    with penstock.Broker(tmp_path, tmp_path / "store", our_names, brokerName="ours"):
        acked = _exchange(latest, our_names, fresh)
    brokers = [line["broker"] for line in acked]
    assert brokers.count("ours") == brokers.count("theirs") == COUNT // 2
