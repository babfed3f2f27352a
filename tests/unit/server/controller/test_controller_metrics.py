"""The metrics of a controller are on their page."""

from pathlib import Path
from typing import Any, cast

from penstock.config import ControllerConfig
from penstock.metrics import Registry
from penstock.server.controller.controller_metrics import (
    add_controller_metrics,
    add_etcd_metrics,
)
from penstock.server.controller.etcd.etcd_backend import EtcdBackend
from penstock.testing.virtual_clock import VirtualClock

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_every_metric_is_on_its_page() -> None:
    registry = Registry()
    nothing = cast(Any, object())
    backend = EtcdBackend(ControllerConfig(etcd="e:2379"), VirtualClock(), "c:1")
    states = cast(Any, type("States", (), {"without_master": lambda self: 0})())
    add_controller_metrics(registry, states, nothing, backend.liveness)
    add_etcd_metrics(registry, backend)
    backend.client.figures.calls["/v3/kv/txn", "ok"] += 2
    backend.client.figures.failures["e:2379"] += 1
    backend.client.figures.seconds.observe(0.003)
    text = PAGE.read_text()
    for family in registry.families:
        assert f"`{family.name}`" in text, f"docs/metrics.md does not explain {family.name}"
    lines = "".join(line for family in registry.families[-4:] for line in family.lines())
    assert 'penstock_etcd_calls_total{path="/v3/kv/txn",outcome="ok"} 2' in lines
    assert 'penstock_etcd_failed_attempts_total{member="e:2379"} 1' in lines
    assert "penstock_etcd_call_seconds_count 1" in lines
