"""The metrics of a controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.metrics import HistogramFamily, Registry, Sample

if TYPE_CHECKING:
    from penstock.server.controller.broker_set_states import StoredBrokerSetStates
    from penstock.server.controller.broker_set_store import BrokerSetStore
    from penstock.server.controller.etcd.etcd_backend import EtcdBackend
    from penstock.server.controller.liveness import Liveness


def add_controller_metrics(
    registry: Registry, states: StoredBrokerSetStates, store: BrokerSetStore, liveness: Liveness
) -> None:
    """Add the metrics of every controller."""
    registry.gauge(
        "penstock_controller_broker_sets",
        "Known broker sets.",
        read=lambda: len(list(store.all_last_seen())),
    )
    registry.gauge(
        "penstock_controller_without_master",
        "Broker sets that have lost their master and have no other.",
        read=states.without_master,
    )
    registry.gauge(
        "penstock_controller_living_replicas",
        "Replicas that are alive.",
        read=liveness.count,
    )
    registry.counter(
        "penstock_controller_elections_total",
        "Elections that this controller has decided.",
        read=lambda: states.elections,
    )
    registry.counter(
        "penstock_controller_conflicts_total",
        "Decisions that were made again, because the state had changed.",
        read=lambda: states.conflicts,
    )
    registry.counter(
        "penstock_controller_failed_notifications_total",
        "Replicas that could not be told who their master is.",
        read=lambda: states.notifications.failures,
    )


def add_etcd_metrics(registry: Registry, backend: EtcdBackend) -> None:
    """Add the metrics of a controller with etcd."""
    figures = backend.client.figures
    registry.counter(
        "penstock_etcd_calls_total",
        "Calls to etcd by path and outcome: ok, refused, failed.",
        ("path", "outcome"),
        read=lambda: list(figures.calls.items()),
    )
    registry.counter(
        "penstock_etcd_failed_attempts_total",
        "Attempts that failed, by member.",
        ("member",),
        read=lambda: _by_member(backend),
    )
    registry.add(
        HistogramFamily(
            "penstock_etcd_call_seconds", "Time of calls that etcd answered.", figures.seconds
        )
    )
    registry.counter(
        "penstock_etcd_resyncs_total",
        "How often all keys were read.",
        read=lambda: backend.watch.resyncs,
    )


def _by_member(backend: EtcdBackend) -> Iterator[Sample]:
    for member, count in list(backend.client.figures.failures.items()):
        yield (member,), count
