"""The errors of a client with a wrong address, or with TLS on one side only, name the mistake."""

import asyncio
import ssl
from collections.abc import Iterator

import pytest

import penstock
from penstock.arrow import cluster_metadata
from penstock.arrow.cluster_metadata import ClusterMetadata
from penstock.arrow.connection_options import ConnectionOptions
from penstock.arrow.source_options import TopicSelection
from penstock.errors import NoNameServer, NotNameServer, PeerLost, PeerUnreachable, ReadGaveUp
from penstock.testing import InProcessBroker
from penstock.transport.peer import Peer
from tests.integration.certificates import make_pair
from tests.integration.loops import Run, run
from tests.integration.test_tls import config, listening

__all__ = ["run"]

FOREVER_MS = 600_000
ORDERS = TopicSelection(names=("orders",))


@pytest.fixture
def broker_address() -> Iterator[str]:
    with InProcessBroker() as running, penstock.Admin(running.address) as admin:
        yield admin.brokers()[0].address


def test_the_address_of_a_broker_is_not_a_nameserver(broker_address: str) -> None:
    with (
        pytest.raises(NoNameServer, match="is not a NameServer") as caught,
        penstock.Producer(broker_address) as producer,
    ):
        producer.send(penstock.Message("orders", b"1"))
    assert "this is probably a broker" in caught.value.hint


def test_spark_does_not_wait_for_a_broker_to_become_a_nameserver(broker_address: str) -> None:
    connection = ConnectionOptions((broker_address,))
    with (
        pytest.raises(NotNameServer),
        ClusterMetadata(connection, timeout_ms=FOREVER_MS) as cluster,
    ):
        cluster.required_queues(ORDERS)


def test_spark_does_not_wait_long_for_a_nameserver_that_never_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_metadata, "FIRST_CONTACT_MS", 0)
    connection = ConnectionOptions(("127.0.0.1:1",))
    with (
        pytest.raises(NoNameServer, match="refused"),
        ClusterMetadata(connection, timeout_ms=FOREVER_MS) as cluster,
    ):
        cluster.required_queues(ORDERS)


def test_spark_waits_for_a_nameserver_that_has_answered_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_metadata, "FIRST_CONTACT_MS", 0)
    with InProcessBroker() as broker:
        broker.create_topic("orders", queues=1)
        cluster = ClusterMetadata(ConnectionOptions((broker.address,)), timeout_ms=300)
        cluster.start()
        assert len(cluster.required_queues(ORDERS)) == 1
    with pytest.raises(ReadGaveUp):
        cluster.required_queues(ORDERS)
    cluster.close()


def test_client_with_tls_names_a_server_without(run: Run, broker_address: str) -> None:
    async def body() -> None:
        peer = Peer(broker_address, ssl=ssl.create_default_context())
        with pytest.raises(PeerUnreachable, match=r"the TLS handshake failed: .") as caught:
            await peer.call(3, timeout_ms=5000)
        assert "the server may not use TLS" in caught.value.hint

    run(body())


def test_client_with_tls_names_a_server_that_ignores_its_handshake(run: Run) -> None:
    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(ignore, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        peer = Peer(address, ssl=ssl.create_default_context(), connect_ms=500)
        with pytest.raises(PeerUnreachable, match="handshake failed: no answer within") as caught:
            await peer.call(3, timeout_ms=5000)
        assert "the server may not use TLS" in caught.value.hint
        await peer.close()
        server.close()

    run(body())


def test_client_without_tls_names_a_server_that_requires_it(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = make_pair(tmp_path_factory.mktemp("pair"), "tls")

    async def body() -> None:
        async with listening(config(pair, "enforcing")) as listener:
            with pytest.raises(PeerLost) as caught:
                await Peer(f"127.0.0.1:{listener.port}").call(3, timeout_ms=5000)
            assert "the server may require TLS" in caught.value.hint

    run(body())


def test_client_without_tls_recognizes_a_tls_alert(run: Run) -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x15\x03\x03\x00\x02\x02\x28")
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(alert, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerLost, match="this is TLS") as caught:
            await Peer(f"127.0.0.1:{port}").call(3, timeout_ms=5000)
        assert "the server may require TLS" in caught.value.hint
        server.close()

    run(body())
