"""GET_BROKER_HA_STATUS and GET_BROKER_EPOCH_CACHE, and what the runtime information adds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.admin.replication_status import ReplicationHandlers
from penstock.broker.admin.runtime_info import RuntimeHandlers
from penstock.broker.replicas.replication_state import MasterState, ReplicationState, SlaveState
from penstock.replication.epochs import Epoch
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.cluster_bodies import (
    EpochEntryCache,
    HAClientRuntimeInfo,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
)
from penstock.wire.codes import RequestCode, ResponseCode
from tests.unit.broker.admin.admin_kit import AdminFixture, admin_fixture, decoded, reply

EPOCHS = (Epoch(1, 0), Epoch(3, 100))
MASTER = MasterState(
    address="10.0.0.1:10912",
    connected=True,
    log_end=500,
    error="",
    behind_ms=0,
    received_bytes=500,
    bytes_per_second=7,
    read_ms=11,
    written_ms=12,
)


def slave(name: str, address: str, acknowledged: int, *, in_sync: bool = True) -> SlaveState:
    return SlaveState(
        name=name,
        address=address,
        acknowledged=acknowledged,
        sent=acknowledged + 5,
        in_sync=in_sync,
        acknowledges_flushed=True,
        bytes_per_second=9,
    )


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path / "store") as env:
        yield env


def show(env: AdminFixture, state: ReplicationState) -> None:
    env.context.role.replication = lambda: state


def test_master_without_slaves(env: AdminFixture) -> None:
    env.put("orders")
    family = ReplicationHandlers(env.context)
    info = decoded(family, HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS)
    assert info == HARuntimeInfo(
        master=True, master_commit_log_max_offset=env.store.log.end, in_sync_slave_nums=0
    )


def test_master_shows_its_slaves(env: AdminFixture) -> None:
    env.put("orders")
    end = env.store.log.end
    slaves = (
        slave("1", "10.0.0.2:40000", end),
        slave("2", "10.0.0.3:40000", 10, in_sync=False),
        slave("3", "", end),  # in sync, but its connection is lost
    )
    show(env, ReplicationState("sync_master", EPOCHS, slaves))
    info = decoded(
        ReplicationHandlers(env.context), HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS
    )
    assert (info.master, info.in_sync_slave_nums) == (True, 2)
    assert info.ha_connection_info == [
        HAConnectionRuntimeInfo(
            addr="10.0.0.2:40000",
            slave_ack_offset=end,
            diff=0,
            in_sync=True,
            transferred_byte_in_second=9,
            transfer_from_where=end + 5,
        ),
        HAConnectionRuntimeInfo(
            addr="10.0.0.3:40000",
            slave_ack_offset=10,
            diff=end - 10,
            in_sync=False,
            transferred_byte_in_second=9,
            transfer_from_where=15,
        ),
    ]


def test_slave_shows_its_master(env: AdminFixture) -> None:
    env.put("orders")
    show(env, ReplicationState("slave", EPOCHS, master=MASTER))
    info = decoded(
        ReplicationHandlers(env.context), HARuntimeInfo, RequestCode.GET_BROKER_HA_STATUS
    )
    assert info == HARuntimeInfo(
        ha_client_runtime_info=HAClientRuntimeInfo(
            master_addr="10.0.0.1:10912",
            transferred_byte_in_second=7,
            max_offset=env.store.log.end,
            last_read_timestamp=11,
            last_write_timestamp=12,
        )
    )


def test_epochs_as_apache_writes_them(env: AdminFixture) -> None:
    env.put("orders")
    show(env, ReplicationState("async_master", EPOCHS))
    family = ReplicationHandlers(env.context)
    body = reply(family, RequestCode.GET_BROKER_EPOCH_CACHE).body
    config = env.live.current.broker
    assert body.decode() == (
        f'{{"brokerId":0,"brokerName":"{config.name}","clusterName":"{config.cluster}",'
        '"epochList":[{"endOffset":100,"epoch":1,"startOffset":0},'
        '{"endOffset":9223372036854775807,"epoch":3,"startOffset":100}],'
        f'"maxOffset":{env.store.log.end}}}'
    )
    show(env, ReplicationState("slave", (), master=MASTER))
    assert decoded(family, EpochEntryCache, RequestCode.GET_BROKER_EPOCH_CACHE).epoch_list == []


def test_the_static_protocol_has_no_epochs(env: AdminFixture) -> None:
    answer = reply(ReplicationHandlers(env.context), RequestCode.GET_BROKER_EPOCH_CACHE)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark is not None
    assert answer.remark.startswith("this request only for controllerMode")


def test_runtime_information_names_the_slaves_in_sync(env: AdminFixture) -> None:
    def table() -> dict[str, str]:
        family = RuntimeHandlers(env.context, env.timers)
        return decoded(family, KVTable, RequestCode.GET_BROKER_RUNTIME_INFO).table

    assert table()["penstockRole"] == "async_master"
    assert "penstockInSyncSlaves" not in table()
    slaves = (slave("1", "", 0), slave("2", "", 0, in_sync=False), slave("5", "", 0))
    show(env, ReplicationState("sync_master", EPOCHS, slaves))
    assert (table()["penstockRole"], table()["penstockInSyncSlaves"]) == ("sync_master", "1,5")
    show(env, ReplicationState("slave", EPOCHS, master=MASTER))
    assert table()["penstockMasterConnected"] == "true"
