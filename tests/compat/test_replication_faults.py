"""Java clients at a master and its slave whose machines and network fail.

A round has a seed, which decides the settings and the faults. While a Java producer sends and a
Java consumer receives, two faults happen to the processes, the disks and the network, and then the
master is lost and the slave promoted. After each fault the clients must be able to go on, and the
slave must be in sync again: that is what the promise of a sync_master requires. In the end the
consumer must have each message that was acknowledged by SEND_OK.

With an async_master, messages are lost: those that the slave did not have. The output of the tests
(pytest -rP) shows how many. To repeat a round:

    PENSTOCK_DEPTH=proof pytest tests/compat/test_replication_faults.py -k 'sync_master and [17]'

`PENSTOCK_COMPAT_NETWORK=proxy` uses the proxy also where network namespaces are allowed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.replication.epochs import decode_epochs
from penstock.store.store import MessageStore
from penstock.wire.message import decode_messages
from tests.depth import rounds

from . import clusters, maven
from .conftest import Sessions
from .java_session import JavaSession
from .replication_machines import BROKER, IDLE_MS, RECOVERY_S, Pair, running
from .replication_network import CuttingProxy, Namespaces, Network, NotAllowedError

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both brokers are ours"),
]

ROUNDS = rounds(ci=3, proof=100)
ASYNC_ROUNDS = rounds(ci=1, proof=20)
FAULTS_PER_ROUND = 2
QUEUES = 4
GOES_ON = 20
"""Messages that consumers must receive after a fault."""
STORE_MS = 11

Place = tuple[int, int]
"""A queue and an offset in it."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made: Network
    try:
        if os.environ.get("PENSTOCK_COMPAT_NETWORK") == "proxy":
            raise NotAllowedError("PENSTOCK_COMPAT_NETWORK is proxy")
        made = Namespaces()
    except NotAllowedError as error:
        print(f"a proxy instead of network namespaces: {error}")
        made = CuttingProxy()
    yield made
    made.close()


def now_ms() -> int:
    return int(time.time() * 1000)


class Acknowledged(NamedTuple):
    """A message whose send was answered with SEND_OK."""

    place: Place
    body: str


