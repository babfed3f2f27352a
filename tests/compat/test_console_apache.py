"""The web console on Apache's servers: what its pages show is what the cluster has."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from penstock import Consumer, Message, Producer

from . import apache, maven

pytestmark = [pytest.mark.compat, pytest.mark.slow]

WAIT_S = 60.0
TOPIC, GROUP, BODY = "console-orders", "console-billing", "order <b>1</b>"
TIMERS = {
    "timerWheelEnable": True, "recallMessageEnable": True, "appendTopicForTimerDeleteKey": True,
}  # fmt: skip
SETTINGS = "/cluster/brokers/apache/0/settings"


class RunningConsole:
    """A console as a process, for one cluster."""

    def __init__(self, process: subprocess.Popen[str], url: str, nameserver: str) -> None:
        self._process = process
        self._url = url
        self.nameserver = nameserver

    def open(self, path: str, **query: str) -> http.client.HTTPResponse:
        """The response of an endpoint; raises HTTPError."""
        text = urllib.parse.urlencode(query)
        found = urllib.request.urlopen(f"{self._url}/api{path}?{text}", timeout=20)
        assert isinstance(found, http.client.HTTPResponse)
        return found

    def get(self, path: str, **query: str) -> Any:
        """The JSON of an endpoint; raises HTTPError."""
        with self.open(path, **query) as response:
            return json.load(response)

    def send(self, method: str, path: str, **body: object) -> Any:
        """The JSON of a change; raises HTTPError."""
        headers = {
            "content-type": "application/json",
            "x-penstock-csrf": self.get("/session")["csrf"],
        }
        request = urllib.request.Request(
            f"{self._url}/api{path}", json.dumps(body).encode(), headers, method=method
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)

    def refused(self, method: str, path: str, **body: object) -> tuple[int, str]:
        """The status and the message of a change that is refused."""
        with pytest.raises(urllib.error.HTTPError) as found:
            self.send(method, path, **body)
        with found.value as error:
            return error.code, json.load(error)["error"]["message"]

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
        apache.Broker(root / "broker", root / "store", names.address, version=version, **TIMERS),
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
                url = ready[ready.index("http") :].split()[0].rstrip("/")
                found = RunningConsole(process, url, names.address)
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


def test_topics_groups_and_brokers_are_shown(console: RunningConsole) -> None:
    topic = console.get(f"/topics/{TOPIC}")
    assert list(topic["brokers"]) == ["apache"]
    assert topic["messages"] == sum(queue["messages"] for queue in topic["queues"]) >= 1
    assert GROUP in [group["name"] for group in topic["groups"]]
    group = console.get(f"/groups/{GROUP}")
    assert TOPIC in group["topics"]
    assert group["members"] == []
    assert group["settings"]["apache"]["consume_enabled"] is True
    assert console.get(f"/groups/{GROUP}/explain")["verdict"] == "no_member"
    # In its first second, Apache's broker answers GET_BROKER_RUNTIME_INFO with an exception.
    console.await_true(lambda: console.get("/cluster")["brokers"][0]["state"] == "up")
    [broker] = console.get("/cluster")["brokers"]
    assert (broker["name"], broker["state"], broker["penstock_version"]) == ("apache", "up", None)
    assert broker["version"]
    overview = console.get("/overview")
    assert (overview["brokers"], overview["brokers_answering"]) == (1, 1)
    assert overview["topics"] >= 1
    assert console.get("/transactions")["rows"] == []
    assert console.get("/dead-letters")["rows"] == []
    assert console.get("/access")["users"] == []


def test_a_message_that_is_sent_again_reaches_a_consumer(console: RunningConsole) -> None:
    with Producer(console.nameserver, group="shop") as producer:
        receipt = producer.send(Message("again-orders", b"once more", keys=["again-1"]))
    with Consumer(console.nameserver, group="again", start_at="first") as consumer:
        consumer.subscribe("again-orders")
        messages = iter(consumer)
        first = next(messages)
        (row,) = console.get("/messages", q="topic:again-orders key:again-1")["rows"]
        path = f"/message/again-orders/{row['broker']}/{row['queue']}/{row['offset']}/resend"
        assert console.send("POST", path, dry_run=True)["count"] == 1
        job = console.send("POST", path)
        again = next(messages)
    assert (first.message_id, again.message_id) == (receipt.message_id,) * 2
    assert again.body == b"once more"
    report = console.get(f"/jobs/{job['id']}")
    assert (report["state"], report["done"], report["failed"]) == ("finished", 1, 0)


def test_a_reset_is_previewed_applied_and_undone(console: RunningConsole) -> None:
    path = f"/groups/{GROUP}/reset"

    def committed() -> dict[int, int | None]:
        queues = console.get(f"/groups/{GROUP}")["queues"]
        return {at["queue"]: at["committed"] for at in queues if at["topic"] == TOPIC}

    # So that all queues have an offset, which an undo can restore.
    plan = console.send("POST", f"{path}/preview", topic=TOPIC, to="last")
    console.send("POST", f"{path}/apply", token=plan["token"])
    before = committed()
    plan = console.send("POST", f"{path}/preview", topic=TOPIC, to="first")
    assert {move["queue"]: move["old"] for move in plan["moves"]} == before
    assert plan["repeated"] == sum(before.values()) >= 1
    assert committed() == before
    result = console.send("POST", f"{path}/apply", token=plan["token"])
    assert result["failed"] == []
    assert committed() == {move["queue"]: move["new"] for move in plan["moves"]}
    console.send("POST", f"{path}/undo", token=result["undo"])
    assert committed() == before
    status, message = console.refused(
        "POST", f"/groups/{GROUP}s/reset/preview", topic=TOPIC, to="first"
    )
    assert status == 404
    assert f"similar groups: {GROUP}" in message


def test_the_tail_streams_new_messages(console: RunningConsole) -> None:
    with (
        Producer(console.nameserver, group="shop") as producer,
        console.open("/tail", topic=TOPIC, q="key:live") as events,
    ):
        assert events.readline() == b"event: ready\n"
        rows: list[Any] = []
        for number in range(100):  # those before the tail has begun are not in it
            producer.send(Message(TOPIC, f"live {number}".encode(), keys=["live"]))
            producer.send(Message(TOPIC, b"other", keys=["other"]))
            if number < 5:
                time.sleep(0.5)
                continue
            while not (line := events.readline()).startswith(b'data: {"rows"'):
                assert line
            rows += json.loads(line.removeprefix(b"data: "))["rows"]
            break
    assert {row["summary"].split()[0] for row in rows} == {"live"}


def test_an_export_has_whole_bodies_and_properties(console: RunningConsole) -> None:
    body = "x" * 1_898
    with Producer(console.nameserver, group="shop") as producer:
        for number in range(3):
            properties = {"number": str(number)}
            producer.send(Message("exported", body.encode(), properties=properties))
    with console.open("/messages/export", topic="exported", order="oldest") as response:
        rows = [json.loads(line) for line in response]
    assert [row["body"] for row in rows] == [body] * 3
    assert sorted(row["properties"]["number"] for row in rows) == ["0", "1", "2"]


def test_a_timer_message_is_recalled(console: RunningConsole) -> None:
    with Producer(console.nameserver, group="shop") as producer:
        receipts = [
            producer.send(Message(TOPIC, b"later", delay=timedelta(hours=1))) for _ in range(2)
        ]
    recalled, kept = (receipt.message_id for receipt in receipts)

    def waiting() -> dict[str, Any]:
        return {row["id"]: row for row in console.get("/scheduled", topic=TOPIC)["rows"]}

    console.await_true(lambda: waiting().keys() == {recalled, kept})
    row = waiting()[recalled]
    assert row["level"] is None
    handle = row["recall_handle"]
    assert console.send("POST", "/scheduled/recall", handle=handle) == {"id": recalled}
    console.await_true(lambda: waiting().keys() == {kept})


def test_settings_are_shown_and_changed(console: RunningConsole) -> None:
    def settings() -> dict[str, Any]:
        return {row["name"]: row for row in console.get(SETTINGS)["rows"]}

    found = settings()
    assert found["brokerName"]["value"] == "apache"
    assert found["timerWheelEnable"]["value"] == "true"
    assert found["fileReservedTime"]["live"] is None  # Apache's brokers do not tell
    answer = console.send("PUT", SETTINGS, name="fileReservedTime", value="71")
    assert answer == {"name": "fileReservedTime", "value": "71"}
    assert settings()["fileReservedTime"]["value"] == "71"
    for name, value, status, text in (
        ("fileReservdTime", "3", 400, "similar settings: fileReservedTime"),
        ("fileReservedTime", "many", 409, "fileReservedTime is still 71"),
        ("configBlackList", "none", 409, "Can not update config in black list"),
    ):
        refused = console.refused("PUT", SETTINGS, name=name, value=value)
        assert refused[0] == status, refused
        assert text in refused[1]


def test_only_what_is_given_changes(console: RunningConsole) -> None:
    topic = {"name": "uneven", "read_queues": 8, "write_queues": 4}
    console.send("POST", "/topics", **topic)
    console.send("PUT", "/topics/uneven", message_type="FIFO")
    settings = console.get("/topics/uneven")["brokers"]["apache"]
    assert (settings["read_queues"], settings["write_queues"]) == (8, 4)
    assert settings["message_type"] == "FIFO"
    preview = console.send("POST", "/topics/uneven/preview", read_queues=4)
    assert preview["brokers"][0]["losses"] == ["4 read queues are removed from apache"]
    assert console.refused("PUT", "/topics/uneven", read_queues=4)[0] == 409
    console.send("PUT", "/topics/uneven", read_queues=4, confirm=True)
    assert console.get("/topics/uneven")["brokers"]["apache"]["read_queues"] == 4
