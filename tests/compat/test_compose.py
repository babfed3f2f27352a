"""deploy/compose: its services run as it says, each at a loopback address of its own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock import Admin, Message, Producer, SendStatus
from penstock.errors import PenstockError
from tests.integration.compose_kit import COMPOSE, ComposedServices

pytestmark = [pytest.mark.compat, pytest.mark.slow]

READY_S = 60.0


@contextmanager
def services(directory: Path) -> Iterator[ComposedServices]:
    found = ComposedServices(COMPOSE / "compose.yaml", directory)
    try:
        for kind in ("etcd", "nameserver", "controller", "broker"):
            for name in found.names(kind):
                found.start(name)
        yield found
    finally:
        found.stop()


def master(admin: Admin, *, in_sync: int) -> str:
    """The address of the master when this many replicas are in sync; empty before."""
    with suppress(PenstockError):
        replicas = admin.replicas()
        if 1 + sum(bool(one.in_sync) for one in replicas) == in_sync:
            return next((one.broker.address for one in replicas if one.broker.is_master), "")
    return ""


def await_master(admin: Admin, composed: ComposedServices, *, in_sync: int) -> str:
    deadline = time.monotonic() + READY_S
    while not (found := master(admin, in_sync=in_sync)):
        assert time.monotonic() < deadline, composed.logs()
        time.sleep(0.1)
    return found


def test_the_services_survive_the_loss_of_a_machine(tmp_path: Path) -> None:
    with services(tmp_path) as composed:
        nameservers = ";".join(
            f"{composed.addresses[name]}:9876" for name in composed.names("nameserver")
        )
        with Admin(nameservers) as admin, Producer(nameservers, group="g") as producer:
            first = await_master(admin, composed, in_sync=3)
            assert producer.send(Message("T", b"1")).status is SendStatus.SEND_OK
            (number,) = (
                name[-1]
                for name in composed.names("broker")
                if composed.addresses[name] == first.partition(":")[0]
            )
            for kind in ("etcd", "nameserver", "controller", "broker"):
                composed.kill(f"{kind}-{number}")
            second = await_master(admin, composed, in_sync=2)
            assert second != first
            assert producer.send(Message("T", b"2")).status is SendStatus.SEND_OK
