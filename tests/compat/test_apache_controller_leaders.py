"""Our brokers under three controllers of Apache, whose leader is killed.

The brokers find the next leader. From then on it gets their heartbeats, changes the in-sync set,
registers a new replica, and elects another master; nothing that was acknowledged is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock import Message, Producer
from penstock.client.messages import SendStatus
from penstock.errors import PeerError, PenstockError
from penstock.wire.codes import RequestCode, ResponseCode
from tests.depth import rounds

from . import apache, clusters, penstock
from .java_session import eventually
from .python_reading import read_bodies
from .test_apache_controllers import BROKER, CONTROLLERS
from .test_controller import NAME
from .test_replication import call

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

COUNT = 3
ROUNDS = rounds(ci=1, proof=5)
TOPIC = "leaders"
MESSAGES = 20
WITHIN_S = 60.0


class Group:
    """Three controllers of Apache, of which one may be down."""

    def __init__(self, directory: Path, version: str, kind: str) -> None:
        ports = apache.controller_group(COUNT)
        self.members: dict[str, apache.Controller] = {}
        for number in range(COUNT):
            member = apache.Controller(
                directory / f"controller-{number}",
                version=version, kind=kind, group=ports, number=number,
            )  # fmt: skip
            member.jvm = ("-Xms64m", "-Xmx384m", *apache.QUICK_START)
            self.members[member.address] = member
        self._down = ""

    def start(self) -> None:
        for member in self.members.values():
            member.begin()
        for member in self.members.values():
            member.await_ready()

    def kill(self) -> None:
        for member in self.members.values():
            member.kill()

    def kill_leader(self) -> None:
        self._down = self.leader()
        self.members[self._down].kill()

    def start_again(self) -> None:
        self.members[self._down].start()
        self._down = ""

    def leader(self) -> str:
        """Wait until all that run agree on a leader; it may change at any time."""

        def agreed() -> str:
            named = {self._named_by(address) for address in self.members if address != self._down}
            found = named.pop() if len(named) == 1 else ""
            return found if found in self.members and found != self._down else ""

        found = eventually(agreed, within_s=WITHIN_S)
        assert found, "the controllers have no leader"
        return found

    def await_in_sync(self, count: int) -> dict[str, Any]:
        """Wait until the in-sync set has this many members, all alive; what the leader says."""

        def enough() -> dict[str, Any] | None:
            code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
            with contextlib.suppress(PeerError):
                answer = call(self.leader(), code, {}, json.dumps([NAME]).encode())
                if answer.code != ResponseCode.CONTROLLER_NOT_LEADER:
                    table = json.loads(answer.body)["replicasInfoTable"]
                    found: dict[str, Any] = table.get(NAME, {})
                    members = found.get("inSyncReplicas", ())
                    alive = sum(one["alive"] for one in members)
                    return found if len(members) == alive == count else None
            return None

        found = eventually(enough, within_s=WITHIN_S)
        assert found, f"the in-sync set has not {count} living members"
        return found

    def _named_by(self, address: str) -> str:
        try:
            answer = call(address, RequestCode.CONTROLLER_GET_METADATA_INFO, {})
        except PeerError:
            return ""
        if answer.code != ResponseCode.SUCCESS:
            return ""
        return answer.ext.get("controllerLeaderAddress", "")


class Brokers:
    """The replicas of one set; more may be started."""

    def __init__(self, root: Path, stack: ExitStack, names: penstock.NameServer, group: Group):
        self.running: dict[str, penstock.Broker] = {}
        self._root = root
        self._stack = stack
        self._names = names
        self._group = group

    def start(self, count: int) -> None:
        new = [self._make(len(self.running) + index) for index in range(count)]
        for broker in new:
            self._stack.callback(broker.kill)
            broker.begin()
        for broker in new:
            broker.await_ready()
            self.running[broker.address] = broker

    def _make(self, number: int) -> penstock.Broker:
        return penstock.Broker(
            self._root / f"broker-{number}",
            self._root / f"store-{number}",
            self._names.address,
            controllerAddr=";".join(self._group.members),
            **BROKER,
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "kind"), CONTROLLERS)
def test_the_leader_of_the_controllers_is_killed(
    java: None, tmp_path: Path, version: str, kind: str
) -> None:
    with ExitStack() as stack:
        names = stack.enter_context(penstock.NameServer(tmp_path / "names"))
        group = Group(tmp_path, version, kind)
        stack.callback(group.kill)
        group.start()
        brokers = Brokers(tmp_path, stack, names, group)
        brokers.start(3)
        producer = stack.enter_context(Producer(names.address, group="p", route_refresh_ms=500))
        sent: set[str] = set()
        group.await_in_sync(3)
        for _ in range(ROUNDS):
            send(producer, sent)
            group.kill_leader()
            everything_works(group, brokers, producer, sent)
            group.start_again()
        bodies = asyncio.run(read_bodies(names.address, TOPIC))
        assert sent <= set(bodies)


def everything_works(group: Group, brokers: Brokers, producer: Producer, sent: set[str]) -> None:
    """At another leader of the controllers."""
    count = len(brokers.running)
    state = group.await_in_sync(count)  # and all are alive: heartbeats arrive
    send(producer, sent)
    slave = next(one for one in brokers.running if one != state["masterAddress"])
    brokers.running[slave].kill()
    assert group.await_in_sync(count - 1)["masterAddress"] == state["masterAddress"]
    brokers.start(1)
    state = group.await_in_sync(count)
    ids = sorted(one["brokerId"] for one in state["inSyncReplicas"])
    assert ids[-1] == count + 1, "the new replica was not registered"
    brokers.running[slave].start()
    group.await_in_sync(count + 1)
    old = brokers.running[state["masterAddress"]]
    old.kill()
    send(producer, sent)
    elected = group.await_in_sync(count)
    assert elected["masterAddress"] != old.address
    assert elected["masterEpoch"] == state["masterEpoch"] + 1
    old.start()
    group.await_in_sync(count + 1)


def send(producer: Producer, sent: set[str]) -> None:
    """Send until some more messages are acknowledged."""
    wanted = len(sent) + MESSAGES

    def send_one() -> bool:
        body = f"{len(sent)}"
        try:
            receipt = producer.send(Message(TOPIC, body.encode()))
        except PenstockError:
            return False
        if receipt.status == SendStatus.SEND_OK:
            sent.add(body)
        return len(sent) >= wanted

    assert eventually(send_one, within_s=WITHIN_S), f"{len(sent)} of {wanted} were acknowledged"
