"""A master and its slave with epochs, one of them Apache's store: AutoSwitchHAService.

Apache's broker would need a controller for this protocol. Here its store and its HA service run
without the broker, and the test gives them roles and epochs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PeerError
from penstock.replication.epochs import decode_epochs
from penstock.transport.peer import Peer
from tests.integration.test_broker_service import send

from . import apache, clusters, penstock
from .conftest import Sessions
from .java_session import JavaSession, eventually
from .test_replication import SEGMENT_BYTES, TOPIC, log_end
from .test_store_exchange import check_files
from .variants import server_versions

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

COUNT = 200
OUR_ID, THEIR_ID = 2, 1


class ApacheStore:
    """Apache's store with its HA service, in the JVM of a session."""

    def __init__(
        self,
        java: JavaSession,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        in_sync_replicas: int = 2,
    ) -> None:
        self._java = java
        self._name = str(directory)
        self.store_dir = directory
        self.ha_port = apache.free_port()
        self._do("start", directory=str(directory), ha_port=self.ha_port, id=THEIR_ID,
                 segment_bytes=segment_bytes, in_sync_replicas=in_sync_replicas)  # fmt: skip

    def lead(self, epoch: int) -> None:
        assert self._do("lead", epoch=epoch)

    def follow(self, epoch: int, ha_port: int) -> None:
        assert self._do("follow", epoch=epoch, ha_address=f"127.0.0.1:{ha_port}")

    def put(self, count: int, text: str) -> set[str]:
        """Append messages; returns how that ended."""
        return set(self._do("put", count=count, text=text, topic=TOPIC))

    def fill(self, size: int, seed: int) -> list[list[int]]:
        """Append random messages; returns the CRCs of the bodies, by queue."""
        bodies: list[list[int]] = self._do("fill", bytes=size, seed=seed, topic=TOPIC)
        return bodies

    def read(self) -> list[list[int]]:
        """The CRCs of the bodies of all messages, by queue."""
        bodies: list[list[int]] = self._do("read", topic=TOPIC)
        return bodies

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._do("state")
        return state

    def stop(self) -> None:
        self._do("stop")

    def _do(self, command: str, **arguments: Any) -> Any:
        return self._java.do(f"store.{command}", store=self._name, **arguments)


@pytest.fixture
def theirs(sessions: Sessions, tmp_path: Path, version: str) -> Iterator[ApacheStore]:
    store = ApacheStore(sessions(version), tmp_path / "apache")
    yield store
    store.stop()


