"""`penstock bench` and `penstock top` with Apache's broker."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from penstock import Admin
from tests.compat.clusters import OwnCluster

PATIENCE_S = 60
TOPIC, GROUP = "bench-apache", "bench-readers"


def run(cluster: OwnCluster, *arguments: object) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *map(str, arguments), "--json"],
        capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "NAMESRV_ADDR": cluster.namesrv},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def measured(apache_cluster: OwnCluster) -> dict[str, Any]:
    with Admin(apache_cluster.namesrv) as admin:
        admin.create_topic(TOPIC, queues=2)
        admin.create_group(GROUP)
    return run(apache_cluster, "bench", "e2e", "--topic", TOPIC, "--group", GROUP, "--rate", 100,
               "--duration", "1s", "--warmup", "200ms")  # fmt: skip


def test_both_agree_with_the_admin_client(
    apache_cluster: OwnCluster, measured: dict[str, Any]
) -> None:
    assert measured["messages"] == 100
    assert measured["errors"] == {}
    assert measured["lost"] == 0

    found = run(apache_cluster, "top", "--interval", "200ms")
    with Admin(apache_cluster.namesrv) as admin:
        queues = admin.describe_topic(TOPIC).queues
    (broker,) = found["brokers"]
    assert broker["name"] == apache_cluster.broker
    assert broker["disk_used"] is not None
    assert broker["memory_bytes"] is None  # Apache's brokers do not report it
    (topic,) = [row for row in found["topics"] if row["name"] == TOPIC]
    assert topic["next_offsets"] == sum(queue.max_offset for queue in queues)
    (group,) = [row for row in found["groups"] if row["name"] == GROUP]
    assert group["lag"] == 0
    assert group["lag_seconds"] == 0


def test_the_compiled_generator_with_apaches_broker(apache_cluster: OwnCluster) -> None:
    topic = "bench-apache-pipelined"
    with Admin(apache_cluster.namesrv) as admin:
        admin.create_topic(topic, queues=2)
    for header, batch in (("binary", 1), ("json", 2)):
        sent = run(apache_cluster, "bench", "send", "--topic", topic, "--pipeline", 16,
                   "--duration", "300ms", "--warmup", "0s", "--header", header,
                   "--batch", batch)  # fmt: skip
        assert {*sent["errors"]} <= {"SystemBusy"}  # of a slow machine: it waited for 200 ms
        assert sent["messages"] > 0
    with Admin(apache_cluster.namesrv) as admin:
        stored = sum(queue.max_offset for queue in admin.describe_topic(topic).queues)
    for header in ("binary", "json"):
        pulled = run(apache_cluster, "bench", "consume", "--topic", topic, "--pipeline", 2,
                     "--verify", "--header", header)  # fmt: skip
        assert (pulled["messages"], pulled["errors"], pulled["drained"]) == (stored, {}, True)
