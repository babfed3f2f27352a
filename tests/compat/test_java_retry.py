"""Real Java clients: delayed messages, listeners that fail, dead letters, a broker that dies."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import apache, clusters, penstock
from .clients import mqadmin
from .conftest import VARIANTS
from .java_session import JavaSession, eventually

pytestmark = [pytest.mark.compat, pytest.mark.slow]

clients = pytest.mark.parametrize(
    "client", list(VARIANTS)[: rounds(ci=2, proof=4)], indirect=True, scope="session"
)

LEVELS = "1s 2s 3s 1s 1s 1s 5s"
DELAYS_MS = [1000, 2000, 3000, 1000, 1000, 1000, 5000]

# Places of what a push consumer tells of each message.
BODY, TIME_NS, TOPIC, TIMES, STORED_MS, ORIGIN = 3, 8, 9, 10, 11, 12


@pytest.fixture(scope="module")
def quick(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster whose delay levels are seconds."""
    directory = tmp_path_factory.mktemp("quick")
    with (
        clusters.name_server(directory / "namesrv") as names,
        clusters.broker(
            directory / "broker", names.address, brokerName="quick", messageDelayLevel=LEVELS
        ) as broker,
    ):
        yield clusters.Cluster(names.address, broker.name, broker.address)


def start_producer(client: JavaSession, cluster: clusters.Cluster) -> str:
    name = f"p-{cluster.broker}"
    client.do("producer.start", producer=name, namesrv=cluster.namesrv)
    return name


def send(
    client: JavaSession, cluster: clusters.Cluster, messages: list[dict[str, Any]]
) -> list[Any]:
    acked: list[Any] = client.do(
        "producer.send", producer=start_producer(client, cluster), messages=messages
    )
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
    return acked


def received(client: JavaSession, consumer: str, count: int, within_ms: int = 40_000) -> list[Any]:
    rows: list[Any] = client.do(
        "push.received", consumer=consumer, count=count, within_ms=within_ms
    )
    return rows


@clients
def test_delayed_messages_come_in_time(
    client: JavaSession, quick: clusters.Cluster, fresh: str
) -> None:
    client.do("push.start", consumer=fresh, namesrv=quick.namesrv, group=fresh, topics={fresh: "*"})
    plain = {"topic": fresh, "body": "0"}
    send(client, quick, [plain])
    assert len(received(client, fresh, 1)) == 1
    began_ms = time.time() * 1000
    delayed = [
        {"topic": fresh, "body": str(level), "delay_level": level, "tags": "A"}
        for level in (1, 2, 3, 7, 99)
    ]
    send(client, quick, delayed)
    sent_ms = time.time() * 1000
    rows = {row[BODY]: row for row in received(client, fresh, 6)}
    assert set(rows) == {"0", "1", "2", "3", "7", "99"}
    for level in ("1", "2", "3", "7", "99"):
        delay_ms = DELAYS_MS[min(int(level), 7) - 1]
        stored_ms = rows[level][STORED_MS]
        assert began_ms + delay_ms - 1 <= stored_ms
        assert stored_ms < sent_ms + delay_ms + 1500  # Apache looks every 100 ms
    client.do("push.stop", consumer=fresh)


@clients
def test_a_failing_listener_gets_the_message_again(
    client: JavaSession, quick: clusters.Cluster, fresh: str
) -> None:
    client.do(
        "push.start", consumer=fresh, namesrv=quick.namesrv, group=fresh, topics={fresh: "*"},
        fail_times=2,
    )  # fmt: skip
    acked = send(client, quick, [{"topic": fresh, "body": str(n), "tags": "A"} for n in range(5)])
    rows = received(client, fresh, 15)
    by_body = defaultdict(list)
    for row in rows:
        by_body[row[BODY]].append(row)
    assert set(by_body) == {str(n) for n in range(5)}
    ids = {line["offset_msg_id"] for line in acked}
    for tries in by_body.values():
        assert [row[TIMES] for row in tries] == [0, 1, 2]
        assert {row[TOPIC] for row in tries} == {fresh}  # the client shows the topic it was sent to
        assert tries[0][ORIGIN] is None
        assert tries[1][ORIGIN] == tries[2][ORIGIN]
        assert tries[1][ORIGIN] in ids
        waits_ms = [b[STORED_MS] - a[STORED_MS] for a, b in pairwise(tries)]
        assert waits_ms[0] >= DELAYS_MS[2]
        assert waits_ms[1] >= DELAYS_MS[3]
    client.do("push.stop", consumer=fresh)


@clients
def test_what_fails_too_often_is_a_dead_letter(
    client: JavaSession, quick: clusters.Cluster, fresh: str
) -> None:
    client.do(
        "push.start", consumer=fresh, namesrv=quick.namesrv, group=fresh, topics={fresh: "*"},
        fail_times=99, max_reconsume_times=1,
    )  # fmt: skip
    acked = send(client, quick, [{"topic": fresh, "body": "hopeless", "keys": ["k"]}])
    assert [row[TIMES] for row in received(client, fresh, 2)] == [0, 1]
    dead = f"%DLQ%{fresh}"
    client.do("pull.start", consumer=fresh, namesrv=quick.namesrv, group=f"{fresh}-look")
    place = {"consumer": fresh, "topic": dead, "broker": quick.broker, "queue_id": 0}

    def look() -> Any:
        try:
            return client.do("pull.messages", **place)["messages"]
        except Exception:  # the topic is not there yet
            return []

    (letter,) = eventually(look)
    assert letter["msg_id"] == acked[0]["msg_id"]
    client.do("push.stop", consumer=fresh)


