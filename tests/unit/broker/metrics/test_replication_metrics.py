"""The metrics of replication."""

from types import SimpleNamespace
from typing import Any, cast

from penstock.broker.metrics.replication_metrics import add_replication_metrics
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.broker.replicas.replication_state import MasterState, ReplicationState, SlaveState
from penstock.metrics import Registry
from penstock.replication.epochs import Epoch

EPOCHS = (Epoch(1, 0), Epoch(4, 100))


def lines(state: ReplicationState) -> set[str]:
    role = ReplicaRole(slave=state.role == "slave")
    role.replication = lambda: state
    context = SimpleNamespace(role=role, store=SimpleNamespace(log=SimpleNamespace(end=1000)))
    registry = Registry()
    add_replication_metrics(registry, cast(Any, context))
    return {line for line in registry.text().splitlines() if not line.startswith("#")}


def test_metrics_of_a_master() -> None:
    slaves = (
        SlaveState(
            "1", "h:1", 900, 950, in_sync=True, acknowledges_flushed=True, bytes_per_second=7
        ),
        SlaveState(
            "2",
            "",
            10,
            10,
            in_sync=False,
            acknowledges_flushed=False,
            bytes_per_second=0,
            behind_ms=1500,
        ),
    )
    assert lines(ReplicationState("sync_master", EPOCHS, slaves)) == {
        'penstock_replication_role{role="async_master"} 0',
        'penstock_replication_role{role="sync_master"} 1',
        'penstock_replication_role{role="slave"} 0',
        "penstock_replication_epoch 4",
        "penstock_replication_deleted_bytes_total 0",
        'penstock_replication_slave_connected{slave="1"} 1',
        'penstock_replication_slave_connected{slave="2"} 0',
        'penstock_replication_slave_in_sync{slave="1"} 1',
        'penstock_replication_slave_in_sync{slave="2"} 0',
        'penstock_replication_slave_behind_bytes{slave="1"} 100',
        'penstock_replication_slave_behind_bytes{slave="2"} 990',
        'penstock_replication_slave_behind_seconds{slave="1"} 0',
        'penstock_replication_slave_behind_seconds{slave="2"} 1.5',
        'penstock_replication_slave_acknowledges_flushed{slave="1"} 1',
        'penstock_replication_slave_acknowledges_flushed{slave="2"} 0',
        'penstock_replication_slave_bytes_per_second{slave="1"} 7',
        'penstock_replication_slave_bytes_per_second{slave="2"} 0',
    }


def master(log_end: int | None) -> MasterState:
    return MasterState(
        address="h:2",
        connected=log_end is not None,
        log_end=log_end,
        error="",
        behind_ms=2500,
        received_bytes=70,
        bytes_per_second=9,
        read_ms=1,
        written_ms=2,
    )


def test_metrics_of_a_slave() -> None:
    found = lines(ReplicationState("slave", EPOCHS, master=master(1500)))
    assert found >= {
        'penstock_replication_role{role="slave"} 1',
        "penstock_replication_connected 1",
        "penstock_replication_behind_bytes 500",
        "penstock_replication_behind_seconds 2.5",
        "penstock_replication_received_bytes_total 70",
        "penstock_replication_bytes_per_second 9",
    }


def test_what_is_not_known_has_no_sample() -> None:
    found = lines(ReplicationState("slave", master=master(None)))
    names = {line.split("{")[0].split()[0] for line in found}
    assert "penstock_replication_connected" in names
    assert not names & {"penstock_replication_behind_bytes", "penstock_replication_epoch"}
