"""Alarms as sentences."""

from penstock.client.admin.async_admin import (
    BrokerAddress,
    BrokerState,
    ClusterState,
    ReplicaStatus,
    TopicKind,
)
from penstock.console.monitoring.alarms import duration_text, find_alarms
from penstock.console.monitoring.cluster_snapshot import ClusterSnapshot
from penstock.errors import PeerUnreachable
from tests.unit.console.console_kit import (
    BROKER,
    broker_state,
    group,
    group_figures,
    snapshot,
    topic,
    topic_figures,
)

REPLICA = BrokerAddress("DefaultCluster", "broker-a", 1, "127.0.0.1:10921")


def sentences(at: ClusterSnapshot) -> list[tuple[str, str]]:
    return [(alarm.severity, alarm.sentence) for alarm in find_alarms(at)]


def cluster(*brokers: BrokerState) -> ClusterState:
    return ClusterState(("127.0.0.1:9876",), brokers)


def test_a_healthy_cluster_has_none() -> None:
    at = snapshot(groups={"g": group("g")}, group_figures={"g": group_figures(3, 500)})
    assert sentences(at) == []


def test_a_broker_that_does_not_answer_is_named_with_the_reason() -> None:
    down = BrokerState(BROKER, None, PeerUnreachable("connection refused"))
    at = snapshot(cluster=cluster(down))
    expected = "broker-a (127.0.0.1:10911) does not answer: connection refused."
    assert sentences(at) == [("critical", expected)]


def test_a_broker_without_a_master_accepts_no_messages() -> None:
    at = snapshot(cluster=cluster(broker_state(REPLICA)))
    assert sentences(at) == [("critical", "broker-a has no master, so it accepts no messages.")]


def test_full_disks() -> None:
    at = snapshot(
        cluster=cluster(broker_state(disk_used=0.8), broker_state(REPLICA, disk_used=0.9))
    )
    assert sentences(at) == [
        ("critical", "The disk of broker-a (127.0.0.1:10921) is 90% full."),
        ("warning", "The disk of broker-a (127.0.0.1:10911) is 80% full."),
    ]


def test_a_replica_that_is_not_in_sync() -> None:
    at = snapshot(replicas=(ReplicaStatus(REPLICA, in_sync=False),))
    assert sentences(at) == [("warning", "The replica 1 of broker-a is not in sync.")]


def test_unknown_is_no_alarm() -> None:
    at = snapshot(
        replicas=(ReplicaStatus(REPLICA, in_sync=None),),
        groups={"g": group("g")},
        group_figures={"g": group_figures(None, None, None)},
        cluster=cluster(broker_state(disk_used=None)),
    )
    assert sentences(at) == []


def test_groups_that_are_behind_are_told_with_their_members() -> None:
    at = snapshot(
        groups={name: group(name) for name in ("slow", "stuck", "gone")},
        group_figures={
            "slow": group_figures(1_200, 90_000, 2),
            "stuck": group_figures(5, 20 * 60_000, 1),
            "gone": group_figures(7, 2 * 3_600_000, 0),
        },
    )
    assert sentences(at) == [
        ("critical", "The group stuck is 20 min behind (5 messages). 1 consumer is connected."),
        ("warning", "The group gone is 2 h 0 min behind (7 messages). No consumer is connected."),
        ("warning", "The group slow is 1 min behind (1,200 messages). 2 consumers are connected."),
    ]


def test_dead_letters_are_told() -> None:
    at = snapshot(
        topics={"%DLQ%g": topic("%DLQ%g", TopicKind.DLQ)},
        topic_figures={"%DLQ%g": topic_figures(1)},
    )
    assert sentences(at) == [("info", "The group g has 1 dead letter.")]


def test_a_failed_update_is_critical() -> None:
    at = ClusterSnapshot(problem="no NameServer answers")
    assert sentences(at) == [("critical", "The cluster can't be read: no NameServer answers")]


def test_durations() -> None:
    texts = [duration_text(ms) for ms in (59_000, 60_000, 3_600_000, 3 * 86_400_000)]
    assert texts == ["59 s", "1 min", "1 h 0 min", "3 days"]
