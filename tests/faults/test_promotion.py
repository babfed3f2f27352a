"""Promotions under load between processes, one of which may be killed at any moment of it.

Whatever happens, no acknowledged message is lost: each promotion succeeds, fails and leaves the
master as it is, or leaves two slaves, of which one is then promoted by force.
"""

import contextlib
import itertools
import threading
import time
from pathlib import Path
from random import Random

import pytest

from penstock import Admin, Message, Producer
from penstock.client.admin.async_admin import ReplicaStatus
from penstock.client.messages import SendStatus
from penstock.errors import PenstockError
from tests.depth import rounds
from tests.faults.test_replication import NAMES, Cluster, cluster, stored

PROMOTIONS = 4
HEALTHY_S = 60


class Sender(threading.Thread):
    """Sends messages one after another until it is stopped."""

    def __init__(self, nameserver: str) -> None:
        super().__init__()
        self.acknowledged: set[bytes] = set()
        self._nameserver = nameserver
        self._stopped = threading.Event()

    def run(self) -> None:
        number = 0
        with Producer(self._nameserver, group="g", timeout_ms=1_000) as producer:
            while not self._stopped.is_set():
                number += 1
                body = b"%d" % number
                try:
                    receipt = producer.send(Message("T", body))
                except PenstockError:
                    continue
                if receipt.status == SendStatus.SEND_OK:
                    self.acknowledged.add(body)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def promote(admin: Admin, *, force: bool = False) -> None:
    """Promote the slave; errors are expected, because brokers are killed."""
    with contextlib.suppress(PenstockError, TimeoutError):
        slave = next((one for one in admin.replicas() if one.role == "slave"), None)
        if slave is None:
            return
        plan = admin.plan_promotion("broker-a", slave.broker.id, force=force, role="sync_master")
        admin.promote(plan)


class Operator:
    """Starts what was killed, and promotes a slave if there is no master."""

    def __init__(self, servers: Cluster, admin: Admin) -> None:
        self._servers = servers
        self._admin = admin
        self._ids = itertools.count(2)

    def heal(self) -> str:
        """Wait for a master and a slave that is in sync; returns the master's name."""
        deadline = time.monotonic() + HEALTHY_S
        while time.monotonic() < deadline:
            for name in NAMES:
                self._keep_running(name)
            with contextlib.suppress(PenstockError):
                replicas = self._admin.replicas()
                masters = [one for one in replicas if one.role == "sync_master"]
                if masters and any(one.in_sync for one in replicas):
                    return self._name_of(masters[0])
                if replicas and not masters and not any(one.problem for one in replicas):
                    promote(self._admin, force=True)
            time.sleep(0.05)
        logs = "\n".join(self._servers.log(name)[-3000:] for name in NAMES)
        raise AssertionError(f"no master with a slave that is in sync:\n{logs}")

    def _keep_running(self, name: str) -> None:
        """A broker that was given the id of the other one can't start before that is the master. A
        master that was replaced does not start until its settings make it a slave."""
        process = self._servers.processes.get(name)
        if process is not None and process.poll() is None:
            return
        last = self._servers.log(name).rstrip().rpartition("\n")[2]
        if process is not None:
            self._servers.kill(name)
            if "has replaced this broker as the master" in last:
                self._servers.configure(name, "slave", next(self._ids))
        self._servers.begin(name)

    def _name_of(self, replica: ReplicaStatus) -> str:
        port = int(replica.broker.address.rpartition(":")[2])
        return next(name for name, own in self._servers.broker_ports.items() if own == port)


@pytest.mark.parametrize("seed", range(rounds(ci=1, proof=50)))
def test_promotions_under_load_lose_nothing(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    with cluster(tmp_path) as servers, Admin(servers.nameserver, timeout_ms=2_000) as admin:
        operator = Operator(servers, admin)
        master = operator.heal()
        sender = Sender(servers.nameserver)
        sender.start()
        try:
            for _ in range(PROMOTIONS):
                promotion = threading.Thread(target=promote, args=(admin,))
                promotion.start()
                slave = NAMES[1 - NAMES.index(master)]
                victim = rng.choice((master, slave, ""))
                if victim:
                    time.sleep(rng.random() * 0.3)  # anywhere in the promotion
                    servers.kill(victim)
                promotion.join()
                master = operator.heal()
                known = len(sender.acknowledged)
                deadline = time.monotonic() + HEALTHY_S
                while len(sender.acknowledged) < known + 5:
                    assert time.monotonic() < deadline, "no more messages are acknowledged"
                    time.sleep(0.05)
                    master = operator.heal()  # a broker may have ended only now
        finally:
            sender.stop()
        operator.heal()
    assert len(sender.acknowledged) > 5 * PROMOTIONS
    for name in NAMES:
        lost = sender.acknowledged - set(stored(tmp_path / name))
        assert not lost, f"{name} lacks {len(lost)} of {len(sender.acknowledged)} messages"
