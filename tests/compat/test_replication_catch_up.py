"""A slave that has nothing catches up with a master that goes on receiving messages.

One of the two is Apache's, with both HA protocols and in both directions. At the depth of a proof
the master has 2 GiB at first. The logs must be equal byte by byte, and each message must be read
from the slave.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.store.store import MessageStore
from penstock.transport.peer import Peer
from penstock.wire.codes import RequestCode, ResponseCode
from tests.depth import DEPTH

from . import apache, clusters, penstock
from .conftest import Sessions
from .java_session import eventually
from .python_reading import PULL
from .test_replication import (
    NO_MESSAGE,
    PAIR,
    QUEUES,
    SLAVE,
    TOPIC,
    AnyBroker,
    await_master,
    contents,
    create_topic,
    log_end,
)
from .test_replication_epochs import ApacheStore, OurBroker
from .test_store_exchange import SIZES, check_files
from .test_store_exchange import read_all as read_store
from .variants import server_versions

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

_MIB = 1024 * 1024
SIZE, SEGMENT_BYTES = (2 << 30, 256 * _MIB) if DEPTH == "proof" else (6 * _MIB, _MIB)
"""What the master has before the slave starts, and the size of a file of the log."""
CHUNK_BYTES = SIZE // 8
"""What is sent in one go at first; a session of Java answers within two minutes."""
LIVE_BYTES = _MIB
LIVE_PAUSE_S = 0.1
"""What is sent in one go while the slave catches up, and the pause after that."""
BODY_BYTES_MAX = 32 * 1024
IN_FLIGHT = 64
CATCH_UP_S = 300.0
CALL_MS = 30_000
OURS, THEIRS = "our slave", "their slave"

Bodies = list[list[int]]
"""The CRC of the body of each message, by queue and in the order of the queue."""

directions = pytest.mark.parametrize("slave", [OURS, THEIRS])


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory that does not stay: the stores are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


class Traffic:
    """Messages for one master."""

    def __init__(self, fill: Callable[[int, int], Bodies]) -> None:
        """`fill` sends messages of a size in total, by a seed; returns what it has sent."""
        self._fill = fill
        self._seed = 0
        self.sent: Bodies = [[] for _ in range(QUEUES)]

    def send(self, size: int) -> None:
        self._seed += 1
        for queue, bodies in zip(self.sent, self._fill(size, self._seed), strict=True):
            queue += bodies


def filler(address: str) -> Callable[[int, int], Bodies]:
    """Sends random messages to the broker at an address."""

    async def send_all(size: int, seed: int) -> Bodies:
        rng, peer = random.Random(seed), Peer(address)
        found: list[dict[int, int]] = [{} for _ in range(QUEUES)]
        number = 0
        while size > 0:
            bodies = [rng.randbytes(rng.randint(1, BODY_BYTES_MAX)) for _ in range(IN_FLIGHT)]
            places = await asyncio.gather(
                *(send_one(peer, number + at, body, seed) for at, body in enumerate(bodies))
            )
            for (queue_id, offset), body in zip(places, bodies, strict=True):
                found[queue_id][offset] = crc(body)
            size -= sum(map(len, bodies))
            number += IN_FLIGHT
        await peer.close()
        for queue in found:
            assert not queue or len(queue) == max(queue) - min(queue) + 1
        return [[queue[offset] for offset in sorted(queue)] for queue in found]

    return lambda size, seed: asyncio.run(send_all(size, seed))


async def send_one(peer: Peer, number: int, body: bytes, seed: int) -> tuple[int, int]:
    """Send a message; returns its queue and its offset there."""
    ext = {
        "a": "catch-up", "b": TOPIC, "c": "TBW102", "d": str(QUEUES), "e": str(number % QUEUES),
        "f": "0", "g": "1", "h": "0", "i": f"UNIQ_KEY\x01{seed:08X}{number:024X}\x02",
    }  # fmt: skip
    while True:
        answer = await peer.call(RequestCode.SEND_MESSAGE_V2, ext, body, timeout_ms=CALL_MS)
        if answer.code != ResponseCode.SYSTEM_BUSY:  # Apache's is, when the disk is slow
            break
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return int(answer.ext["queueId"]), int(answer.ext["queueOffset"])


def crc(body: bytes) -> int:
    return zlib.crc32(body) & 0x7FFFFFFF


def pull_all(broker: AnyBroker) -> Bodies:
    """Every message of the topic, pulled from this broker."""

    async def pull(peer: Peer, queue_id: int) -> list[int]:
        bodies: list[int] = []
        while True:
            ext = {"topic": TOPIC, "queueId": str(queue_id), "queueOffset": str(len(bodies))}
            answer = await peer.call(RequestCode.PULL_MESSAGE, {**PULL, **ext}, timeout_ms=CALL_MS)
            if answer.code != ResponseCode.SUCCESS:
                assert answer.code in NO_MESSAGE, answer.remark
                return bodies
            bodies += [content[2] for content in contents(bytearray(answer.body)).values()]

    async def pull_queues() -> Bodies:
        peer = Peer(broker.address)
        found = await asyncio.gather(*(pull(peer, queue_id) for queue_id in range(QUEUES)))
        await peer.close()
        return list(found)

    return asyncio.run(pull_queues())


def read_stopped(store_dir: Path) -> Bodies:
    """Every message of the topic, read from the store of a broker that has stopped."""
    sizes = msgspec.structs.replace(SIZES, segment_bytes=SEGMENT_BYTES)
    store = MessageStore(store_dir, sizes, now_ms=int(time.time() * 1000))
    assert store.report.clean
    found = read_store(store, (TOPIC,))
    store.close()
    queues: Bodies = [[] for _ in range(QUEUES)]
    for _, queue_id, offset in sorted(found):
        assert offset == len(queues[queue_id])
        queues[queue_id].append(found[TOPIC, queue_id, offset][2])
    return queues


def catch_up(
    traffic: Traffic, master_end: Callable[[], int], slave_end: Callable[[], int]
) -> tuple[int, float]:
    """Send until the slave has what the master had at first, and a little more.

    Returns the end of both logs, and the seconds until the slave had that.
    """
    first, began = master_end(), time.monotonic()
    assert first >= SIZE
    while slave_end() < first:
        assert time.monotonic() < began + CATCH_UP_S, (slave_end(), first)
        traffic.send(LIVE_BYTES)
        time.sleep(LIVE_PAUSE_S)
    taken = time.monotonic() - began
    traffic.send(LIVE_BYTES)
    end = master_end()
    assert eventually(lambda: slave_end() == end, within_s=CATCH_UP_S), (slave_end(), end)
    return end, taken


def assert_equal_logs(first: Path, second: Path, end: int) -> None:
    """The files of both logs are equal up to its end."""
    for start in range(0, end, SEGMENT_BYTES):
        left = min(end - start, SEGMENT_BYTES)
        paths = [folder / "commitlog" / f"{start:020}" for folder in (first, second)]
        with paths[0].open("rb") as one, paths[1].open("rb") as other:
            while left > 0:
                size = min(left, 8 * _MIB)
                assert one.read(size) == other.read(size), f"the logs differ after {start}"
                left -= size


def report(what: str, end: int, seconds: float, sent: Bodies) -> None:
    """The figures of a proof; pytest -rP shows them."""
    print(
        f"{what}: {end:,} bytes, {sum(map(len, sent)):,} messages; the slave had the first "
        f"{SIZE:,} bytes {seconds:.1f} s after its start; logs equal, verify clean"
    )


@server_versions
@directions
def test_static(java: None, scratch: Path, version: str, slave: str) -> None:
    sizes: Mapping[str, Any] = {"mappedFileSizeCommitLog": SEGMENT_BYTES}
    with ExitStack() as stack:
        names = stack.enter_context(penstock.NameServer(scratch / "names"))

        def broker(kind: str, ours: bool, conf: Mapping[str, Any]) -> AnyBroker:
            folders = (scratch / kind, scratch / f"store-{kind}")
            conf = {**conf, **sizes}
            one: AnyBroker
            if ours:
                one = penstock.Broker(*folders, names.address, **conf)
            else:
                one = apache.Broker(*folders, names.address, version=version, **conf)
            stack.enter_context(one)
            return one

        master = broker("master", slave == THEIRS, PAIR)
        create_topic(master)
        traffic = Traffic(filler(master.address))
        while log_end(master) < SIZE:
            traffic.send(CHUNK_BYTES)
        follower = broker("slave", slave == OURS, SLAVE)
        if isinstance(follower, apache.Broker):
            await_master(follower)
            create_topic(follower)
        end, taken = catch_up(traffic, lambda: log_end(master), lambda: log_end(follower))
        # Our slave has to copy the table of topics first, Apache's to dispatch the log.
        assert eventually(lambda: pull_all(follower) == traffic.sent)
        follower.stop()
        master.stop()
    assert_equal_logs(master.store_dir, follower.store_dir, end)
    for one in (master, follower):
        check_files(one.store_dir)
    report(f"static, {slave}, {version}", end, taken, traffic.sent)


@server_versions
@directions
def test_epochs(sessions: Sessions, scratch: Path, version: str, slave: str) -> None:
    theirs = ApacheStore(
        sessions(version), scratch / "apache", segment_bytes=SEGMENT_BYTES, in_sync_replicas=1
    )
    ours = OurBroker(scratch / "ours", segment_bytes=SEGMENT_BYTES)

    def their_end() -> int:
        return int(theirs.state()["end"])

    try:
        if slave == OURS:
            theirs.lead(1)
            traffic = Traffic(theirs.fill)
            while their_end() < SIZE:
                traffic.send(CHUNK_BYTES)
            with ours.follow(theirs.ha_port):
                end, taken = catch_up(traffic, their_end, ours.log_end)
            assert read_stopped(ours.store_dir) == traffic.sent
        else:
            with ours.lead():
                create_topic(ours)
                traffic = Traffic(filler(ours.address))
                while ours.log_end() < SIZE:
                    traffic.send(CHUNK_BYTES)
                theirs.follow(1, ours.port + 1)
                end, taken = catch_up(traffic, ours.log_end, their_end)
                assert eventually(lambda: theirs.read() == traffic.sent)
    finally:
        theirs.stop()
    assert_equal_logs(ours.store_dir, theirs.store_dir, end)
    for store_dir in (ours.store_dir, theirs.store_dir):
        check_files(store_dir)
    report(f"epochs, {slave}, {version}", end, taken, traffic.sent)
