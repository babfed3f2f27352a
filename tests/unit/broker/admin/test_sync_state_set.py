"""The in-sync set, as mqadmin asks controllers for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.admin.sync_state_set import SyncStateHandlers
from penstock.broker.replicas.replication_state import ReplicationState
from penstock.replication.epochs import Epoch
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import BrokerReplicasInfo, ReplicaIdentity, ReplicasInfo
from penstock.wire.codes import RequestCode, ResponseCode
from tests.unit.broker.admin.admin_kit import AdminFixture, admin_fixture, decoded, reply
from tests.unit.broker.admin.test_replication_status import show, slave

LEADER = RequestCode.CONTROLLER_GET_METADATA_INFO
IN_SYNC = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path / "store") as env:
        yield env


def names(*brokers: str) -> bytes:
    return fastjson.encode(list(brokers))


def test_a_master_answers_for_its_own_broker(env: AdminFixture) -> None:
    family, own = SyncStateHandlers(env.context), env.context.settings.current.broker.name
    slaves = (
        slave("1", "10.0.0.2:4000", 100),
        slave("2", "10.0.0.3:4000", 20, in_sync=False),
        slave("3", "", 90),
    )
    show(env, ReplicationState("sync_master", (Epoch(1, 0), Epoch(3, 50)), slaves))
    ext = reply(family, LEADER).ext or {}
    assert ext["controllerLeaderAddress"] == env.context.address
    assert ext["isLeader"] == "true"

    def identity(number: int, address: str) -> ReplicaIdentity:
        return ReplicaIdentity(
            broker_name=own, broker_id=number, broker_address=address, alive=bool(address)
        )

    asked = decoded(family, BrokerReplicasInfo, IN_SYNC, body=names("other", own))
    assert asked.replicas_info_table == {
        own: ReplicasInfo(
            master_address=env.context.address,
            master_epoch=3,
            in_sync_replicas=[
                identity(0, env.context.address),
                identity(1, "10.0.0.2:4000"),
                identity(3, ""),
            ],
            not_in_sync_replicas=[identity(2, "10.0.0.3:4000")],
        )
    }
    assert decoded(family, BrokerReplicasInfo, IN_SYNC, body=names("other")) == BrokerReplicasInfo()


def test_a_slave_names_its_master(env: AdminFixture) -> None:
    family, role = SyncStateHandlers(env.context), env.context.role
    show(env, ReplicationState("slave", (Epoch(1, 0),)))
    role.slave, role.master_address = True, "10.0.0.1:10911"
    ext = reply(family, LEADER).ext or {}
    assert (ext["controllerLeaderAddress"], ext["isLeader"]) == ("10.0.0.1:10911", "false")
    assert reply(family, IN_SYNC, body=names("a")).code == ResponseCode.SYSTEM_BUSY
    role.master_address = ""
    assert reply(family, LEADER).code == ResponseCode.SYSTEM_BUSY


def test_without_epochs_there_are_no_ids(env: AdminFixture) -> None:
    family = SyncStateHandlers(env.context)
    show(env, ReplicationState("sync_master"))
    for code in (LEADER, IN_SYNC):
        assert reply(family, code, body=names("a")).code == ResponseCode.SYSTEM_ERROR