@clients
def test_orderly_consumers_give_up_after_their_times(
    client: JavaSession, quick: clusters.Cluster, fresh: str
) -> None:
    client.do(
        "push.start", consumer=fresh, namesrv=quick.namesrv, group=fresh, topics={fresh: "*"},
        fail_times=99, max_reconsume_times=1, orderly=True,
    )  # fmt: skip
    send(client, quick, [{"topic": fresh, "body": "bad"}])
    client.do("pull.start", consumer=fresh, namesrv=quick.namesrv, group=f"{fresh}-look")
    place = {"consumer": fresh, "topic": f"%DLQ%{fresh}", "broker": quick.broker, "queue_id": 0}

    def look() -> Any:
        try:
            return client.do("pull.messages", **place)["messages"]
        except Exception:
            return []

    assert len(eventually(look)) == 1
    client.do("push.stop", consumer=fresh)


@pytest.mark.usefixtures("java")
@pytest.mark.timeout(300)
def test_no_delayed_or_retried_message_is_lost_when_the_broker_dies(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str
) -> None:
    client = start_java()
    with (
        clusters.name_server(tmp_path / "namesrv") as names,
        clusters.broker(
            tmp_path / "broker", names.address, brokerName="mortal", messageDelayLevel=LEVELS
        ) as broker,
    ):
        cluster = clusters.Cluster(names.address, broker.name, broker.address)
        send(client, cluster, [{"topic": fresh, "body": "make the topic"}])
        client.do(
            "push.start", consumer="c", namesrv=names.address, group=fresh, topics={fresh: "*"},
            fail_times=1, poll_namesrv_ms=1000,
        )  # fmt: skip
        due: dict[str, float] = {}
        number = 0
        for _ in range(rounds(ci=2, proof=6)):
            end = time.monotonic() + 3
            while time.monotonic() < end:
                level = 1 + number % 3
                body = f"m{number}"
                due[body] = time.time() * 1000 + DELAYS_MS[level - 1]
                lines = client.do(
                    "producer.send", producer=f"p-{cluster.broker}",
                    messages=[{"topic": fresh, "body": body, "delay_level": level}],
                )  # fmt: skip
                if lines[0].get("status") != "SEND_OK":
                    del due[body]
                number += 1
            broker.kill()
            broker.start()
            eventually(lambda: probe(client, cluster, fresh))

        def all_twice() -> bool:
            rows = client.do("push.received", consumer="c")
            times = Counter(row[BODY] for row in rows)
            again = {row[BODY] for row in rows if row[TIMES] == 1}
            return all(times[body] >= 2 and body in again for body in due)

        assert eventually(all_twice, within_s=90), "lost"
        for row in client.do("push.received", consumer="c"):
            if row[BODY] in due:
                assert row[STORED_MS] >= due[row[BODY]] - 1, "early"
        client.do("push.stop", consumer="c")


def probe(client: JavaSession, cluster: clusters.Cluster, topic: str) -> bool:
    """Whether the broker takes messages again."""
    lines = client.do(
        "producer.send", producer=f"p-{cluster.broker}",
        messages=[{"topic": topic, "body": "are you there"}],
    )  # fmt: skip
    return bool(lines[0].get("status") == "SEND_OK")


@pytest.mark.usefixtures("java")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-to-apache", "apache-to-ours"])
def test_what_waits_moves_with_its_store(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str, ours_first: bool
) -> None:
    kinds: list[type[clusters.AnyBroker]] = [penstock.Broker, apache.Broker]
    first, second = kinds if ours_first else kinds[::-1]
    conf = {**clusters.LARGE_FILES, "messageDelayLevel": "1s 15s", "brokerName": "moving"}
    store = tmp_path / "store"
    with penstock.NameServer(tmp_path / "namesrv") as names:
        with first(tmp_path / "first", store, names.address, **conf) as broker:
            cluster = clusters.Cluster(names.address, broker.name, broker.address)
            client = start_java()
            send(client, cluster, [{"topic": fresh, "body": "now"}])
            sent_ms = time.time() * 1000
            messages = [{"topic": fresh, "body": "later", "delay_level": 2, "tags": "A"}]
            send(client, cluster, messages)
            shown = eventually(lambda: level_shown(cluster))
            assert shown.split() == ["scheduleMessageOffset_2", ":", "0,1"]
            client.kill()
        with second(tmp_path / "second", store, names.address, **conf):
            client = start_java()
            client.do(
                "push.start", consumer="c", namesrv=names.address, group=fresh, topics={fresh: "A"}
            )
            (row,) = received(client, "c", 1, within_ms=60_000)
            assert row[BODY] == "later"
            assert row[STORED_MS] >= sent_ms + 15_000


def level_shown(cluster: clusters.Cluster) -> str:
    """What mqadmin says of level 2."""
    lines = mqadmin(cluster.namesrv, "brokerStatus", "-b", cluster.broker_address).splitlines()
    return next((line for line in lines if line.startswith("scheduleMessageOffset_2 ")), "")
