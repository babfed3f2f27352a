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

from . import clusters
from .java_session import JavaSession, eventually
from .variants import any_client

pytestmark = [pytest.mark.compat, pytest.mark.slow]

LEVELS = "1s 2s 3s 1s 1s 1s 5s"
DELAYS_MS = [1000, 2000, 3000, 1000, 1000, 1000, 5000]

# Places of what a push consumer tells of each message.
BODY, TIME_NS, TOPIC, TIMES, STORED_MS, ORIGIN = 3, 8, 9, 10, 11, 12


@pytest.fixture(scope="module")
def quick(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster whose delay levels are seconds."""
    with clusters.running(
        tmp_path_factory.mktemp("quick"), brokerName="quick", messageDelayLevel=LEVELS
    ) as cluster:
        yield cluster


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


@any_client
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


@any_client
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


@any_client
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


@any_client
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
    with clusters.running(tmp_path, brokerName="mortal", messageDelayLevel=LEVELS) as cluster:
        send(client, cluster, [{"topic": fresh, "body": "make the topic"}])
        client.do(
            "push.start", consumer="c", namesrv=cluster.namesrv, group=fresh, topics={fresh: "*"},
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
            cluster.server.kill()
            cluster.server.start()
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
