"""A damaged log of a master, and its slave, over real sockets in this process."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from penstock.store.store import MessageStore
from penstock.wire import layout
from penstock.wire.message import decode_messages
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import PROTOCOLS, Pair, assert_equal

MAGIC = layout.MAGIC_V1.to_bytes(4, "big", signed=True)


def flip_bit(store: MessageStore, queue_id: int, offset: int) -> int:
    """Damage the CRC of a stored message; returns the size of its record."""
    queue = store.queue("T", queue_id)
    entry = None if queue is None else queue.entry(offset)
    assert entry is not None
    segment = store.log.segments.find(entry[0])
    assert segment is not None
    with segment.path.open("r+b") as file:
        file.seek(entry[0] - segment.start + layout.BODY_CRC_AT)
        crc = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([crc ^ 1]))
    return entry[1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("sync", [False, True])
def test_a_damaged_record_of_the_master_does_not_stop_replication(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
    sync: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The slave asks for it again, then isolates it as a recovery does."""
    role = "sync_master" if sync else "async_master"
    pair = Pair(tmp_path, protocol=protocol, read_from_slaves=True)

    async def body() -> None:
        async with pair.broker("master", role=role, slave_timeout_ms=300) as (client, master):
            # At once: as long as there is no slave, each waits for the timeout of a sync_master.
            await asyncio.gather(*(send(client, number) for number in range(30)))
            damaged = flip_bit(master.broker.context.store, 0, 1)
            async with pair.broker("slave") as (_, slave):
                await assert_equal(master, slave)
                for number in range(30, 40):
                    assert (await send(client, number)).code == 0
                await assert_equal(master, slave)
                store = slave.broker.context.store
                assert (store.report.damaged_ranges, store.report.damaged_bytes) == (1, damaged)
                found = decode_messages(store.get("T", 0, 0, wait=True).data)
                assert [message.body for message in found] == [
                    b"%d" % number for number in range(0, 40, 4) if number != 4
                ]

    run(body())
    assert caplog.text.count("the master has sent the same bytes twice") == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("record", "place"), [(2, layout.MAGIC_AT), (10, layout.BODY_CRC_AT), (25, layout.SIZE_AT + 3)]
)
def test_bytes_that_the_network_damages_are_asked_for_again(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
    record: int,
    place: int,
) -> None:
    """In a place that a check of the record covers: the CRC of RocketMQ's format is of the body."""
    pair = Pair(tmp_path, protocol=protocol)
    connections: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Between the slave and its master; the first connection damages a byte."""
        received, sent = bytearray(), 0
        first = not connections
        connections.append(writer)
        to_slave, to_master = await asyncio.open_connection("127.0.0.1", pair.ha_port)
        back = asyncio.ensure_future(pump(reader, to_master))
        with contextlib.suppress(ConnectionError):
            while data := await to_slave.read(65_536):
                received += data
                if first and received.count(MAGIC) > record:
                    received[place_of(received, record) + place] ^= 0x04
                    first = False
                if not first or MAGIC not in received:  # all records follow at once
                    writer.write(received[sent:])
                    sent = len(received)
        back.cancel()
        writer.close()
        to_master.close()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4_096):
            writer.write(data)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with pair.broker("master") as (client, master):
            for number in range(60):
                assert (await send(client, number)).code == 0
            async with pair.broker("slave", master=f"127.0.0.1:{port}") as (_, slave):
                await assert_equal(master, slave)
                assert len(connections) == 2
                assert slave.broker.context.store.report.damaged_ranges == 0
        server.close()

    run(body())


def place_of(received: bytearray, record: int) -> int:
    """Where a record begins among the received bytes."""
    at = -1
    for _ in range(record + 1):
        at = received.index(MAGIC, at + 1)
    return at - layout.MAGIC_AT