class OurBroker(penstock.Broker):
    """Our broker without a NameServer; its role may change while it is stopped."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        conf = {
            **apache.SMALL_STORE,
            "mappedFileSizeCommitLog": segment_bytes,
            "haSendHeartbeatInterval": 200,
            "slaveReadEnable": True,
        }
        protocol = {"PENSTOCK_REPLICATION_PROTOCOL": "epochs"}
        super().__init__(directory, directory / "store", "", settings=protocol, **conf)

    def follow(self, ha_port: int) -> OurBroker:
        address = f"127.0.0.1:{ha_port}"
        self._conf |= {"brokerRole": "SLAVE", "brokerId": OUR_ID, "haMasterAddress": address}
        return self

    def lead(self) -> OurBroker:
        self._conf |= {"brokerRole": "ASYNC_MASTER", "brokerId": 0, "haMasterAddress": ""}
        return self

    def send(self, count: int, begin: int) -> None:
        async def send_all() -> None:
            peer = Peer(self.address)
            sends = (send(peer, begin + number, TOPIC) for number in range(count))
            assert {answer.code for answer in await asyncio.gather(*sends)} == {0}
            await peer.close()

        asyncio.run(send_all())

    def log_end(self) -> int:
        """-1 while the broker restarts, which a truncation requires."""
        try:
            return log_end(self)
        except PeerError:
            return -1

    def begin_epoch(self, number: int, begin: int) -> None:
        """As if a controller had made the broker, which is stopped, the master again."""
        path = self.store_dir / "epochFileCheckpoint"
        history = decode_epochs(path.read_bytes())
        history.append(number, begin)
        path.write_bytes(history.encode())

    def epochs(self) -> list[list[int]]:
        data = (self.store_dir / "epochFileCheckpoint").read_bytes()
        return [list(epoch) for epoch in decode_epochs(data).epochs]


def log_bytes(store_dir: Path, end: int) -> bytes:
    files = sorted((store_dir / "commitlog").iterdir())
    return b"".join(file.read_bytes() for file in files)[:end]


def assert_equal_logs(ours: OurBroker, theirs: ApacheStore, *, slave: str) -> int:
    """The slave gets the log of the master; returns the end of both."""
    end = theirs.state()["end"] if slave == "ours" else ours.log_end()
    assert end > 0
    assert eventually(lambda: ours.log_end() == theirs.state()["end"] == end), (
        ours.log_end(), theirs.state(), ours.log.read_text()[-4000:]
    )  # fmt: skip
    assert log_bytes(ours.store_dir, end) == log_bytes(theirs.store_dir, end)
    return int(end)


@server_versions
def test_our_slave_follows_apache(theirs: ApacheStore, tmp_path: Path, version: str) -> None:
    """Through three epochs, and after it was a master itself, which Apache's has replaced."""
    theirs.lead(1)
    theirs.put(1, "one")
    ours = OurBroker(tmp_path / "ours")
    with ours.follow(theirs.ha_port):
        assert_equal_logs(ours, theirs, slave="ours")
        assert eventually(lambda: theirs.state()["in_sync"] == [THEIR_ID, OUR_ID]), theirs.state()
        assert theirs.put(COUNT, "two") == {"PUT_OK"}
        theirs.lead(2)
        assert eventually(lambda: theirs.put(1, "three") == {"PUT_OK"})
        assert theirs.put(COUNT, "four") == {"PUT_OK"}
        common = assert_equal_logs(ours, theirs, slave="ours")
        assert common > SEGMENT_BYTES
        assert eventually(lambda: ours.epochs() == theirs.state()["epochs"])
    with ours.lead():
        ours.send(COUNT, 0)
        assert ours.epochs()[-1][1] == common
        replaced = log_bytes(ours.store_dir, ours.log_end())[common:]
    theirs.lead(ours.epochs()[-1][0] + 1)
    theirs.put(1, "five")
    with ours.follow(theirs.ha_port):
        assert_equal_logs(ours, theirs, slave="ours")
        assert eventually(lambda: theirs.put(1, "six") == {"PUT_OK"})
        end = assert_equal_logs(ours, theirs, slave="ours")
        assert eventually(lambda: ours.epochs() == theirs.state()["epochs"])
        assert eventually(lambda: theirs.state()["confirmed"] == end)
    saved = (ours.store_dir / "penstock.truncated").iterdir()
    assert b"".join(file.read_bytes() for file in sorted(saved)) == replaced
    check_files(ours.store_dir)


@server_versions
def test_slave_of_apache_follows_us(theirs: ApacheStore, tmp_path: Path, version: str) -> None:
    """Through two epochs, and after it was a master itself, which ours has replaced."""
    ours = OurBroker(tmp_path / "ours").lead()
    with ours:
        ours.send(COUNT, 0)
        theirs.follow(1, ours.port + 1)
        assert_equal_logs(ours, theirs, slave="theirs")
        ours.send(3 * COUNT, COUNT)
        first = assert_equal_logs(ours, theirs, slave="theirs")
        assert first > SEGMENT_BYTES
    ours.begin_epoch(2, first)
    with ours:
        ours.send(COUNT, 4 * COUNT)
        common = assert_equal_logs(ours, theirs, slave="theirs")
        assert theirs.state()["epochs"] == ours.epochs() == [[1, 0], [2, first]]
        assert eventually(lambda: theirs.state()["confirmed"] == common)
    theirs.lead(3)
    theirs.put(1, "replaced")
    ours.begin_epoch(4, common)
    with ours:
        ours.send(COUNT, 5 * COUNT)
        theirs.follow(4, ours.port + 1)
        assert_equal_logs(ours, theirs, slave="theirs")
        ours.send(COUNT, 6 * COUNT)
        end = assert_equal_logs(ours, theirs, slave="theirs")
        assert eventually(lambda: theirs.state()["confirmed"] == end)
        # Apache's slave keeps its own epoch, whose messages it has deleted: a fault of it.
        assert theirs.state()["epochs"] == [[1, 0], [2, first], [3, common]]
    check_files(ours.store_dir)
