"""Metrics in Prometheus' format, read at scrape time only."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.flow_counters import FlowCounter
from penstock.broker.metrics.broker_metrics import broker_metrics
from penstock.broker.metrics.group_lags import GroupLags
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.config import BrokerConfig, LiveSettings, Settings
from penstock.metrics import Registry, Sample
from penstock.server.metrics.server_metrics import (
    add_process_metrics,
    add_registration_metrics,
    add_server_metrics,
)
from penstock.server.registration.nameserver_registration import NameServerState
from penstock.server.request_loop import RequestLoop
from penstock.server.rpc_latency import RpcLatency
from penstock.store.recovery_report import RecoveryReport
from tests.unit.broker.broker_kit import broker_fixture

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def parsed(registry: Registry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples that Prometheus parses, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(registry.text())
        for sample in family.samples
    }


def test_prometheus_can_parse_the_text() -> None:
    registry = Registry({"cluster": 'a "b"\\\n'})
    registry.counter("in_total", "Messages\nin.", ("topic",), read=lambda: [(("t",), 7)])
    registry.gauge("load", "Load.", read=lambda: 0.25)
    registry.gauge("up", "Up.", read=lambda: True)
    registry.gauge(
        "strange", "Strange.", ("k",), read=lambda: [(("n",), math.nan), (("i",), math.inf)]
    )
    common = ("cluster", 'a "b"\\\n')
    found = parsed(registry)
    assert found["in_total", frozenset([common, ("topic", "t")])] == 7
    assert found["load", frozenset([common])] == 0.25
    assert found["up", frozenset([common])] == 1
    assert math.isnan(found["strange", frozenset([common, ("k", "n")])])
    assert found["strange", frozenset([common, ("k", "i")])] == math.inf


def test_text_of_a_registry_without_labels() -> None:
    registry = Registry()
    registry.gauge("a", "A figure.", read=lambda: 1 << 60)
    assert registry.text() == "# HELP a A figure.\n# TYPE a gauge\na 1152921504606846976\n"


def test_a_histogram_counts_values_up_to_its_bounds() -> None:
    registry = Registry({"node": "x"})
    histogram = registry.histogram("ms", "Time.", (1, 5, 10.5))
    for value in (0, 1, 2, 5, 7, 11, 1000):
        histogram.observe(value)
    found = parsed(registry)
    buckets = {
        dict(labels)["le"]: value for (name, labels), value in found.items() if name == "ms_bucket"
    }
    assert buckets == {"1": 2, "5": 4, "10.5": 5, "+Inf": 7}
    assert found["ms_count", frozenset([("node", "x")])] == 7
    assert found["ms_sum", frozenset([("node", "x")])] == 1026


def test_values_are_read_only_at_a_scrape() -> None:
    reads = []

    def read() -> Iterator[Sample]:
        reads.append(1)
        yield ("a",), 1
        yield ("b",), 2

    registry = Registry()
    registry.gauge("g", "G.", ("k",), read=read)
    assert reads == []
    assert registry.text().count("\ng{") == 2
    assert reads == [1]


def test_a_duplicate_name_is_refused() -> None:
    registry = Registry()
    registry.gauge("g", "G.", read=lambda: 1)
    with pytest.raises(AssertionError, match="duplicate metric"):
        registry.counter("g", "G.", read=lambda: 1)


# --- the broker's ---------------------------------------------------------------------------------


def fake_broker() -> Any:
    """A broker with the values that its metrics read, and nothing else."""
    rows = [
        SimpleNamespace(topic=topic, puts=puts, put_bytes=size)
        for topic, puts, size in ((b"orders", 3, 300), (b"orders", 4, 400), (b"TBW102", 0, 0),
                                  (b"SCHEDULE_TOPIC_XXXX", 1, 10))
    ]  # fmt: skip
    flow = FlowCounter()
    flow.nums, flow.size, flow.behind_ms = 5, 500, 70
    offsets = {"orders@pay": {0: 2, 1: 0}, "%RETRY%pay@pay": {0: 9}}
    queue = SimpleNamespace(min_offset=1, visible_max=lambda confirmed: 7)
    topics = {b"orders": {0: queue, 1: queue}, b"%RETRY%pay": {0: queue}}
    store = SimpleNamespace(
        queues=SimpleNamespace(rows=rows, topics=topics), refusal=None, confirm_offset=5000,
        writer=SimpleNamespace(size_counts=[5, 2, 1, 0, 0, 0, 0], put_bytes=710),
        log=SimpleNamespace(end=5000, begin=lambda: 1000, damaged={7}),
        flusher=SimpleNamespace(
            flushed=lambda: 4900, sync_times=lambda: ([0, 3, *[0] * 14], 600_000_000)
        ),
        report=RecoveryReport(damaged_ranges=2, damaged_bytes=600, saved_bytes=70),
        scrub=SimpleNamespace(records=900, damaged={("commitlog/0", 5), ("commitlog/0", 90)}),
    )  # fmt: skip
    java = GroupMember(1, "c1", "h:1", 0, 493, 0)
    go = GroupMember(2, "c2", "h:2", 9, 317, 0)
    group = SimpleNamespace(name="pay", consume_type="CONSUME_PASSIVELY", members={1: java, 2: go})
    context = SimpleNamespace(
        role=ReplicaRole(),
        settings=LiveSettings(Settings(broker=BrokerConfig(name="broker-b", cluster="C"))),
        store=store,
        topics=SimpleNamespace(table=SimpleNamespace(topics={"a": 1, "b": 2})),
        groups=SimpleNamespace(table=SimpleNamespace(groups={"pay": 1})),
        offsets=SimpleNamespace(
            table=SimpleNamespace(wrapper=lambda: SimpleNamespace(offset_table=offsets)),
            pulled_in=lambda group, topic: {0: 6} if topic == "orders" else {},
        ),
        clients=SimpleNamespace(
            producer_groups=lambda: {"p": [java], "q": [java, go]}, consumer_groups=lambda: [group]
        ),
        stats=SimpleNamespace(groups={("orders", "pay"): flow}), long_polling=[1, 2, 3],
        started_ms=1_700_000_000_500,
        delay=SimpleNamespace(
            progress=lambda: [(3, 17, 20)], dropped=1, late_ms=4,
            levels={2: SimpleNamespace(number=3, delivered=11)},
        ),
    )  # fmt: skip
    return SimpleNamespace(
        context=context,
        master=SimpleNamespace(),
        send=SimpleNamespace(sent=8, refused=2),
        dead_letters=SimpleNamespace(counts={("pay", "orders"): 2}),
        timers=SimpleNamespace(add_metrics=lambda registry: None),
        transactions=SimpleNamespace(add_metrics=lambda registry: None),
        pop=SimpleNamespace(add_metrics=lambda registry: None),
        replies=SimpleNamespace(add_metrics=lambda registry: None),
        router=SimpleNamespace(refusals={"NoPermission": 3}),
    )


def fake_lags(context: Any) -> GroupLags:
    """The lags as a scrape takes them; store times are set instead of read."""
    lags = GroupLags(context)
    rows = [one for step in lags.collect() for one in step]
    for one in rows:
        if one.lag:
            one.uncommitted_ms, one.unpulled_ms = 4_000, 6_000
    lags.earliest_ms = 1_000
    lags.take(rows, 10_000)
    return lags


def broker_registry(broker: Any = None) -> Registry:
    broker = broker or fake_broker()
    request_loop = RequestLoop(broker)
    request_loop.count_sends(0, 3, 0, 2_500_000)
    latency = RpcLatency()
    latency.observe_read({11 << 16 | 19: 2}, 30_000_000)
    server = SimpleNamespace(
        bad_frames=1,
        refused_connections=2,
        memory=SimpleNamespace(used=3),
        lag_ms_max=4.5,
        connections={1: 0, 2: 0},
        request_loop=request_loop,
        rpc_latency=latency,
        answer_executor=SimpleNamespace(thread_jobs=6, refusals={}),
    )
    states = [
        NameServerState("n1:9876", registered=True, success_ms=5500),
        NameServerState("n2:9876", failures=4),
    ]
    registry = broker_metrics(broker, fake_lags(broker.context))
    add_server_metrics(registry, cast(Any, server), broker.router.refusals)
    add_registration_metrics(registry, states)
    add_process_metrics(registry)
    return registry


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("rocketmq_messages_in_total", {"topic": "orders", "is_system": "false"}, 7),
        ("rocketmq_messages_in_total", {"topic": "SCHEDULE_TOPIC_XXXX", "is_system": "true"}, 1),
        ("rocketmq_throughput_in_total", {"topic": "orders", "is_system": "false"}, 700),
        ("rocketmq_messages_out_total", {"topic": "orders", "consumer_group": "pay",
                                         "is_system": "false", "is_retry": "false"}, 5),
        ("rocketmq_throughput_out_total", {"topic": "orders", "consumer_group": "pay",
                                           "is_system": "false", "is_retry": "false"}, 500),
        # Offset 0 of queue 1 is already deleted: the lag starts at the oldest existing message.
        ("rocketmq_consumer_lag_messages", {"topic": "orders", "consumer_group": "pay",
                                            "is_system": "false", "is_retry": "false"}, 5 + 6),
        ("rocketmq_consumer_lag_messages", {"topic": "%RETRY%pay", "consumer_group": "pay",
                                            "is_system": "false", "is_retry": "true"}, 0),
        ("rocketmq_send_to_dlq_messages_total", {"topic": "orders", "consumer_group": "pay",
                                                 "is_system": "false"}, 2),
        ("penstock_delayed_messages", {"level": "3"}, 3),
        ("penstock_delayed_delivered_total", {"level": "3"}, 11),
        ("penstock_delayed_dropped_total", {}, 1),
        ("penstock_delayed_late_ms", {}, 4),
        ("penstock_consumer_behind_ms", {"topic": "orders", "consumer_group": "pay",
                                         "is_system": "false", "is_retry": "false"}, 70),
        ("rocketmq_producer_connections", {"language": "java", "version": "493",
                                           "protocol_type": "remoting"}, 1),
        ("rocketmq_consumer_connections", {"consumer_group": "pay", "language": "go",
                                           "version": "317", "consume_mode": "push",
                                           "protocol_type": "remoting", "is_system": "false"}, 1),
        ("rocketmq_topic_number", {}, 2),
        ("rocketmq_consumer_group_number", {}, 1),
        ("rocketmq_broker_permission", {}, 6),
        ("rocketmq_storage_size", {"storage_type": "local", "storage_medium": "disk"}, 4000),
        ("rocketmq_storage_flush_behind_bytes",
         {"storage_type": "local", "storage_medium": "disk"}, 100),
        ("penstock_store_damaged_ranges", {}, 2),
        ("penstock_store_damaged_bytes", {}, 600),
        ("penstock_store_damaged_records", {}, 1),
        ("penstock_store_scrubbed_records_total", {}, 900),
        ("penstock_store_scrub_damaged", {}, 2),
        ("penstock_store_truncated_bytes", {}, 70),
        ("penstock_store_writable", {}, 1),
        ("penstock_connections", {}, 2),
        ("penstock_suspended_requests", {}, 3),
        ("penstock_sends_total", {"outcome": "refused"}, 2),
        ("penstock_refused_total", {"cause": "NoPermission"}, 3),
        ("penstock_requests_total", {}, 0),
        ("rocketmq_consumer_lag_latency", {"topic": "orders", "consumer_group": "pay",
                                           "is_system": "false", "is_retry": "false"}, 6_000),
        ("rocketmq_consumer_lag_latency", {"topic": "%RETRY%pay", "consumer_group": "pay",
                                           "is_system": "false", "is_retry": "true"}, 0),
        # Queue 0 was pulled up to offset 6, queue 1 was not.
        ("rocketmq_consumer_ready_messages", {"topic": "orders", "consumer_group": "pay",
                                              "is_system": "false", "is_retry": "false"}, 1 + 6),
        ("rocketmq_consumer_queueing_latency", {"topic": "orders", "consumer_group": "pay",
                                                "is_system": "false", "is_retry": "false"}, 4_000),
        ("rocketmq_storage_message_reserve_time",
         {"storage_type": "local", "storage_medium": "disk"}, 9_000),
        ("rocketmq_message_size_bucket", {"le": "4096"}, 7),
        ("rocketmq_message_size_sum", {}, 710),
        ("penstock_flush_seconds_bucket", {"le": "0.000128"}, 0),
        ("penstock_flush_seconds_bucket", {"le": "0.000256"}, 3),
        ("penstock_flush_seconds_sum", {}, 0.6),
        ("rocketmq_rpc_latency_bucket",
         {"le": "3", "protocol_type": "remoting", "request_code": "send_message_v2",
          "response_code": "success", "is_long_polling": "false", "result": "success"}, 3),
        ("rocketmq_rpc_latency_sum",
         {"protocol_type": "remoting", "request_code": "pull_message",
          "response_code": "pull_not_found", "is_long_polling": "false", "result": "success"}, 60),
        ("penstock_loop_lag_ms_max", {}, 4.5),
        ("penstock_replication_role", {"role": "async_master"}, 1),
        ("penstock_replication_role", {"role": "slave"}, 0),
        ("penstock_nameserver_registered", {"nameserver": "n1:9876"}, 1),
        ("penstock_nameserver_registered", {"nameserver": "n2:9876"}, 0),
        ("penstock_nameserver_success_timestamp_seconds", {"nameserver": "n1:9876"}, 5.5),
        ("penstock_nameserver_failures", {"nameserver": "n2:9876"}, 4),
        ("process_start_time_seconds", {}, 1_700_000_000.5),
    ],
)  # fmt: skip
def test_a_metric_of_the_broker(name: str, labels: dict[str, str], value: float) -> None:
    common = {"cluster": "C", "node_type": "broker", "node_id": "broker-b"}
    assert parsed(broker_registry())[name, frozenset({**common, **labels}.items())] == value


def test_the_memory_of_the_process_on_linux() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    found = {name: value for (name, _), value in parsed(broker_registry()).items()}
    assert found["process_resident_memory_bytes"] >= found["penstock_memory_bytes"] > 1 << 20
    assert found["process_cpu_seconds_total"] > 0


def test_every_metric_is_on_its_page(tmp_path: Path) -> None:
    text = PAGE.read_text()
    with broker_fixture(tmp_path) as env:
        families = broker_registry(env.broker).families
    with broker_fixture(tmp_path / "slave", role=ReplicaRole(slave=True)) as env:
        families += broker_registry(env.broker).families
    for family in families:
        assert f"`{family.name}`" in text, f"docs/metrics.md does not explain {family.name}"
        for label in family.labels:
            assert label in text
