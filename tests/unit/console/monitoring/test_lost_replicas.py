"""Replicas that are not registered any more."""

from penstock.client.admin.async_admin import (
    BrokerAddress,
    ElectionHistory,
    KnownReplica,
    ReplicaStatus,
)
from penstock.console.monitoring.alarms import find_alarms
from penstock.console.monitoring.lost_replicas import REMEMBER_MS, lost_replicas, remember
from penstock.errors import PeerUnreachable
from tests.unit.console.console_kit import NOW_MS, broker_state, snapshot

MASTER = BrokerAddress("C", "broker-a", 0, "10.0.0.1:10911")
SLAVE = BrokerAddress("C", "broker-a", 2, "10.0.0.2:10911")
SET = ElectionHistory(
    "broker-a",
    replicas=(
        KnownReplica(1, MASTER.address, is_alive=False, in_sync=False, is_master=False),
        KnownReplica(2, SLAVE.address, is_alive=True, in_sync=True, is_master=True),
    ),
)


def seen_both() -> dict[str, object]:
    states = [broker_state(MASTER, log_end=500), broker_state(SLAVE)]
    status = ReplicaStatus(MASTER, role="sync_master", log_end=500)
    return dict(remember({}, states, [status], NOW_MS))


def test_controllers_tell_which_replicas_are_lost() -> None:
    promoted = BrokerAddress("C", "broker-a", 0, SLAVE.address)
    [lost] = lost_replicas([promoted], [SET], seen_both())  # type: ignore[arg-type]
    assert (lost.cluster, lost.id, lost.address) == ("C", 1, MASTER.address)
    assert (lost.is_alive, lost.in_sync) == (False, False)
    assert lost.seen is not None
    assert lost.seen.status is not None
    assert lost.seen.status.log_end == 500


def test_all_replicas_may_be_lost() -> None:
    assert len(lost_replicas([], [SET], seen_both())) == 2  # type: ignore[arg-type]


def test_without_controllers_the_memory_tells_it() -> None:
    seen = seen_both()
    assert lost_replicas([MASTER, SLAVE], [], seen) == []  # type: ignore[arg-type]
    [lost] = lost_replicas([MASTER], [], seen)  # type: ignore[arg-type]
    assert (lost.id, lost.address, lost.is_alive) == (None, SLAVE.address, None)
    moved = BrokerAddress("C", "broker-a", 2, "10.0.0.9:10911")
    assert lost_replicas([MASTER, moved], [], seen) == []  # type: ignore[arg-type]


def test_only_answers_are_remembered_and_for_an_hour() -> None:
    silent = broker_state(SLAVE)
    silent = type(silent)(SLAVE, None, PeerUnreachable("connection refused"))
    seen = remember({}, [broker_state(MASTER), silent], [], NOW_MS)
    assert list(seen) == [MASTER.address]
    assert remember(seen, [], [], NOW_MS + REMEMBER_MS - 1) == seen
    assert remember(seen, [], [], NOW_MS + REMEMBER_MS) == {}


def test_a_lost_replica_is_an_alarm() -> None:
    at = snapshot(histories=(SET,), seen=seen_both())
    sentences = [alarm.sentence for alarm in find_alarms(at)]
    assert f"The replica {MASTER.address} of broker-a is down." in sentences
