"""`penstock check` and `penstock doctor` against real servers, some of them set up wrongly."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Consumer
from tests import json_kit
from tests.compat.penstock import Broker, NameServer
from tests.integration.cli_kit import Penstock, consume, send


class Site:
    """Two NameServers and two brokers; the second broker knows only the first NameServer."""

    def __init__(self, names: list[NameServer], brokers: list[Broker], config: Path) -> None:
        self.names, self.brokers = names, brokers
        self.run = Penstock(names[0].address, config)
        self.both = ("-n", ";".join(name.address for name in names))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("health")
    with NameServer(root / "n1") as one, NameServer(root / "n2") as two:
        both = f"{one.address};{two.address}"
        with (
            Broker(root / "a", root / "sa", both, brokerName="broker-a") as first,
            Broker(root / "b", root / "sb", one.address, brokerName="broker-b") as second,
        ):
            yield Site([one, two], [first, second], root / "config")


def findings(site: Site, *arguments: str, code: int = 1) -> dict[str, list[Any]]:
    report = json_kit.check("doctor", site.run("doctor", "--json", *arguments, code=code).stdout)
    by_subject: dict[str, list[Any]] = {}
    for found in report["findings"]:
        by_subject.setdefault(found["subject"], []).append(found)
    return by_subject


def test_check_a_good_cluster(site: Site) -> None:
    line = site.run("check", "--masters", 2, "--disk-warning", 100, "--disk-critical", 100).stdout
    assert line.startswith(
        "OK - 2 brokers answer | 'masters'=2;;;0 'brokers'=2;;;0 'disk_broker-a'="
    )
    assert line.count("\n") == 1


def test_check_lag_and_dead_letters(site: Site) -> None:
    names = site.names[0].address
    site.run("topic", "create", "late", "--queues", 1)
    send(names, "late", 4)
    consume(names, "late", "laggards", 4)
    send(names, "late", 6)
    run, wide = site.run, ("--disk-warning", "100", "--disk-critical", "100", "-g", "laggards")
    run("check", "--lag-warning", 6, "--behind-critical", 3600, *wide)
    assert "the lag of the group laggards is 6 messages" in run(
        "check", "--lag-warning", 5, *wide, code=1
    ).stdout  # fmt: skip
    report = json_kit.check(
        "check", run("check", "--lag-critical", 1, "--json", *wide, code=2).stdout
    )
    assert report["state"] == "CRITICAL"
    assert {
        "name": "lag_laggards",
        "value": 6,
        "unit": "",
        "warning": None,
        "critical": 1,
    } in report["figures"]
    run("topic", "create", "%DLQ%laggards", "--queues", 1)
    send(names, "%DLQ%laggards", 1)
    text = run("check", "--dead-letters-warning", 0, *wide, code=1).stdout
    assert "the group laggards has 1 dead letter" in text
    missing = run("check", "--lag-warning", 99, "-g", "nobody", *wide, code=3).stdout
    assert missing.startswith("UNKNOWN - there is no group nobody | ")


def test_doctor_finds_wrong_routes_topics_and_subscriptions(site: Site) -> None:
    site.run("topic", "create", "closed", "--perm", "r", "--queues", 1)
    found = findings(site)
    assert [one["where"] for one in found["topic"]] == ["closed"]
    assert "routes" not in found
    assert "disagree on broker broker-b" in findings(site, *site.both)["routes"][0]["text"]
    text = site.run("doctor", *site.both, code=1).stdout
    assert text.startswith(f"error: {site.names[1].address}: ")
    site.run("topic", "create", "shared", "--queues", 1)
    address = site.names[0].address
    with (
        Consumer(address, group="split", instance_name="one") as one,
        Consumer(address, group="split", instance_name="two") as two,
    ):
        one.subscribe("shared", tags="a")
        two.subscribe("shared", tags="b")
        one.start()
        two.start()
        found = findings(site)
        assert [each["where"] for each in found["subscription"]] == ["split"]
        assert "shared: a" in found["subscription"][0]["text"]
        assert "subscription" not in findings(site, "--skip-groups")


def test_a_broker_that_hangs(site: Site) -> None:
    hung = site.brokers[1]
    os.kill(hung.pid, signal.SIGSTOP)  # it accepts connections but does not respond
    try:
        line = site.run("check", "--timeout-ms", 1000, code=2).stdout
        assert line.startswith(f"CRITICAL - broker-b ({hung.address}) does not answer: ")
        found = findings(site, "--timeout-ms", "1000")
        assert [one["where"] for one in found["address"]] == ["broker-b"]
    finally:
        os.kill(hung.pid, signal.SIGCONT)


def test_a_nameserver_that_is_down(site: Site) -> None:
    found = findings(site, "-n", f"{site.names[0].address};127.0.0.1:1")
    assert [one["where"] for one in found["nameserver"]] == ["127.0.0.1:1"]
    assert site.run("check", "-n", "127.0.0.1:1", code=2).stdout.startswith(
        "CRITICAL - no NameServer"
    )
    text = site.run("doctor", "-n", "127.0.0.1:1", code=1).stdout
    assert "not examined: brokers, topics and groups: no NameServer answers" in text


ODD = """
import resource, sys
from penstock import clock, version
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
version.VERSION = "9.9.9"
now_ms = clock.LoopClock.now_ms
clock.LoopClock.now_ms = lambda self: now_ms(self) + 3_600_000
from penstock.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class OddBroker(Broker):
    """A broker of another version, with few open files, whose clock is an hour ahead."""

    def _command(self) -> tuple[list[str], dict[str, str]]:
        program, environment = super()._command()
        return [sys.executable, "-c", ODD, *program[1:]], environment


def test_doctor_finds_other_versions_wrong_clocks_and_low_limits(tmp_path: Path) -> None:
    with (
        NameServer(tmp_path / "n") as names,
        Broker(tmp_path / "a", tmp_path / "sa", names.address, brokerName="broker-a") as plain,
        OddBroker(tmp_path / "b", tmp_path / "sb", names.address, brokerName="broker-b") as odd,
    ):
        found = findings(Site([names], [plain, odd], tmp_path / "config"))
    (version,) = found["version"]
    assert "Penstock 9.9.9" in version["text"]
    (wrong,) = found["clock"]
    assert (wrong["severity"], wrong["where"]) == ("error", "broker-b")
    few = [one for one in found["limits"] if "open" in one["text"]]
    assert "broker-b" in {one["where"] for one in few}
    assert any("it may open 1,024 files" in one["text"] for one in few)
