"""Alarms: sentences about what is wrong in a cluster, the most urgent first."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.client.admin.admin_values import TopicKind
from penstock.console.monitoring.cluster_snapshot import ClusterSnapshot
from penstock.wire.codes import DLQ_TOPIC_PREFIX

DISK_WARN = 0.75
DISK_CRITICAL = 0.85
"""RocketMQ deletes old files early from here on, and refuses writes from 0.9 on."""
LAG_WARN_MS = 60_000
LAG_CRITICAL_MS = 15 * 60_000
GROUPS_MAX = 20
"""Groups with an alarm of their own; the rest is counted."""

_ORDER = {"critical": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class ClusterAlarm:
    """One sentence, and where to look."""

    severity: str
    """critical, warning or info."""
    sentence: str
    link: str = ""


def find_alarms(snapshot: ClusterSnapshot) -> list[ClusterAlarm]:
    """All alarms of a snapshot."""
    found = [
        *_of_servers(snapshot),
        *_of_disks(snapshot),
        *_of_replicas(snapshot),
        *_of_groups(snapshot),
        *_of_dead_letters(snapshot),
    ]
    return sorted(found, key=lambda alarm: _ORDER[alarm.severity])


def _of_servers(snapshot: ClusterSnapshot) -> Iterator[ClusterAlarm]:
    if snapshot.problem:
        yield ClusterAlarm("critical", f"The cluster can't be read: {snapshot.problem}", "/cluster")
    lost = snapshot.lost_replicas()
    names = {state.broker.name for state in snapshot.cluster.brokers} | {one.name for one in lost}
    for state in snapshot.cluster.brokers:
        broker = state.broker
        if state.problem is not None:
            who = broker.name if broker.is_master else f"The replica {broker.id} of {broker.name}"
            yield ClusterAlarm(
                "critical" if broker.is_master else "warning",
                f"{who} ({broker.address}) does not answer: {state.problem.message}.",
                "/cluster",
            )
    for replica in lost:
        yield ClusterAlarm(
            "warning", f"The replica {replica.address} of {replica.name} is down.", "/cluster"
        )
    masters = {state.broker.name for state in snapshot.masters}
    for name in sorted(names - masters):
        yield ClusterAlarm(
            "critical", f"{name} has no master, so it accepts no messages.", "/cluster"
        )


def _of_disks(snapshot: ClusterSnapshot) -> Iterator[ClusterAlarm]:
    for state in snapshot.cluster.brokers:
        used = state.runtime_info.disk_used if state.runtime_info is not None else None
        if used is None or used < DISK_WARN:
            continue
        severity = "critical" if used >= DISK_CRITICAL else "warning"
        yield ClusterAlarm(
            severity,
            f"The disk of {state.broker.name} ({state.broker.address}) is {used:.0%} full.",
            "/cluster",
        )


def _of_replicas(snapshot: ClusterSnapshot) -> Iterator[ClusterAlarm]:
    for replica in snapshot.replicas:
        broker = replica.broker
        if broker.is_master or replica.problem is not None:
            continue
        if replica.error:
            yield ClusterAlarm(
                "warning",
                f"The replica {broker.id} of {broker.name} does not receive the log: "
                f"{replica.error}.",
                "/cluster",
            )
        elif replica.in_sync is False:
            yield ClusterAlarm(
                "warning", f"The replica {broker.id} of {broker.name} is not in sync.", "/cluster"
            )


def _of_groups(snapshot: ClusterSnapshot) -> Iterator[ClusterAlarm]:
    late = sorted(
        (
            (figures.lag_ms, name, figures)
            for name, figures in snapshot.lags()
            if figures.lag_ms is not None and figures.lag_ms >= LAG_WARN_MS
        ),
        key=lambda row: -row[0],
    )
    for lag_ms, name, figures in late[:GROUPS_MAX]:
        count = f"{figures.lag:,} messages" if figures.lag is not None else "messages"
        who = ""
        if figures.members == 0:
            who = " No consumer is connected."
        elif figures.members is not None:
            plural = "consumer is" if figures.members == 1 else "consumers are"
            who = f" {figures.members} {plural} connected."
        yield ClusterAlarm(
            "critical" if lag_ms >= LAG_CRITICAL_MS and figures.members != 0 else "warning",
            f"The group {name} is {duration_text(lag_ms)} behind ({count}).{who}",
            f"/groups/{name}",
        )
    if len(late) > GROUPS_MAX:
        yield ClusterAlarm(
            "warning", f"{len(late) - GROUPS_MAX} more groups are behind.", "/groups?sort=lag_ms"
        )


def _of_dead_letters(snapshot: ClusterSnapshot) -> Iterator[ClusterAlarm]:
    found = [
        (name.removeprefix(DLQ_TOPIC_PREFIX), figures.messages)
        for name, figures in snapshot.topic_figures.items()
        if figures.messages > 0
        and name in snapshot.topics
        and snapshot.topics[name].kind is TopicKind.DLQ
    ]
    for group, count in sorted(found, key=lambda row: -row[1])[:GROUPS_MAX]:
        plural = "dead letter" if count == 1 else "dead letters"
        yield ClusterAlarm(
            "info", f"The group {group} has {count:,} {plural}.", f"/dead-letters/{group}"
        )


def duration_text(ms: int) -> str:
    """A duration in its two largest units."""
    seconds = ms // 1000
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} days"
