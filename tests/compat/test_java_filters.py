"""Real Java consumers that filter by properties: push, lite pull, pull."""

from __future__ import annotations

from typing import Any

import pytest

from .clusters import APACHE, Cluster
from .java_session import ClientError, JavaSession, eventually
from .variants import any_client

pytestmark = [pytest.mark.compat, pytest.mark.slow, any_client]

BODY = 3  # of what a push consumer tells of each message


def send(client: JavaSession, cluster: Cluster, topic: str, numbers: range) -> None:
    """Messages with numbers as bodies and as the property n, every third with a region."""
    client.do("producer.start", producer="filters", namesrv=cluster.namesrv)
    messages = [
        {
            "topic": topic,
            "body": str(n),
            "tags": "even" if n % 2 == 0 else "odd",
            "properties": {"n": str(n), **({"region": "eu"} if n % 3 == 0 else {})},
        }
        for n in numbers
    ]
    acked: list[Any] = client.do("producer.send", producer="filters", messages=messages)
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked


def received(client: JavaSession, consumer: str, count: int) -> list[int]:
    rows = client.do("push.received", consumer=consumer, count=count)
    return sorted(int(row[BODY]) for row in rows)


def push(client: JavaSession, cluster: Cluster, consumer: str, topic: str, expression: str) -> None:
    client.do(
        "push.start", consumer=consumer, namesrv=cluster.namesrv, group=f"{topic}-{consumer}",
        sql={topic: expression},
    )  # fmt: skip


def pull(client: JavaSession, place: dict[str, Any]) -> dict[str, Any] | None:
    """None as long as the client does not know what release the broker is.

    It learns that from its heartbeats, an old one from the next after it has met the broker.
    """
    try:
        told: dict[str, Any] = client.do("pull.messages", consumer="p", sql="n >= 30", **place)
    except ClientError as error:
        if "does not upgrade to support" in error.message:
            return None
        raise
    return told


def test_push_consumers_get_what_their_filters_match(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, cluster, fresh, range(60))
    filters = {
        "numbers": ("n BETWEEN 10 AND 19 OR n = 5", lambda n: 10 <= n <= 19 or n == 5),
        "missing": ("region IS NULL AND TAGS IN ('even')", lambda n: n % 3 != 0 and n % 2 == 0),
        "texts": ("region STARTSWITH 'e' AND n > 30.5", lambda n: n % 3 == 0 and n > 30),
    }
    for name, (expression, _) in filters.items():
        push(client, cluster, name, fresh, expression)
    for name, (_, wanted) in filters.items():
        expected = [n for n in range(60) if wanted(n)]
        assert received(client, name, len(expected)) == expected
    send(client, cluster, fresh, range(60, 80))  # to consumers that wait
    expected = [n for n in range(80) if n % 3 == 0 and n > 30]
    assert received(client, "texts", len(expected)) == expected
    for name in filters:
        client.do("push.stop", consumer=name, later_ms=0)


def test_pull_and_lite_pull_consumers_filter(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, cluster, fresh, range(40))
    client.do("pull.start", consumer="p", namesrv=cluster.namesrv, group=f"{fresh}-pull")
    found = []
    for queue in client.do("pull.queues", consumer="p", topic=fresh):
        at = 0
        while at < queue["max"]:
            place = {"topic": fresh, "broker": queue["broker"], "queue_id": queue["queue_id"]}
            told = eventually(lambda: pull(client, {**place, "offset": at}), within_s=45)  # noqa: B023
            assert told is not None
            found += told["messages"]
            at = told["next"]
    assert len(found) == 10
    client.do("pull.stop", consumer="p")

    client.do(
        "lite.start", consumer="l", namesrv=cluster.namesrv, group=f"{fresh}-lite", topic=fresh,
        sql="n < 7",
    )  # fmt: skip
    polled = client.do("lite.poll", consumer="l", count=8, within_ms=5_000)
    assert len(polled) == 7
    client.do("lite.stop", consumer="l")


def test_a_wrong_filter_is_refused_at_subscribe_time(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, cluster, fresh, range(1))
    with pytest.raises(ClientError) as caught:
        push(client, cluster, "wrong", fresh, "n > AND")
    assert caught.value.code == 23
    if not APACHE:
        assert "column 5" in caught.value.message
