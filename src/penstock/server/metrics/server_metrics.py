"""The metrics of a server: its connections, requests, registration and process."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from penstock.broker.admin.process_memory import memory_bytes
from penstock.metrics import Registry, Sample
from penstock.server.registration.nameserver_registration import NameServerState
from penstock.server.replication.controlled_broker import ControlledBroker
from penstock.server.replication.forwarding import Forwarding
from penstock.server.rpc_latency import add_rpc_metrics
from penstock.server.server import Server

_NAMESERVER = ("nameserver",)


def add_server_metrics(
    registry: Registry, server: Server, handler_refusals: Mapping[str, int]
) -> None:
    """Add the metrics of a server. `handler_refusals` are those of its router."""
    executor = server.answer_executor
    add_rpc_metrics(registry, server.rpc_latency, server.request_loop)
    registry.gauge(
        "penstock_connections",
        "Open connections.",
        read=lambda: len(server.connections),
    )
    registry.counter(
        "penstock_refused_connections_total",
        "Connections refused because of connections_max.",
        read=lambda: server.refused_connections,
    )
    registry.counter(
        "penstock_bad_frames_total",
        "Connections closed because of a frame that breaks the protocol.",
        read=lambda: server.bad_frames,
    )
    registry.counter(
        "penstock_requests_total",
        "Requests, and responses from clients, that were read.",
        read=lambda: server.request_loop.requests,
    )
    registry.counter(
        "penstock_refused_total",
        "Refused requests by the name of the error.",
        ("cause",),
        read=lambda: _sums(server.request_loop.refusals, handler_refusals, executor.refusals),
    )
    registry.gauge(
        "penstock_pool_jobs",
        "Requests that wait for the disk, in the thread pool.",
        read=lambda: executor.thread_jobs,
    )
    registry.gauge(
        "penstock_buffered_bytes",
        "Unfinished requests and unsent responses (memory_bytes_max).",
        read=lambda: server.memory.used,
    )
    registry.gauge(
        "penstock_loop_lag_ms_max",
        "The longest time that the requests of one read took, since the start.",
        read=lambda: server.lag_ms_max,
    )


def add_registration_metrics(registry: Registry, states: Sequence[NameServerState]) -> None:
    """Add the metrics of a broker's registration, by NameServer."""
    registry.gauge(
        "penstock_nameserver_registered",
        "1 while the broker is registered with this NameServer.",
        _NAMESERVER,
        read=lambda: [((state.address,), state.registered) for state in states],
    )
    registry.gauge(
        "penstock_nameserver_success_timestamp_seconds",
        "Time of the last successful registration; 0: never.",
        _NAMESERVER,
        read=lambda: [((state.address,), state.success_ms / 1000) for state in states],
    )
    registry.gauge(
        "penstock_nameserver_failures",
        "Failed registrations since the last success.",
        _NAMESERVER,
        read=lambda: [((state.address,), state.failures) for state in states],
    )


def add_contact_metrics(
    registry: Registry, contact: ControlledBroker, forwarding: Forwarding | None
) -> None:
    """Add the metrics of a broker's contact with its controllers, and of requests that it forwards
    to the master that they have elected."""
    registry.gauge(
        "penstock_controller_lease_age_seconds",
        "Time since a controller has last confirmed this replica.",
        read=lambda: contact.lease_age_ms / 1000,
    )
    registry.gauge(
        "penstock_controller_master_epoch",
        "The epoch of the last master that this replica was told of.",
        read=lambda: 0 if contact.role is None else contact.role.epoch,
    )
    registry.gauge(
        "penstock_controller_in_sync_replicas",
        "Members of the in-sync set, as the controllers last said.",
        read=lambda: contact.in_sync_count,
    )
    registry.counter(
        "penstock_controller_role_changes_total",
        "How often this replica was told to be the master or to follow another one.",
        read=lambda: contact.role_changes,
    )
    registry.counter(
        "penstock_controller_calls_total",
        "Heartbeats and other requests to controllers, by their outcome.",
        ("outcome",),
        read=lambda: [(("ok",), contact.calls_ok), (("failed",), contact.calls_failed)],
    )
    registry.counter(
        "penstock_forwarded_requests_total",
        "Requests that this slave has sent on to the master, for clients with an outdated route.",
        read=lambda: 0 if forwarding is None else forwarding.count,
    )


def add_process_metrics(registry: Registry) -> None:
    """Add the memory and processor time of this process."""
    registry.gauge(
        "process_resident_memory_bytes",
        "Memory of the process, mapped files included.",
        read=lambda: _known(memory_bytes("VmRSS")),
    )
    registry.gauge(
        "penstock_memory_bytes",
        "Memory of the process without mapped files.",
        read=lambda: _known(memory_bytes("RssAnon")),
    )
    registry.counter(
        "process_cpu_seconds_total",
        "Processor time of the process.",
        read=lambda: sum(os.times()[:2]),
    )


def _sums(*counters: Mapping[str, int]) -> Iterator[Sample]:
    sums: Counter[str] = Counter()
    for counter in counters:
        sums.update(counter)
    for name, count in sums.items():
        yield (name,), count


def _known(value: int | None) -> list[Sample]:
    return [] if value is None else [((), value)]
