"""Prometheus scrapes a broker and its controller, and evaluates our rules and the Grafana board."""

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import Consumer, Message, Producer
from penstock.cli.servers.up_command import CONTROLLER_PORT_APART
from tests.compat import debian_package
from tests.compat.apache import free_port
from tests.compat.conftest import need
from tests.compat.java_session import eventually
from tests.compat.penstock import Up
from tests.test_monitoring import RULES, board_expressions, rules

MESSAGES = 50
PATIENCE_S = 60
PROBE_PORT_APART = 2
"""From the port of a server to that of its metrics."""


def program(name: str) -> Path:
    """A program of Debian's package."""
    found = debian_package.file_of("prometheus", f"usr/bin/{name}")
    need(["Prometheus, as in Debian's package,"] if found is None else [])
    assert found is not None
    return found


class Prometheus:
    """A server that scrapes these addresses every second and evaluates our rules."""

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {"job_name": "penstock", "static_configs": [{"targets": list(targets)}]}
                    ],
                }
            )
        )
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                str(program("prometheus")),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of the HTTP API; None if the server does not answer yet."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                found = json.load(answer)
        except ConnectionError:
            return None
        except urllib.error.HTTPError as error:
            return pytest.fail(f"{query}: {error.read().decode()}")
        except urllib.error.URLError:
            return None
        assert found["status"] == "success"
        return found["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an instant query."""
        found = self.get("query", query=expression)
        return [] if found is None else [float(one["value"][1]) for one in found["result"]]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes three replicas and their controller; messages were sent and consumed."""
    with Up(tmp_path_factory.mktemp("up"), replicas=3) as servers:
        host, _, port = servers.broker_address.rpartition(":")
        ports = [int(port) + 10 * replica for replica in range(3)]
        ports.append(servers.port + CONTROLLER_PORT_APART)
        targets = [f"{host}:{port + PROBE_PORT_APART}" for port in ports]
        server = Prometheus(tmp_path_factory.mktemp("prometheus"), targets)
        try:
            got: list[bytes] = []
            with Consumer(servers.address, group="readers", start_at="first") as consumer:
                consumer.on("orders")(lambda message: got.append(message.body))
                with Producer(servers.address) as producer:
                    for number in range(MESSAGES):
                        producer.send(Message("orders", b"%d" % number))
                consumer.start()
                assert eventually(lambda: len(got) >= MESSAGES)
            yield server
        finally:
            server.close()


def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run(
        [program("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_target_is_scraped(prometheus: Prometheus) -> None:
    def states() -> list[tuple[str, str]]:
        found = prometheus.get("targets") or {"activeTargets": []}
        return [(one["health"], one["lastError"]) for one in found["activeTargets"]]

    assert eventually(lambda: states() == [("up", "")] * 4), states()
    topic = 'rocketmq_messages_in_total{topic="orders"}'
    assert eventually(lambda: max(prometheus.values(topic), default=0) == MESSAGES)


def test_every_rule_can_be_evaluated(prometheus: Prometheus) -> None:
    def healths() -> list[str]:
        groups = (prometheus.get("rules") or {"groups": []})["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    assert eventually(lambda: healths() == ["ok"] * len(rules())), healths()


def test_every_panel_of_the_board_can_be_drawn(prometheus: Prometheus) -> None:
    variables = {"$cluster": ".*", "$broker": ".*", "$__rate_interval": "10s"}
    seen = 0
    for expression in board_expressions():
        asked = re.sub(r"\$\w+", lambda found: variables[found.group()], expression)
        if not asked.startswith("label_values"):
            assert prometheus.get("query", query=asked) is not None
            seen += 1
    assert seen > 20
    drawn = "rate(rocketmq_messages_in_total[10m])"
    assert eventually(lambda: len(prometheus.values(drawn)) > 0)
