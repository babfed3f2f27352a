"""The status of replicas, from what Penstock's and Apache's brokers say."""

import asyncio
from typing import Any

from penstock.client.admin.admin_values import BrokerAddress
from penstock.client.admin.async_admin import AsyncAdmin, ReplicaStatus
from penstock.errors import PeerUnreachable
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.cluster_bodies import (
    EpochEntry,
    EpochEntryCache,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
)
from penstock.wire.codes import RequestCode, ResponseCode

NOT_SUPPORTED = Response(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)


class FakeAdmin(AsyncAdmin):
    """Brokers with scripted answers; one without answers can't be reached."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.answers: dict[str, dict[int, Response]] = {}
        self.known: list[BrokerAddress] = []

    def add(
        self,
        id: int,
        address: str,
        table: dict[str, str] | None = None,
        *,
        status: HARuntimeInfo | None = None,
        epochs: tuple[int, ...] = (),
    ) -> None:
        self.known.append(BrokerAddress("C", "a", id, address))
        answers = self.answers[address] = {}
        if table is not None:
            body = fastjson.encode(KVTable(table=table))
            answers[RequestCode.GET_BROKER_RUNTIME_INFO] = Response(body=body)
        if status is not None:
            answers[RequestCode.GET_BROKER_HA_STATUS] = Response(body=fastjson.encode(status))
        if epochs:
            entries = [EpochEntry(epoch=number) for number in epochs]
            body = fastjson.encode(EpochEntryCache(epoch_list=entries))
            answers[RequestCode.GET_BROKER_EPOCH_CACHE] = Response(body=body)

    async def brokers(self, cluster: str | None = None) -> list[BrokerAddress]:
        return self.known

    async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
        if RequestCode.GET_BROKER_RUNTIME_INFO not in self.answers[address]:
            raise PeerUnreachable(f"{address} can't be reached")
        return self.answers[address].get(code, NOT_SUPPORTED)

    def status(self) -> tuple[ReplicaStatus, ...]:
        return asyncio.run(self.replicas())


def connected(*slaves: tuple[str, bool]) -> HARuntimeInfo:
    return HARuntimeInfo(
        master=True,
        ha_connection_info=[
            HAConnectionRuntimeInfo(addr=address, in_sync=in_sync) for address, in_sync in slaves
        ],
    )


def test_penstock_names_the_slaves_in_sync() -> None:
    admin = FakeAdmin()
    master = {
        "penstockRole": "sync_master",
        "penstockInSyncSlaves": "1,12",
        "commitLogMaxOffset": "900",
    }
    slave = {"penstockRole": "slave", "commitLogMaxOffset": "900"}
    late = {**slave, "commitLogMaxOffset": "100", "penstockReplicationError": "no route"}
    admin.add(2, "h:31", late, epochs=(1,))
    admin.add(1, "h:21", slave, epochs=(1, 2))
    admin.add(0, "h:11", master, epochs=(1, 2))
    first, second, third = admin.status()
    assert (first.role, first.epoch, first.log_end) == ("sync_master", 2, 900)
    assert (first.behind, first.in_sync) == (None, None)
    assert (second.role, second.epoch, second.behind, second.in_sync) == ("slave", 2, 0, True)
    assert (third.epoch, third.behind, third.in_sync) == (1, 800, False)
    assert third.error == "no route"


def test_apache_says_only_the_hosts_of_its_slaves() -> None:
    admin = FakeAdmin()
    status = connected(("10.0.0.2:40001", True), ("10.0.0.3:40002", False))
    admin.add(0, "10.0.0.1:10911", {"commitLogMaxOffset": "900"}, status=status)
    for id in (1, 2, 3):
        address, table = f"10.0.0.{id + 1}:10911", {"commitLogMaxOffset": "800"}
        admin.add(id, address, table, status=HARuntimeInfo())
    found = admin.status()
    assert [one.role for one in found] == ["master", "slave", "slave", "slave"]
    assert [one.in_sync for one in found] == [None, True, False, False]
    assert [one.behind for one in found] == [None, 100, 100, 100]
    assert [one.epoch for one in found] == [None] * 4


def test_slaves_on_one_host_can_not_always_be_told_apart() -> None:
    for states, expected in (
        ((True, True), True),
        ((True, False), None),
        ((True,), None),
        ((False,), False),
        ((), False),
    ):
        admin = FakeAdmin()
        status = connected(*((f"h:{port}", state) for port, state in enumerate(states)))
        admin.add(0, "h:10", {}, status=status)
        admin.add(1, "h:20", {})
        admin.add(2, "h:30", {})
        assert [one.in_sync for one in admin.status()[1:]] == [expected, expected], states


def test_a_connection_from_another_host_may_be_the_slave() -> None:
    admin = FakeAdmin()
    admin.add(0, "h:10", {}, status=connected(("10.9.9.9:1", True)))
    admin.add(1, "g:20", {})
    assert admin.status()[1].in_sync is None


def test_what_is_not_known_is_none() -> None:
    admin = FakeAdmin()
    admin.add(0, "h:10")
    admin.add(1, "h:20", {"commitLogMaxOffset": "800"})
    master, slave = admin.status()
    assert isinstance(master.problem, PeerUnreachable)
    assert (master.role, master.log_end) == (None, None)
    assert (slave.role, slave.log_end, slave.behind, slave.in_sync) == (None, 800, None, None)
