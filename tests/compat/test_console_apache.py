"""The web console on Apache's servers: what its pages show is what the cluster has."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock import Consumer, Message, Producer

from . import apache, maven

pytestmark = [pytest.mark.compat, pytest.mark.slow]

WAIT_S = 60.0
TOPIC, GROUP, BODY = "console-orders", "console-billing", "order <b>1</b>"


class RunningConsole:
    """A console as a process, for one cluster."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        """The JSON of an endpoint; raises HTTPError."""
        text = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self._url}/api{path}?{text}", timeout=20) as response:
            return json.load(response)

    def await_true(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self._process.poll() is None, "the console has ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module", params=maven.SERVER_VERSIONS)
def console(
    java: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningConsole]:
    root, version = tmp_path_factory.mktemp("apache"), request.param
    with (
        apache.NameServer(root / "names", version=version) as names,
        apache.Broker(root / "broker", root / "store", names.address, version=version),
    ):
        with Producer(names.address, group="shop") as producer:
            producer.send(Message(TOPIC, BODY.encode(), tags="new", keys=["order-1"]))
        with Consumer(names.address, group=GROUP, start_at="first") as consumer:
            consumer.subscribe(TOPIC)
            next(iter(consumer))  # it ends before the message is acknowledged
        command = [sys.executable, "-m", "penstock.cli.main", "console", "--port", "0"]
        command += ["--nameserver", names.address, "--data", str(root / "console")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                ready = process.stdout.readline()
                found = RunningConsole(process, ready[ready.index("http") :].split()[0].rstrip("/"))
                found.await_true(lambda: _lists(found, "/topics", TOPIC))
                found.await_true(lambda: _lists(found, "/groups", GROUP))
                yield found
            finally:
                process.terminate()


def _lists(console: RunningConsole, path: str, name: str) -> bool:
    return name in [row["name"] for row in console.get(path)["rows"]]


def test_a_message_is_found_by_its_key_and_explained(console: RunningConsole) -> None:
    (row,) = console.get("/messages", q=f"topic:{TOPIC} key:order-1")["rows"]
    place = f"/message/{TOPIC}/{row['broker']}/{row['queue']}/{row['offset']}"
    detail = console.get(place)
    assert BODY in json.dumps(detail)
    verdict = console.get(f"{place}/groups/{GROUP}")
    assert verdict["verdict"] == "no_member"


@pytest.mark.parametrize(
    "path",
    ["/overview", f"/topics/{TOPIC}", f"/groups/{GROUP}", f"/groups/{GROUP}/explain", "/cluster",
     "/dead-letters", "/scheduled", "/transactions", "/pipelines", "/access"],
)  # fmt: skip
def test_each_page_has_its_data(console: RunningConsole, path: str) -> None:
    assert console.get(path)
