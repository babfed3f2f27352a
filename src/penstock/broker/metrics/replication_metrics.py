"""The metrics of replication. docs/metrics.md explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.broker.replicas.replication_state import MasterState, SlaveState
from penstock.config.replication_settings import ROLES
from penstock.metrics import Registry, Sample

if TYPE_CHECKING:
    from penstock.broker.context import BrokerContext


def add_replication_metrics(registry: Registry, context: BrokerContext) -> None:
    """Add the metrics of a broker's replication; what is not known has no sample."""
    role = context.role
    registry.gauge(
        "penstock_replication_role",
        "1 for the role of the broker.",
        ("role",),
        read=lambda: [((name,), name == role.replication().role) for name in ROLES],
    )
    registry.gauge(
        "penstock_replication_epoch",
        "The last epoch of the log.",
        read=lambda: _known(role.replication().epoch),
    )
    if role.slave:
        _add_slave_metrics(registry, context)
    else:
        _add_master_metrics(registry, context)


def _add_master_metrics(registry: Registry, context: BrokerContext) -> None:
    log = context.store.log

    def add(name: str, help: str, value: Callable[[SlaveState], float]) -> None:
        registry.gauge(
            f"penstock_replication_slave_{name}",
            help,
            ("slave",),
            read=lambda: [((one.name,), value(one)) for one in context.role.replication().slaves],
        )

    registry.counter(
        "penstock_replication_deleted_bytes_total",
        "Bytes of the log that retention deleted before a connected slave had them.",
        read=lambda: [((), context.role.replication().deleted_bytes)],
    )
    add("connected", "1 while the slave is connected.", lambda one: bool(one.address))
    add("in_sync", "1 while the slave is in sync.", lambda one: one.in_sync)
    add(
        "behind_bytes",
        "Bytes of the log that the slave has not acknowledged.",
        lambda one: max(log.end - one.acknowledged, 0),
    )
    add(
        "behind_seconds",
        "For how long the slave has not had all of the log.",
        lambda one: one.behind_ms / 1000,
    )
    add(
        "acknowledges_flushed",
        "1 if the slave acknowledges what is on its disk.",
        lambda one: one.acknowledges_flushed,
    )
    add(
        "bytes_per_second",
        "Bytes of the log sent to the slave in the last second.",
        lambda one: one.bytes_per_second,
    )


def _add_slave_metrics(registry: Registry, context: BrokerContext) -> None:
    role, log = context.role, context.store.log

    def read(value: Callable[[MasterState], float | None]) -> Callable[[], Iterator[Sample]]:
        def samples() -> Iterator[Sample]:
            master = role.replication().master
            return _known(None if master is None else value(master))

        return samples

    registry.gauge(
        "penstock_replication_connected",
        "1 while the slave is connected to its master.",
        read=read(lambda master: master.connected),
    )
    registry.gauge(
        "penstock_replication_behind_bytes",
        "Bytes of the master's log that the slave lacks, as far as it knows.",
        read=read(
            lambda master: None if master.log_end is None else max(master.log_end - log.end, 0)
        ),
    )
    registry.gauge(
        "penstock_replication_behind_seconds",
        "For how long the slave has not had all of its master's log.",
        read=read(lambda master: master.behind_ms / 1000),
    )
    registry.counter(
        "penstock_replication_received_bytes_total",
        "Bytes received from the master.",
        read=read(lambda master: master.received_bytes),
    )
    registry.gauge(
        "penstock_replication_bytes_per_second",
        "Bytes received from the master in the last second.",
        read=read(lambda master: master.bytes_per_second),
    )


def _known(value: float | None) -> Iterator[Sample]:
    if value is not None:
        yield (), value
