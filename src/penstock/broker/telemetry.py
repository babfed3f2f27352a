"""The metrics of a broker: RocketMQ's names where we have the figure, ours besides.

All figures are read when somebody scrapes; docs/metrics.md explains them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.broker.context import BrokerContext
from penstock.broker.stats import Flow
from penstock.metrics import Registry, Sample
from penstock.wire.codes import (
    RETRY_TOPIC_PREFIX,
    is_system_group,
    is_system_topic,
    language_name,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker

STORAGE = ("storage_type", "storage_medium")
LOCAL_DISK = ("local", "disk")


class TurnFigures(Protocol):
    """What one turn after the other counts."""

    requests: int
    refusals: dict[str, int]


class CarrierFigures(Protocol):
    """What is under way besides the turns."""

    pool_jobs: int
    refusals: dict[str, int]


class ServerFigures(Protocol):
    """What is read of the server."""

    bad_frames: int
    refused_connections: int
    memory: int
    lag_ms_max: float

    @property
    def connections(self) -> Mapping[int, object]: ...

    @property
    def request_loop(self) -> TurnFigures: ...

    @property
    def answer_executor(self) -> CarrierFigures: ...


class NameServerFigures(Protocol):
    """How it stands with one NameServer."""

    address: str
    registered: bool
    success_ms: int
    failures: int


class RegistrarFigures(Protocol):
    """What is read of the registrar."""

    @property
    def states(self) -> Sequence[NameServerFigures]: ...


def broker_metrics(broker: Broker, server: ServerFigures, registrar: RegistrarFigures) -> Registry:
    """All metrics of a broker."""
    config = broker.context.settings.current.broker
    registry = Registry({"cluster": config.cluster, "node_type": "broker", "node_id": config.name})
    _add_messages(registry, broker.context)
    _add_consumers(registry, broker.context)
    _add_detours(registry, broker)
    broker.timers.add_metrics(registry)
    broker.transactions.add_metrics(registry)
    broker.pop.add_metrics(registry)
    broker.replies.add_metrics(registry)
    _add_connections(registry, broker.context, server)
    _add_storage(registry, broker.context)
    _add_server(registry, broker, server)
    _add_registration(registry, registrar)
    _add_process(registry, broker.context)
    return registry


# --- messages ------------------------------------------------------------------------------------


def _add_messages(registry: Registry, context: BrokerContext) -> None:
    topic = ("topic", "is_system")
    registry.counter(
        "rocketmq_messages_in_total", "Messages stored since the start.", topic,
        read=lambda: _stored(context, 0),
    )  # fmt: skip
    registry.counter(
        "rocketmq_throughput_in_total", "Bytes of messages stored since the start.", topic,
        read=lambda: _stored(context, 1),
    )  # fmt: skip
    group = ("topic", "consumer_group", "is_system", "is_retry")
    registry.counter(
        "rocketmq_messages_out_total", "Messages given to consumers since the start.", group,
        read=lambda: _given(context, lambda flow: flow.nums),
    )  # fmt: skip
    registry.counter(
        "rocketmq_throughput_out_total", "Bytes of messages given to consumers.", group,
        read=lambda: _given(context, lambda flow: flow.size),
    )  # fmt: skip
    registry.gauge(
        "rocketmq_topic_number", "Topics.",
        read=lambda: len(context.topics.table.topics),
    )  # fmt: skip
    registry.gauge(
        "rocketmq_consumer_group_number", "Subscription groups.",
        read=lambda: len(context.groups.table.groups),
    )  # fmt: skip
    registry.gauge(
        "rocketmq_broker_permission", "What clients may do: 4 read, 2 write, 6 both.",
        read=lambda: context.settings.current.broker.permission,
    )  # fmt: skip


def _stored(context: BrokerContext, column: int) -> Iterator[Sample]:
    """By topic: messages or bytes, summed over its queues."""
    sums: Counter[bytes] = Counter()
    for queue in context.store.queues.rows:
        if queue.puts:
            sums[queue.topic] += queue.put_bytes if column else queue.puts
    for name, count in sums.items():
        topic = name.decode("utf-8", "replace")
        yield (topic, _truth(is_system_topic(topic))), count


def _given(context: BrokerContext, figure: Callable[[Flow], int]) -> Iterator[Sample]:
    for (topic, group), flow in list(context.stats.groups.items()):
        yield (topic, group, *_marks(topic, group)), figure(flow)


# --- consumers -----------------------------------------------------------------------------------


def _add_consumers(registry: Registry, context: BrokerContext) -> None:
    labels = ("consumer_group", "topic", "is_system", "is_retry")
    registry.gauge(
        "rocketmq_consumer_lag_messages",
        "Messages that the group has not committed yet, of queues where it has committed any.",
        labels, read=lambda: _lags(context),
    )  # fmt: skip
    registry.gauge(
        "penstock_consumer_behind_ms",
        "How much older than our newest message the first one of the group's last pull was.",
        labels,
        read=lambda: _behinds(context),
    )  # fmt: skip


def _lags(context: BrokerContext) -> Iterator[Sample]:
    store = context.store
    for key, offsets in list(context.offsets.table.wrapper().offset_table.items()):
        topic, _, group = key.rpartition("@")
        lag = 0
        for queue_id, offset in offsets.items():
            first, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            lag += max(end - max(offset, first), 0)
        yield (group, topic, *_marks(topic, group)), lag


def _behinds(context: BrokerContext) -> Iterator[Sample]:
    for (topic, group), flow in list(context.stats.groups.items()):
        yield (group, topic, *_marks(topic, group)), flow.behind_ms


# --- delayed and retried --------------------------------------------------------------------------


def _add_detours(registry: Registry, broker: Broker) -> None:
    delay, level = broker.context.delay, ("level",)
    registry.gauge(
        "penstock_delayed_messages", "Messages that wait for their time, by delay level.", level,
        read=lambda: [((str(n),), max(end - at, 0)) for n, at, end in delay.progress()],
    )  # fmt: skip
    registry.counter(
        "penstock_delayed_delivered_total", "Delayed messages that were delivered.", level,
        read=lambda: [((str(level.number),), level.delivered) for level in delay.levels.values()],
    )  # fmt: skip
    registry.counter(
        "penstock_delayed_dropped_total",
        "Delayed messages that had no place to go to any more; the log names them.",
        read=lambda: delay.dropped,
    )  # fmt: skip
    registry.gauge(
        "penstock_delayed_late_ms", "How late the last delayed message was delivered.",
        read=lambda: delay.late_ms,
    )  # fmt: skip
    registry.counter(
        "rocketmq_send_to_dlq_messages_total", "Messages moved to the dead letters of a group.",
        ("consumer_group", "topic", "is_system"), read=lambda: _dead_letters(broker),
    )  # fmt: skip


def _dead_letters(broker: Broker) -> Iterator[Sample]:
    for (group, topic), count in list(broker.retry.dead.items()):
        yield (group, topic, _marks(topic, group)[0]), count


# --- connections ---------------------------------------------------------------------------------


def _add_connections(registry: Registry, context: BrokerContext, server: ServerFigures) -> None:
    registry.gauge(
        "rocketmq_producer_connections", "Connected producers.",
        ("language", "version", "protocol_type"), read=lambda: _producers(context),
    )  # fmt: skip
    registry.gauge(
        "rocketmq_consumer_connections", "Connected consumers.",
        ("consumer_group", "language", "version", "consume_mode", "protocol_type", "is_system"),
        read=lambda: _consumers(context),
    )  # fmt: skip
    registry.gauge(
        "penstock_connections", "Open connections, whoever they are.",
        read=lambda: len(server.connections),
    )  # fmt: skip
    registry.counter(
        "penstock_refused_connections_total", "Connections beyond connections_max.",
        read=lambda: server.refused_connections,
    )  # fmt: skip
    registry.counter(
        "penstock_bad_frames_total", "Connections closed because of a frame that breaks the rules.",
        read=lambda: server.bad_frames,
    )  # fmt: skip


def _producers(context: BrokerContext) -> Iterator[Sample]:
    counts: Counter[tuple[str, str]] = Counter()
    clients = set()
    for members in context.clients.producer_groups().values():
        for member in members:
            if member.client not in clients:  # one client may be in several groups
                clients.add(member.client)
                counts[language_name(member.language).lower(), str(member.version)] += 1
    for (language, version), count in counts.items():
        yield (language, version, "remoting"), count


def _consumers(context: BrokerContext) -> Iterator[Sample]:
    for group in list(context.clients.consumer_groups()):
        counts = Counter(
            (language_name(member.language).lower(), str(member.version))
            for member in group.members.values()
        )
        mode = "pull" if group.consume_type == "CONSUME_ACTIVELY" else "push"
        system = _truth(is_system_group(group.name))
        for (language, version), count in counts.items():
            yield (group.name, language, version, mode, "remoting", system), count


# --- store ---------------------------------------------------------------------------------------


def _add_storage(registry: Registry, context: BrokerContext) -> None:
    store = context.store
    registry.gauge(
        "rocketmq_storage_size", "Bytes of the commit log.", STORAGE,
        read=lambda: [(LOCAL_DISK, store.log.end - store.log.begin())],
    )  # fmt: skip
    registry.gauge(
        "rocketmq_storage_flush_behind_bytes", "Bytes of the log that are not on the disk yet.",
        STORAGE, read=lambda: [(LOCAL_DISK, max(store.log.end - store.flusher.flushed(), 0))],
    )  # fmt: skip
    registry.gauge(
        "rocketmq_storage_dispatch_behind_bytes",
        "Bytes of the log that no queue points to yet: both are written in one step here.",
        STORAGE, read=lambda: [(LOCAL_DISK, 0)],
    )  # fmt: skip
    registry.gauge(
        "penstock_store_writable", "1 while the store takes messages.",
        read=lambda: store.refusal is None,
    )  # fmt: skip


# --- the server itself ---------------------------------------------------------------------------


def _refused(broker: Broker, server: ServerFigures) -> Iterator[Sample]:
    """By the error's name, wherever it was raised: in the turn, in a handler, in the pool."""
    sums: Counter[str] = Counter()
    for counted in (
        server.request_loop.refusals,
        broker.router.refusals,
        server.answer_executor.refusals,
    ):
        sums.update(counted)
    for name, count in sums.items():
        yield (name,), count