class Traffic:
    """A Java producer that sends all the time, and a Java consumer."""

    def __init__(self, java: JavaSession, pair: Pair, name: str) -> None:
        self._java = java
        self._pair = pair
        self._name = name
        self.rows: list[Any] = []
        """What the consumer received; see PushConsumers.java."""
        self.failures = 0

    def start(self) -> None:
        java, name = self._java, self._name
        quick = {"namesrv": self._pair.nameserver, "poll_namesrv_ms": 200}
        java.do("producer.start", producer=name, timeout_ms=2_000, **quick)
        java.do("producer.create_topic", producer=name, topic=name, queues=QUEUES)
        java.do("push.start", consumer=name, group=name, topics={name: "*"},
                pull_retry_ms=200, **quick)  # fmt: skip
        assert java.do("flood.start", producer=name, flood=name, topic=name, pause_ms=4) == QUEUES
        self.await_messages(0)

    def await_messages(self, after_ms: int) -> None:
        """Wait until the consumer has a few messages that were stored after a time."""
        deadline = time.monotonic() + RECOVERY_S
        missing = GOES_ON
        while missing > 0:
            assert time.monotonic() < deadline, "the consumer waits\n" + self._pair.last_words()
            missing -= sum(row[STORE_MS] >= after_ms for row in self._receive(missing))

    def _receive(self, count: int) -> list[Any]:
        new: list[Any] = self._java.do(
            "push.received", consumer=self._name, since=len(self.rows),
            count=len(self.rows) + count, within_ms=5_000,
        )  # fmt: skip
        self.rows += new
        return new

    def stop_sending(self) -> list[Acknowledged]:
        """Stop the producer; returns what was acknowledged."""
        flood = self._java.do("flood.stop", flood=self._name)
        self.failures = flood["failures"]
        return [
            Acknowledged((queue, offset), str(number))
            for _, queue, number, offset in flood["acknowledged"]
        ]

    def await_all(self, acknowledged: list[Acknowledged]) -> dict[Place, str]:
        """Wait until the consumer has all these messages; returns all that it received."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            found = self._contents()
            missing = [one for one in acknowledged if one.place not in found]
            if not missing or time.monotonic() > deadline:
                break
            self._receive(1)
        lost = [one for one in acknowledged if found.get(one.place) != one.body]
        assert not lost, (
            f"{len(lost)} of {len(acknowledged)} acknowledged messages are lost, the first ones: "
            f"{lost[:5]}, instead: {[found.get(one.place) for one in lost[:5]]}\n"
            f"{self._pair.last_words()}"
        )
        return found

    def _contents(self) -> dict[Place, str]:
        """The received bodies; what a consumer has seen once is never replaced."""
        found: dict[Place, str] = {}
        for broker, queue, offset, body, *_ in self.rows:
            assert broker == BROKER
            assert found.setdefault((queue, offset), body) == body, (queue, offset)
        return found

    def store_times(self, acknowledged: list[Acknowledged]) -> list[int]:
        times = {(row[1], row[2]): row[STORE_MS] for row in self.rows}
        return [times[one.place] for one in acknowledged]

    def stop(self) -> None:
        self._java.do("producer.stop", producer=self._name)
        self._java.do("push.stop", consumer=self._name)


# --- faults


def kill_slave(pair: Pair, rng: Random) -> None:
    pair.slave.kill()
    pair.start_slave()


def kill_master(pair: Pair, rng: Random) -> None:
    pair.master.kill()
    pair.start_master()


def kill_both(pair: Pair, rng: Random) -> None:
    pair.master.kill()
    pair.slave.kill()
    pair.start_master()
    pair.start_slave()


def delete_disk_of_slave(pair: Pair, rng: Random) -> None:
    pair.slave.kill()
    pair.slave.delete_disk()
    pair.start_slave()


def freeze_slave(pair: Pair, rng: Random) -> None:
    pair.slave.freeze()
    last(rng, 0.2, 2.0)
    pair.slave.thaw()


def freeze_master(pair: Pair, rng: Random) -> None:
    pair.master.freeze()
    last(rng, 0.2, 2.0)
    pair.master.thaw()


def lose_packets(pair: Pair, rng: Random) -> None:
    """Shorter than the time after which a connection is given up."""
    pair.network.lose()
    last(rng, 0.2, 0.5 * IDLE_MS / 1000)
    pair.network.restore()


def lose_packets_one_way(pair: Pair, rng: Random) -> None:
    pair.network.lose(rng.choice((pair.master.name, pair.slave.name)))
    last(rng, 0.2, 1.5 * IDLE_MS / 1000)
    pair.network.restore()


def cut_until_both_give_up(pair: Pair, rng: Random) -> None:
    pair.network.lose()
    last(rng, 1.2 * IDLE_MS / 1000, 1.5 * IDLE_MS / 1000)
    pair.network.restore()


def reset_connections(pair: Pair, rng: Random) -> None:
    for _ in range(3):
        pair.network.reset(rng.choice((pair.master.name, pair.slave.name)))
        last(rng, 0.05, 0.5)


def half_open_connections(pair: Pair, rng: Random) -> None:
    """One side has lost its connections; the other one is not told."""
    pair.network.lose()
    pair.network.reset(rng.choice((pair.master.name, pair.slave.name)))
    pair.network.restore()


def slow_link(pair: Pair, rng: Random) -> None:
    pair.network.slow(rng.choice((64, 256, 1024)))
    last(rng, 0.5, 2.0)
    if rng.random() < 0.5:
        pair.slave.kill()  # with data on the way
        pair.start_slave()
    pair.network.restore()


def exchange_roles(pair: Pair, rng: Random) -> None:
    pair.promote()


def last(rng: Random, least_s: float, most_s: float) -> None:
    """The length of a fault."""
    time.sleep(rng.uniform(least_s, most_s))


FAULTS: dict[str, Callable[[Pair, Random], None]] = {
    function.__name__: function
    for function in (
        kill_slave, kill_master, kill_both, delete_disk_of_slave, freeze_slave, freeze_master,
        lose_packets, lose_packets_one_way, cut_until_both_give_up, reset_connections,
        half_open_connections, slow_link, exchange_roles,
    )
}  # fmt: skip


# --- the loss of the master


def delete_disk_of_master(pair: Pair, rng: Random) -> None:
    pair.master.kill()
    pair.master.delete_disk()
    pair.promote("--force")
    pair.start_old_master()


def delete_disk_of_master_behind_a_bad_link(pair: Pair, rng: Random) -> None:
    """The slave lacks messages, which are therefore not acknowledged."""
    if rng.random() < 0.5:
        pair.network.slow(64)
    else:
        pair.network.lose(pair.master.name)
    last(rng, 0.2, 1.0)
    pair.master.kill()
    pair.network.restore()
    pair.master.delete_disk()
    pair.promote("--force")
    pair.start_old_master()


def isolate_master(pair: Pair, rng: Random) -> None:
    """The old master is running when the slave is promoted, and comes back with its disk."""
    old = pair.master
    if not pair.network.isolate(old.name):
        old.freeze()
    last(rng, 0.1, 1.0)
    pair.promote("--force")
    old.kill()
    pair.network.restore()
    if pair.protocol == "static":  # which can't find out that the logs differ
        old.delete_disk()
    pair.start_old_master()


PROMOTIONS: dict[str, Callable[[Pair, Random], None]] = {
    function.__name__: function
    for function in (
        delete_disk_of_master, delete_disk_of_master_behind_a_bad_link, isolate_master,
    )
}  # fmt: skip


# --- tests


def client_of(seed: int) -> str:
    return maven.VERSIONS[seed // 3 % len(maven.VERSIONS)]


def plan_of(seed: int) -> tuple[dict[str, Any], list[str]]:
    """The settings of replication, and the faults."""
    rng = Random(seed)
    settings = {
        "protocol": "static" if seed % 4 == 3 else "epochs",
        "min_in_sync_replicas": rng.choice((1, 2)),
        "all_in_sync_acknowledge": rng.choice((False, True)),
        "secret": rng.choice(("", "a shared secret")),
    }
    faults = rng.sample(sorted(FAULTS), k=FAULTS_PER_ROUND)
    return settings, [*faults, rng.choice(sorted(PROMOTIONS))]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_nothing_acknowledged_by_a_sync_master_is_lost(
    tmp_path: Path, network: Network, sessions: Sessions, fresh: str, seed: int
) -> None:
    began = time.monotonic()
    rng = Random(seed)
    settings, faults = plan_of(seed)
    print(f"seed {seed}: {faults}, {settings}, Java client {client_of(seed)}")
    healthy: list[tuple[int, int]] = []  # when the slave was in sync, and when the next fault began
    with running(network, tmp_path, "sync_master", settings) as pair:
        traffic = Traffic(sessions(client_of(seed)), pair, fresh)
        traffic.start()
        for fault in faults:
            (FAULTS | PROMOTIONS)[fault](pair, rng)
            print(f"{time.monotonic() - began:.1f} s: {fault}")
            traffic.await_messages(now_ms())
            pair.await_in_sync()
            recovered_ms = now_ms()
            traffic.await_messages(recovered_ms)
            healthy.append((recovered_ms, now_ms()))
            print(f"{time.monotonic() - began:.1f} s: recovered")
        acknowledged = traffic.stop_sending()
        traffic.await_all(acknowledged)
        times = traffic.store_times(acknowledged)
        for begin, end in healthy:
            assert any(begin <= at <= end for at in times), "nothing was acknowledged again"
        traffic.stop()
        pair.await_in_sync()
    assert pair.master.log_bytes() == pair.slave.log_bytes()
    print(
        f"{len(acknowledged)} acknowledged, 0 lost, {traffic.failures} sends failed, "
        f"{time.monotonic() - began:.1f} s"
    )


def stored(root: Path, topic: str) -> dict[Place, tuple[int, str]]:
    """The log offset and the body of each message in the store of a broker that has ended."""
    store = MessageStore(root, now_ms=now_ms())
    found = {}
    for queue in [q for q in store.queues.rows if q.topic == topic.encode()]:
        offset = queue.min_offset
        while offset < queue.max_offset:
            got = store.get(topic, queue.queue_id, offset, wait=True)
            for one in decode_messages(got.data):
                place = queue.queue_id, one.queue_offset
                found[place] = one.physical_offset, one.body.decode()
            offset = max(got.next_offset, offset + 1)
    store.close()
    return found


@pytest.mark.parametrize("seed", range(ASYNC_ROUNDS))
def test_an_async_master_loses_what_was_not_replicated(
    tmp_path: Path, network: Network, sessions: Sessions, fresh: str, seed: int
) -> None:
    rng = Random(seed)
    java = sessions(client_of(seed))
    link = ("lost", "slow", "good")[seed % 3]
    with running(network, tmp_path, "async_master", {"protocol": "epochs"}) as pair:
        traffic = Traffic(java, pair, fresh)
        traffic.start()
        if link == "lost":
            network.lose(rng.choice(("", pair.master.name)))
        elif link == "slow":
            network.slow(64)
        if link != "good":
            traffic.await_messages(now_ms())  # which the slave lacks
        last(rng, 0.1, 0.5)
        pair.master.kill()
        pair.slave.kill()  # before what is on the way arrives
        network.restore()
        pair.start_slave()
        acknowledged = traffic.stop_sending()
        disk = pair.master.disk.rename(tmp_path / "lost")
        pair.promote("--force")
        epoch = decode_epochs((pair.master.disk / "epochFileCheckpoint").read_bytes()).last
        assert epoch is not None
        pair.start_old_master()
        replicated = check_loss(stored(disk, fresh), acknowledged, epoch.begin)
        reader = Traffic(java, pair, f"{fresh}-reader")
        java.do("push.start", consumer=f"{fresh}-reader", group=f"{fresh}-reader",
                topics={fresh: "*"}, namesrv=pair.nameserver)  # fmt: skip
        reader.await_all(replicated)
        pair.await_in_sync()
        java.do("push.stop", consumer=f"{fresh}-reader")
        traffic.stop()
    lost = len(acknowledged) - len(replicated)
    print(f"async_master, seed {seed}, link {link}: {len(acknowledged)} acknowledged, {lost} lost")
    assert lost > 0 or link == "good"


def check_loss(
    before: dict[Place, tuple[int, str]], acknowledged: list[Acknowledged], log_end: int
) -> list[Acknowledged]:
    """Those messages that the slave has, whose log ends at `log_end`; `before` is the log of the
    master, which has all."""
    replicated = []
    for one in acknowledged:
        offset, body = before[one.place]
        assert body == one.body
        if offset < log_end:
            replicated.append(one)
    return replicated
