"""The services of deploy/ run as the files say: the single-machine cluster, and systemd's units."""

import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

import pytest

from penstock import Admin, Message, Producer, SendStatus
from penstock.cli.main import COMMANDS
from penstock.errors import PenstockError
from tests.integration.compose_kit import COMPOSE, ComposedServices
from tests.test_deploy_files import DEPLOY, image_environment, unit_lines

pytestmark = pytest.mark.slow

READY_S = 60.0
HOST = "127.0.54.1"
UNIT_HOST = "127.0.54.2"


def await_true(condition: Callable[[], object], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ComposedServices]:
    found = ComposedServices(COMPOSE / "single.yaml", tmp_path, image_environment())
    try:
        for kind in ("nameserver", "controller", "broker", "console"):
            if kind in COMMANDS:
                for name in found.names(kind):
                    found.start(name)
        yield found
    finally:
        found.stop()


def masters(admin: Admin, *, in_sync: int) -> list[str]:
    """The master when this many replicas are in sync."""
    with suppress(PenstockError):
        replicas = admin.replicas()
        if 1 + sum(bool(one.in_sync) for one in replicas) == in_sync:
            return [one.broker.address for one in replicas if one.broker.is_master]
    return []


def test_the_single_machine_cluster_survives_its_master(cluster: ComposedServices) -> None:
    with Admin(f"{HOST}:9876") as admin, Producer(f"{HOST}:9876", group="g") as producer:
        await_true(lambda: masters(admin, in_sync=3), cluster.logs)
        assert producer.send(Message("T", b"1")).status is SendStatus.SEND_OK
        for name in cluster.processes:
            check = partial(cluster.run, name, cluster.health_check(name))
            await_true(lambda check=check: check() == 0, cluster.logs)
        for port in (10_913, 10_923, 10_933, 9_880):  # the readiness probes of Kubernetes
            await_true(partial(is_ready, port), cluster.logs)
        (first,) = masters(admin, in_sync=3)
        master = service_of(first)
        cluster.kill(master)
        assert cluster.run(master, cluster.health_check(master)) == 1
        await_true(lambda: masters(admin, in_sync=2), cluster.logs)
        assert masters(admin, in_sync=2) != [first]
        assert producer.send(Message("T", b"2")).status is SendStatus.SEND_OK


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=10) as answer:
            return answer.status == HTTPStatus.OK
    except HTTPError:
        return False


def service_of(address: str) -> str:
    """The ports of the brokers are 10911, 10921 and 10931."""
    return f"broker-{(int(address.partition(':')[2]) - 10_901) // 10}"


def test_a_rolling_restart_with_the_master_last_loses_no_send(cluster: ComposedServices) -> None:
    stopped = threading.Event()
    results: list[SendStatus] = []

    def send() -> None:
        with Producer(f"{HOST}:9876", group="g", timeout_ms=30_000) as producer:
            while not stopped.is_set():
                results.append(producer.send(Message("T", b"x")).status)

    with Admin(f"{HOST}:9876") as admin:
        await_true(lambda: masters(admin, in_sync=3), cluster.logs)
        (first,) = masters(admin, in_sync=3)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            slaves = [name for name in cluster.names("broker") if name != service_of(first)]
            for name in (*slaves, service_of(first)):
                before = len(results)
                assert cluster.restart(name) == 0
                await_true(lambda: masters(admin, in_sync=3), cluster.logs)
                await_true(lambda before=before: len(results) > before, cluster.logs)
            assert masters(admin, in_sync=3) != [first]
        finally:
            stopped.set()
            sender.join()
    assert set(results) == {SendStatus.SEND_OK}


def unit_command(unit: str, directory: Path, instance: str = "") -> list[str]:
    """The command of a unit, with its files in a directory."""
    (command,) = unit_lines(DEPLOY / "systemd" / unit, "ExecStart")
    command = command.replace("%i", instance).replace("/etc/penstock", str(directory))
    command = command.replace("$NAMESRV_ADDR", f"{UNIT_HOST}:9876")
    command = command.replace("/var/lib/penstock", str(directory))
    return [sys.executable, "-m", "penstock.cli.main", *shlex.split(command)[1:]]


def test_the_units_run_with_the_settings_files(tmp_path: Path) -> None:
    for path in (DEPLOY / "systemd").glob("*.toml"):
        text = re.sub(r"0\.0\.0\.0|10\.0\.0\.1", UNIT_HOST, path.read_text())
        (tmp_path / path.name).write_text(text.replace("/var/lib/penstock", str(tmp_path)))
    processes = []
    try:
        for unit in ("penstock-nameserver", "penstock-controller", "penstock-broker@"):
            process = subprocess.Popen(
                unit_command(f"{unit}.service", tmp_path, "broker-a"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert b" ready" in process.stdout.readline()
        for port, path in ((10_913, "/readyz"), (9_880, "/healthz")):
            url = f"http://{UNIT_HOST}:{port}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.status == 200
        with Producer(f"{UNIT_HOST}:9876", group="g") as producer:
            assert producer.send(Message("T", b"1")).status is SendStatus.SEND_OK
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait() for process in processes]
        for process in processes:
            if process.stdout is not None:
                process.stdout.close()
    assert codes == [0, 0, 0]
