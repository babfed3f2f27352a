"""Reads a whole topic through a Java session's pull consumer."""

from __future__ import annotations

from typing import Any

from .clusters import Cluster
from .java_session import JavaSession

Line = dict[str, Any]


def read_all(
    client: JavaSession, cluster: Cluster, topic: str, *, expression: str = "*"
) -> list[Line]:
    """Every message of `topic` that fits `expression`, queue by queue in their order."""
    name = f"reader-{cluster.namesrv.split(':')[1]}"
    client.do("pull.start", consumer=name, namesrv=cluster.namesrv, group=name)
    lines: list[Line] = []
    for queue in client.do("pull.queues", consumer=name, topic=topic):
        place = {"topic": topic, "broker": queue["broker"], "queue_id": queue["queue_id"]}
        at = queue["min"]
        while at < queue["max"]:
            pulled = client.do(
                "pull.messages", consumer=name, expression=expression, offset=at, **place
            )
            assert pulled["next"] > at, pulled
            lines += pulled["messages"]
            at = pulled["next"]
    return lines
