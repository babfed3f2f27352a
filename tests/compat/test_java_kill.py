"""Nothing is lost: brokers die by SIGKILL under real Java producers and consumers."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters, maven
from .conftest import Sessions
from .java_session import JavaSession, eventually

pytestmark = [pytest.mark.compat, pytest.mark.slow]

KILLS = rounds(ci=2, proof=10)
LIFE_S = rounds(ci=4, proof=14)
VERSIONS = maven.VERSIONS[: rounds(ci=1, proof=3)]

Queue = tuple[str, int]
TIME_NS = 8


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("listener", ["orderly", "concurrent"][: rounds(ci=1, proof=2)])
def test_every_acknowledged_message_is_consumed(
    tmp_path: Path, sessions: Sessions, fresh: str, version: str, listener: str
) -> None:
    java = sessions(version)
    with clusters.running(tmp_path, brokerName="mortal") as cluster:
        java.do("producer.start", producer=fresh, namesrv=cluster.namesrv, timeout_ms=3000)
        java.do("producer.create_topic", producer=fresh, topic=fresh, queues=4)
        consumers = [f"{fresh}-{name}" for name in ("a", "b")]
        for consumer in consumers:
            java.do(
                "push.start", consumer=consumer, namesrv=cluster.namesrv, group=fresh,
                topics={fresh: "*"}, orderly=listener == "orderly", poll_namesrv_ms=1000,
            )  # fmt: skip
        assert java.do("flood.start", producer=fresh, flood=fresh, topic=fresh) == 4
        for _ in range(KILLS):
            time.sleep(LIFE_S * random.uniform(0.5, 1.0))
            cluster.server.kill()
            cluster.server.start()
        time.sleep(LIFE_S / 2)
        flood = java.do("flood.stop", flood=fresh)
        assert flood["failures"] >= KILLS  # the kills were felt
        acked = flood["acknowledged"]
        assert len(acked) >= 500
        received = _await_all(java, consumers, acked)
        java.do("producer.stop", producer=fresh)
        for consumer in consumers:
            java.do("push.stop", consumer=consumer)

    contents: dict[tuple[Queue, int], int] = {}
    for rows in received.values():
        for name, queue, offset, body, *_ in rows:
            # What a broker once gave out stays at its offset, also over its death.
            assert contents.setdefault(((name, queue), offset), int(body)) == int(body)
    for name, queue, number, offset in acked:
        assert contents.get(((name, queue), offset)) == number, (queue, number, offset)
    _assert_log_order(contents)
    if listener == "orderly":
        _assert_consumed_in_order([row for rows in received.values() for row in rows])


def _await_all(java: JavaSession, consumers: list[str], acked: list[Any]) -> dict[str, list[Any]]:
    """All that the consumers received, once that is everything acknowledged (or time is up)."""
    wanted = {(name, queue, offset) for name, queue, _, offset in acked}
    received: dict[str, list[Any]] = {consumer: [] for consumer in consumers}

    def complete() -> bool:
        for consumer, rows in received.items():
            rows += java.do("push.received", consumer=consumer, since=len(rows))
        return wanted <= {tuple(row[:3]) for rows in received.values() for row in rows}

    eventually(complete, within_s=90)
    return received


def _assert_log_order(contents: dict[tuple[Queue, int], int]) -> None:
    """In each queue the numbers rise; one whose acknowledgement was lost may be there twice."""
    numbers: dict[Queue, list[int]] = defaultdict(list)
    for (queue, _), number in sorted(contents.items()):
        numbers[queue].append(number)
    assert len(numbers) == 4
    for row in numbers.values():
        assert row == sorted(row)


def _assert_consumed_in_order(rows: list[Any]) -> None:
    """The group goes on with the next message of a queue, or back to where progress was kept."""
    reached: dict[int, int] = defaultdict(lambda: -1)
    for row in sorted(rows, key=lambda row: int(row[TIME_NS])):
        queue, offset = row[1], row[2]
        assert offset <= reached[queue] + 1, (queue, offset, reached[queue])
        reached[queue] = max(offset, reached[queue])


def test_producer_turns_to_the_other_broker(
    tmp_path: Path, java54: JavaSession, fresh: str
) -> None:
    java = java54
    with (
        clusters.name_server(tmp_path / "namesrv") as names,
        clusters.broker(tmp_path / "b1", names.address, brokerName="mortal") as mortal,
        clusters.broker(tmp_path / "b2", names.address, brokerName="steady"),
    ):
        java.do("producer.start", producer=fresh, namesrv=names.address, timeout_ms=5000)
        java.do("producer.create_topic", producer=fresh, topic=fresh, queues=4)

        def send(numbers: range) -> list[Any]:
            messages = [{"topic": fresh, "body": str(n)} for n in numbers]
            acked: list[Any] = java.do("producer.send", producer=fresh, messages=messages)
            assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
            return acked

        assert {line["broker"] for line in send(range(32))} == {"mortal", "steady"}
        mortal.kill()
        assert {line["broker"] for line in send(range(32, 64))} == {"steady"}
        mortal.start()

        def both() -> bool:
            return {line["broker"] for line in send(range(64, 72))} == {"mortal", "steady"}

        assert eventually(both, within_s=60)
        java.do(
            "push.start", consumer=fresh, namesrv=names.address, group=fresh, topics={fresh: "*"}
        )

        def all_read() -> bool:
            rows = java.do("push.received", consumer=fresh)
            return {int(row[3]) for row in rows} == set(range(72))

        assert eventually(all_read)
        java.do("producer.stop", producer=fresh)
        java.do("push.stop", consumer=fresh)