def _add_server(registry: Registry, broker: Broker, server: ServerFigures) -> None:
    registry.counter(
        "penstock_requests_total", "Requests and answers of clients that were read.",
        read=lambda: server.request_loop.requests,
    )  # fmt: skip
    registry.counter(
        "penstock_sends_total", "Send requests by their outcome; a batch is one.", ("outcome",),
        read=lambda: [(("stored",), broker.send.sent), (("refused",), broker.send.refused)],
    )  # fmt: skip
    registry.counter(
        "penstock_refused_total", "Requests refused, by the error's name.", ("cause",),
        read=lambda: _refused(broker, server),
    )  # fmt: skip
    registry.gauge(
        "penstock_held_pulls", "Pulls that wait for messages.",
        read=lambda: len(broker.context.long_polling),
    )  # fmt: skip
    registry.gauge(
        "penstock_pool_jobs", "Requests that wait for the disk, in the I/O pool.",
        read=lambda: server.answer_executor.pool_jobs,
    )  # fmt: skip
    registry.gauge(
        "penstock_buffered_bytes", "Unfinished requests and unsent answers (memory_bytes_max).",
        read=lambda: server.memory,
    )  # fmt: skip
    registry.gauge(
        "penstock_loop_lag_ms_max", "The longest turn of the event loop since the start.",
        read=lambda: server.lag_ms_max,
    )  # fmt: skip


