"""Bodies are compressed in a thread if they would hold up the event loop; the order is kept."""

import asyncio
import threading
import zlib
from collections.abc import Awaitable, Callable

import pytest

from penstock.client.messages import Message, SendReceipt, SendStatus
from penstock.client.producer.outgoing import LOOP_BYTES, Packer
from penstock.client.producer.sending import Sender
from penstock.errors import ClientClosed, MessageIllegal
from penstock.wire.codes import SYS_COMPRESSED
from tests.integration.loops import Frame
from tests.unit.client.producer.sending_kit import FakeCluster
from tests.unit.client.producer.test_sending import ORDER, run

Send = Callable[[Sender, Message], Awaitable[SendReceipt]]


def submit(sender: Sender, message: Message) -> Awaitable[SendReceipt]:
    return sender.submit(message)


def send(sender: Sender, message: Message) -> Awaitable[SendReceipt]:
    return asyncio.ensure_future(sender.send(message))


class Compressions:
    """The threads that have compressed; `held` makes them wait."""

    def __init__(self, packer: Packer | None) -> None:
        assert packer is not None
        self.loop_bytes = self.thread_bytes = 0
        self.released = threading.Event()
        self.released.set()
        self._compress = packer.compressed
        self._loop_thread = threading.current_thread()
        packer.compressed = self._noting  # type: ignore[method-assign]

    def _noting(self, body: bytes) -> tuple[bytes, int]:
        if threading.current_thread() is self._loop_thread:
            self.loop_bytes += len(body)
        else:
            self.released.wait(20)
            self.thread_bytes += len(body)
        return self._compress(body)


async def connected(cluster: FakeCluster) -> Sender:
    """A sender that knows the route and has a connection."""
    sender = cluster.sender(compression="zlib")
    first = sender.submit(ORDER)
    await cluster.run_pending()
    for frame in cluster["broker-a"].requests():
        cluster["broker-a"].answer(frame)
    await first
    return sender


async def received(cluster: FakeCluster, count: int) -> list[Frame]:
    frames = list[Frame]()
    while len(frames) < count:
        await asyncio.sleep(0)
        frames += cluster["broker-a"].requests()
    return frames


def content(frame: Frame) -> bytes:
    is_compressed = int(frame.ext["f"]) & SYS_COMPRESSED
    return zlib.decompress(frame.body) if is_compressed else frame.body


@pytest.mark.parametrize("start", [submit, send])
def test_long_bodies_are_compressed_in_a_thread_and_sent_in_order(start: Send) -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        sender = await connected(cluster)
        noted = Compressions(sender.packer)
        bodies = [b"x" * 1_000_000, b"short", b"y" * 500_000, b"s"]
        sends = [start(sender, Message("Orders", one)) for one in bodies]
        frames = await received(cluster, len(bodies))
        assert [content(frame) for frame in frames] == bodies
        assert len(frames[0].body) < 10_000
        assert (noted.loop_bytes, noted.thread_bytes) == (0, 1_500_000)
        for frame in frames:
            cluster["broker-a"].answer(frame)
        receipts = await asyncio.gather(*sends)
        assert all(receipt.status is SendStatus.SEND_OK for receipt in receipts)
        assert sender.in_flight.byte_count == sender.in_flight.count == 0
        await cluster.end()

    run(body())


def test_an_iteration_of_the_loop_compresses_a_bounded_amount() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        sender = await connected(cluster)
        noted = Compressions(sender.packer)
        bodies = [b"%05d" % n * 2_000 for n in range(100)]  # of 10 kB
        for one in bodies:
            sender.submit(Message("Orders", one))
        assert 0 < noted.loop_bytes < LOOP_BYTES
        frames = await received(cluster, len(bodies))
        assert [content(frame) for frame in frames] == bodies
        assert noted.loop_bytes + noted.thread_bytes == 1_000_000
        noted.loop_bytes = 0
        sender.submit(Message("Orders", bodies[0]))
        assert noted.loop_bytes == 10_000
        await cluster.end()

    run(body())


def test_other_topics_do_not_wait_for_a_compression() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        cluster.add("Bills", 1)
        sender = await connected(cluster)
        noted = Compressions(sender.packer)
        noted.released.clear()
        sender.submit(Message("Orders", b"x" * 1_000_000))
        sender.submit(Message("Orders", b"behind it"))
        sender.submit(Message("Bills", b"at once"))
        (frame,) = await received(cluster, 1)
        assert frame.body == b"at once"
        noted.released.set()
        assert [len(content(one)) for one in await received(cluster, 2)] == [1_000_000, 9]
        await cluster.end()

    run(body())


def test_time_to_compress_is_not_part_of_the_timeout() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        sender = await connected(cluster)
        noted = Compressions(sender.packer)
        noted.released.clear()
        sending = sender.submit(Message("Orders", b"x" * 1_000_000), timeout_ms=500)
        await cluster.run_pending()
        cluster.clock.advance(10_000)
        noted.released.set()
        (frame,) = await received(cluster, 1)
        cluster["broker-a"].answer(frame)
        assert (await sending).status is SendStatus.SEND_OK
        await cluster.end()

    run(body())


def test_bad_long_body_is_refused_at_once() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        sender = await connected(cluster)
        with pytest.raises(MessageIllegal, match="too long"):
            sender.submit(Message("Orders", b"x" * 10_000_000))
        assert sender.in_flight.count == 0
        await cluster.end()

    run(body())


def test_sends_that_wait_for_a_compression_fail_when_the_client_is_closed() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        sender = await connected(cluster)
        noted = Compressions(sender.packer)
        noted.released.clear()
        sends = [sender.submit(Message("Orders", b"x" * size)) for size in (1_000_000, 5)]
        await cluster.run_pending()
        await cluster.end()
        for sending in sends:
            with pytest.raises(ClientClosed):
                await sending
        assert sender.in_flight.count == sender.in_flight.byte_count == 0
        assert not sender.deferred_counts
        noted.released.set()

    run(body())
