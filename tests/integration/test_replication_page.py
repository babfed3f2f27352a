"""The settings and the steps of docs/replication.md."""

import json
import re
import signal
from pathlib import Path

import pytest

from penstock.cli.servers.startup import load_settings
from tests.integration.test_up import (
    LOOPBACK,
    Program,
    Start,
    cluster_status,
    port,  # noqa: F401
    start,  # noqa: F401
    wait_until,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "replication.md"


def files() -> dict[str, str]:
    """The settings files on the page by their name, with addresses of this machine."""
    blocks = re.findall(
        r"^```\w+\n# ([\w.]+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return {name: re.sub(r"\b(10\.0\.0\.\d|0\.0\.0\.0)\b", LOOPBACK, text) for name, text in blocks}


@pytest.mark.parametrize(
    ("name", "role", "id"),
    [
        ("master.toml", "sync_master", 0),
        ("slave.toml", "slave", 1),
        ("master.conf", "sync_master", 0),
        ("slave.conf", "slave", 1),
    ],
)
def test_the_settings_files_are_valid(tmp_path: Path, name: str, role: str, id: int) -> None:
    path = tmp_path / name
    path.write_text(files()[name])
    loaded = load_settings(path, "broker", {})
    assert loaded.warnings == ()
    settings = loaded.settings
    assert (settings.broker.name, settings.broker.id) == ("broker-a", id)
    assert (settings.replication.role, settings.store.sync_flush) == (role, True)


class Replicas:
    """The brokers of the page; their files are in one directory."""

    def __init__(self, start: Start, port: int, folder: Path) -> None:  # noqa: F811
        self._start = start
        self.port = port
        self.folder = folder
        self.names = f"{LOOPBACK}:{port}"
        for name, text in files().items():
            (folder / name).write_text(text)

    def change(self, name: str, *changes: tuple[str, str]) -> None:
        path = self.folder / name
        text = path.read_text()
        for before, after in changes:
            assert text.count(before) == 1
            text = text.replace(before, after)
        path.write_text(text)

    def run(self, name: str, number: int) -> Program:
        data = self.folder / f"data-{number}"
        program: Program = self._start(
            "broker", "-c", self.folder / name, "-n", self.names,
            "--port", self.port + 10 * number + 3, "--data", data,
        )  # fmt: skip
        program.line("is ready")
        return program

    def send(self, body: str) -> str:
        sent = self._start("send", "-n", self.names, "Greetings", body, "--json")
        status: str = json.loads(sent.line("status"))["status"]
        return status


def test_a_slave_is_promoted(start: Start, port: int, tmp_path: Path) -> None:  # noqa: F811
    """First with the master, then because it is lost."""
    start("nameserver", "--port", port).line("is ready")
    replicas = Replicas(start, port, tmp_path)
    first = replicas.run("master.toml", 0)
    second = replicas.run("slave.toml", 1)
    wait_until(lambda: cluster_status(port)[-1]["in_sync"] is True)
    assert replicas.send("one") == "SEND_OK"
    promote = ("cluster", "promote", "-n", replicas.names, "broker-a", 1, "--yes")
    promoted = start(*promote, "--json")
    promoted.line(f'"address": "{LOOPBACK}:{port + 13}"')
    promoted.line('"epoch": 2')
    promoted.line(f'"stepped_down": "{LOOPBACK}:{port + 3}"')
    promoted.line(f"{LOOPBACK}:{port + 13}. becomes the master", promoted.err)  # the plan
    wait_until(lambda: [one["in_sync"] for one in cluster_status(port)] == [None, True])
    assert replicas.send("two") == "SEND_OK"

    second.stop(signal.SIGKILL)
    refused = start(*promote)
    refused.line("--force", refused.err)
    forced = start(*promote, "--force")
    forced.line(f"^{LOOPBACK}:{port + 3} is the master of broker-a .sync_master, epoch ")
    forced.line("the old master could not be asked to step down")
    with pytest.raises(AssertionError):
        replicas.run("slave.toml", 1)
    replicas.change("slave.toml", ("id = 1\n", "id = 2\n"))
    replicas.run("slave.toml", 1)
    wait_until(lambda: cluster_status(port)[-1]["in_sync"] is True)
    master, slave = cluster_status(port)
    assert (master["role"], slave["role"]) == ("sync_master", "slave")
    assert (slave["id"], slave["epoch"], slave["behind"]) == (2, master["epoch"], 0)
    assert replicas.send("three") == "SEND_OK"
    tail = start("tail", "-n", replicas.names, "Greetings", "--from", "first", "--count", 3)
    words = "one", "two", "three"
    assert {tail.line(" " + "| ".join(words)).split()[-1] for _ in words} == set(words)
    assert first.stop() == 0
