"""What the console knows about a cluster at one time. All pages read it; none asks each topic.

The tables of topics and groups are complete. Their figures (messages, rates, lag) cost a request
per topic or group, so they are measured in turn: a value that was not measured yet is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.client.admin.admin_values import (
    BrokerState,
    ClusterState,
    GroupInfo,
    TopicInfo,
)
from penstock.client.admin.async_admin import ElectionHistory, ReplicaStatus
from penstock.console.monitoring.lost_replicas import LostReplica, SeenReplica, lost_replicas


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """The measured figures of a topic."""

    at_ms: int
    stored: int
    """The sum of the queues' next offsets: it only grows."""
    messages: int
    last_ms: int | None
    """The store time of the newest message."""
    rate_in: float | None
    partial: bool = False
    """Whether a broker that has the topic could not be asked."""


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """The measured figures of a group."""

    at_ms: int
    lag: int | None
    lag_ms: int | None
    rate_out: float | None
    members: int | None
    topics: tuple[str, ...]
    model: str | None = None
    partial: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at `at_ms`. `problem` says why the last update failed."""

    at_ms: int = 0
    cluster: ClusterState = field(default_factory=lambda: ClusterState((), ()))
    replicas: tuple[ReplicaStatus, ...] = ()
    histories: tuple[ElectionHistory, ...] = ()
    """The elections and replicas of each broker that has controllers."""
    seen: Mapping[str, SeenReplica] = field(default_factory=dict)
    """The last answer of each broker, by address."""
    topics: Mapping[str, TopicInfo] = field(default_factory=dict)
    groups: Mapping[str, GroupInfo] = field(default_factory=dict)
    topic_figures: Mapping[str, TopicFigures] = field(default_factory=dict)
    group_figures: Mapping[str, MeasuredGroup] = field(default_factory=dict)
    problem: str = ""

    def lost_replicas(self) -> list[LostReplica]:
        """The replicas that are not registered with the NameServers any more."""
        registered = [state.broker for state in self.cluster.brokers]
        return lost_replicas(registered, self.histories, self.seen)

    @property
    def masters(self) -> list[BrokerState]:
        return [state for state in self.cluster.brokers if state.broker.is_master]

    @property
    def rate_in(self) -> float | None:
        """Messages stored per second at all masters; None if one is unknown."""
        return _total([info.put_tps if (info := m.runtime_info) else None for m in self.masters])

    @property
    def rate_out(self) -> float | None:
        """Messages read per second at all masters; None if one is unknown."""
        return _total([info.get_tps if (info := m.runtime_info) else None for m in self.masters])

    @property
    def disk_used(self) -> float | None:
        """The share of the fullest disk that is known."""
        shares = [
            state.runtime_info.disk_used
            for state in self.cluster.brokers
            if state.runtime_info is not None and state.runtime_info.disk_used is not None
        ]
        return max(shares, default=None)

    def lags(self) -> list[tuple[str, MeasuredGroup]]:
        """The groups of applications that were measured."""
        return [
            (name, figures)
            for name, figures in self.group_figures.items()
            if name in self.groups and not self.groups[name].is_system
        ]

    @property
    def lag(self) -> int | None:
        """Messages that are not consumed yet, in all groups whose lag is known."""
        known = [figures.lag for _, figures in self.lags() if figures.lag is not None]
        return sum(known) if known else None

    @property
    def lag_ms(self) -> int | None:
        """The age of the oldest message that a group has not consumed yet."""
        known = [figures.lag_ms for _, figures in self.lags() if figures.lag_ms is not None]
        return max(known, default=None)


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
