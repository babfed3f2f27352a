"""Real Java clients ask and reply: what comes back, who waits in vain, who is gone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters
from .java_session import ClientError, JavaSession, eventually
from .variants import any_client, each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow]

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"


def start(client: JavaSession, cluster: clusters.Cluster, name: str, **options: Any) -> str:
    client.do("request.start", producer=name, namesrv=cluster.namesrv, **options)
    return name


def ask(client: JavaSession, producer: str, topic: str, *bodies: str, **options: Any) -> list[Any]:
    messages = [{"topic": topic, "body": body, "tags": "Q"} for body in bodies]
    lines: list[Any] = client.do("request.ask", producer=producer, messages=messages, **options)
    return lines


def serve(client: JavaSession, cluster: clusters.Cluster, topic: str, **options: Any) -> None:
    """Somebody replies to what is asked under a topic, with an exclamation mark more."""
    client.do(
        "reply.start", consumer=topic, group=topic, namesrv=cluster.namesrv, topic=topic, **options
    )


def make_topic(client: JavaSession, cluster: clusters.Cluster, topic: str) -> None:
    client.do("producer.start", producer=f"maker-{cluster.broker}", namesrv=cluster.namesrv)
    client.do("producer.create_topic", producer=f"maker-{cluster.broker}", topic=topic, queues=2)

    def known() -> bool:
        try:
            messages = [{"topic": topic, "body": "here?"}]
            lines = client.do(
                "producer.send", producer=f"maker-{cluster.broker}", messages=messages
            )
        except ClientError:
            return False
        return bool(lines[0].get("status") == "SEND_OK")

    assert eventually(known)


@each_release
def test_a_request_gets_its_reply(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, cluster, fresh)
    serve(client, cluster, fresh)
    asker = start(client, cluster, f"{fresh}-asker")
    began_ms = time.time() * 1000
    ways: list[dict[str, Any]] = [
        {}, {"how": "selector"}, {"how": "queue", "broker": cluster.broker, "queue_id": 1},
    ]  # fmt: skip
    for way in ways:
        (line,) = ask(client, asker, fresh, f"hello {way}", **way)
        assert line["body"] == f"hello {way}!"
        assert line["topic"] == REPLY_TOPIC
    properties = line["properties"]
    assert properties["MSG_TYPE"] == "reply"
    assert properties["REPLY_TO_CLIENT"] == client.do("request.client_id", producer=asker)
    assert {"CORRELATION_ID", "TTL"} <= set(properties)
    for name in ("PUSH_REPLY_TIME", "ARRIVE_TIME"):
        assert began_ms - 1 <= int(properties[name]) <= time.time() * 1000 + 1
    assert line["store_host"].endswith(cluster.broker_address)
    client.do("reply.stop", consumer=fresh)


@any_client
def test_callbacks_get_each_its_own_reply(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, cluster, fresh)
    serve(client, cluster, fresh)
    asker = start(client, cluster, f"{fresh}-asker")
    bodies = [f"question {n}" for n in range(rounds(ci=50, proof=500))]
    lines = ask(client, asker, fresh, *bodies, how="async")
    assert [line.get("body") for line in lines] == [f"{body}!" for body in bodies]
    client.do("reply.stop", consumer=fresh)


@any_client
def test_a_large_reply_is_compressed_on_its_way(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, cluster, fresh)
    serve(client, cluster, fresh, size=500_000)
    asker = start(client, cluster, f"{fresh}-asker")
    (line,) = ask(client, asker, fresh, "much")
    assert line["body_length"] == len("much") + 500_001
    outcomes = client.do("reply.outcomes", consumer=fresh, count=2)  # one came with the topic
    (outcome,) = [one for one in outcomes if one["asked"] == "much"]
    assert outcome["status"] == "SEND_OK"
    client.do("reply.stop", consumer=fresh)


@any_client
def test_who_is_not_answered_waits_as_long_as_it_said(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, cluster, fresh)
    asker = start(client, cluster, f"{fresh}-asker")
    began = time.monotonic()
    # Long enough that the send itself does not use it up on a busy machine: that is another error.
    (line,) = ask(client, asker, fresh, "anybody?", timeout_ms=4000)
    assert time.monotonic() - began >= 3.9  # the JVM has another clock
    assert line["error"] == "RequestTimeoutException"
    (line,) = ask(client, asker, fresh, "anybody?", timeout_ms=4000, how="async")
    assert line["error"] == "RequestTimeoutException"


@any_client
def test_a_reply_to_who_is_gone_fails_and_is_stored(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, cluster, fresh)
    asker = start(client, cluster, f"{fresh}-asker")
    client_id = client.do("request.client_id", producer=asker)
    (line,) = ask(client, asker, fresh, "quick", timeout_ms=4000)
    assert line["error"] == "RequestTimeoutException"
    client.do("request.stop", producer=asker)
    serve(client, cluster, fresh)

    def outcome() -> Any:
        lines = client.do("reply.outcomes", consumer=fresh)
        return next((line for line in lines if line["asked"] == "quick"), None)

    line = eventually(outcome)
    assert line["reply_to"] == client_id
    assert line["code"] == 1
    assert line["topic"] == REPLY_TOPIC
    client.do("pull.start", consumer="looker", namesrv=cluster.namesrv, group="looker")
    place = {"consumer": "looker", "topic": REPLY_TOPIC, "broker": cluster.broker, "queue_id": 0}
    (queue,) = client.do("pull.queues", consumer="looker", topic=REPLY_TOPIC)
    newest = client.do("pull.messages", **place, offset=max(queue["max"] - 8, 0))["messages"]
    (stored,) = [
        one["properties"] for one in newest
        if one["properties"].get("REPLY_TO_CLIENT") == client_id
    ]  # fmt: skip
    assert "PUSH_REPLY_TIME" not in stored
    client.do("reply.stop", consumer=fresh)


@any_client
def test_two_who_ask_in_one_process_get_each_their_own(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, cluster, fresh)
    serve(client, cluster, fresh)
    # Two of one client, and one with an id of its own.
    for name, instance in (("one", "shared"), ("two", "shared"), ("three", "alone")):
        start(client, cluster, f"{fresh}-{name}", group=f"{fresh}-{name}", instance=instance)
    ids = [
        client.do("request.client_id", producer=f"{fresh}-{name}")
        for name in ("one", "two", "three")
    ]
    assert ids[0] == ids[1] != ids[2]
    for name in ("one", "two", "three", "one"):
        assert ask(client, f"{fresh}-{name}", fresh, name)[0].get("body") == f"{name}!"
    client.do("request.stop", producer=f"{fresh}-one")  # the other goes on by the same client
    if not clusters.APACHE:  # which forgets the client with the first of its producers
        assert ask(client, f"{fresh}-two", fresh, "still")[0].get("body") == "still!"
    client.do("reply.stop", consumer=fresh)