def _add_registration(registry: Registry, registrar: RegistrarFigures) -> None:
    label = ("nameserver",)
    registry.gauge(
        "penstock_nameserver_registered", "1 while this NameServer knows us.", label,
        read=lambda: [((state.address,), state.registered) for state in registrar.states],
    )  # fmt: skip
    registry.gauge(
        "penstock_nameserver_success_timestamp_seconds",
        "When this NameServer last took our registration; 0: never.", label,
        read=lambda: [((state.address,), state.success_ms / 1000) for state in registrar.states],
    )  # fmt: skip
    registry.gauge(
        "penstock_nameserver_failures", "Registrations that failed since the last success.", label,
        read=lambda: [((state.address,), state.failures) for state in registrar.states],
    )  # fmt: skip


def _add_process(registry: Registry, context: BrokerContext) -> None:
    registry.gauge(
        "process_resident_memory_bytes", "Memory of the process, mapped files included.",
        read=lambda: _memory("VmRSS"),
    )  # fmt: skip
    registry.gauge(
        "penstock_memory_bytes", "Memory of the process without mapped files.",
        read=lambda: _memory("RssAnon"),
    )  # fmt: skip
    registry.counter(
        "process_cpu_seconds_total", "Processor time of the process.",
        read=lambda: sum(os.times()[:2]),
    )  # fmt: skip
    registry.gauge(
        "process_start_time_seconds", "When the broker was started.",
        read=lambda: context.started_ms / 1000,
    )  # fmt: skip


def _memory(field: str) -> list[Sample]:
    """A figure of the kernel's account of this process; nothing where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return []
    return [((), int(line.split()[1]) * 1024) for line in lines if line.startswith(field + ":")]


def _marks(topic: str, group: str) -> tuple[str, str]:
    """is_system, is_retry."""
    system = is_system_topic(topic) or is_system_group(group)
    return _truth(system), _truth(topic.startswith(RETRY_TOPIC_PREFIX))


def _truth(value: bool) -> str:
    return "true" if value else "false"
