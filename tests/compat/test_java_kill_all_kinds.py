"""Brokers die by SIGKILL while delayed, retried, ordered and transactional messages flow.

Real Java clients send and consume all four kinds at once. At the end exactly what was committed
has arrived, at least once each; nothing was early; nothing that was rolled back was ever seen; and
no queue had two consumers in order at the same time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters
from .conftest import Sessions
from .java_session import JavaSession, eventually
from .test_java_order import assert_in_order, assert_one_at_a_time, await_all, calls_of

pytestmark = [pytest.mark.compat, pytest.mark.slow]

KILLS = rounds(ci=1, proof=6)
LIFE_S = rounds(ci=5, proof=8)
# Two releases at a time, beside each other.
CHOSEN = [
    ("5.4.0-json", "4.9.8-binary"),
    ("5.5.1-json", "5.4.0-binary"),
    ("5.5.1-binary", "4.9.8-json"),
][: rounds(ci=1, proof=3)]

LEVELS = "1s 1s 2s 2s 2s"
DELAY_MS = 1000
RETRY_MS = 2000  # level 3, the first of retries

CONF: dict[str, Any] = {
    "brokerName": "mortal",
    "messageDelayLevel": LEVELS,
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
}

# Places of what a push consumer tells of each message.
QUEUE, OFFSET, BODY, TIMES, STORED_MS = 1, 2, 3, 10, 11


@contextmanager
def dying(broker: clusters.AnyBroker) -> Iterator[None]:
    """Kills and starts the broker again at random, beside what is done meanwhile."""
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            for _ in range(KILLS):
                time.sleep(LIFE_S * random.uniform(0.5, 1.0))
                broker.kill()
                broker.start()
        except BaseException as error:
            failed.append(error)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join()
    assert not failed, failed


class Load:
    """The producers and consumers of one release, with topics and groups of their own."""

    def __init__(self, java: JavaSession, namesrv: str, name: str) -> None:
        self.java = java
        self.namesrv = namesrv
        self.name = name
        self.due: dict[str, float] = {}
        """By body when a delayed message may come, of those that were taken."""

    def topic(self, kind: str) -> str:
        return f"{self.name}-{kind}"

    def start(self) -> None:
        self.java.do(
            "producer.start", producer=self.name, namesrv=self.namesrv, timeout_ms=3000, retries=0,
            poll_namesrv_ms=1000,
        )  # fmt: skip
        for kind in ("delayed", "ordered", "traded"):
            self.java.do(
                "producer.create_topic", producer=self.name, topic=self.topic(kind), queues=4
            )
        self._start_consumers()
        ordered, traded = self.topic("ordered"), self.topic("traded")
        flood = {"producer": self.name, "flood": self.name, "topic": ordered, "pause_ms": 5}
        assert self.java.do("flood.start", **flood) == 4
        self.java.do(
            "txflood.start", flood=self.name, namesrv=self.namesrv, group=traded, topic=traded,
            timeout_ms=3000, poll_namesrv_ms=1000,
        )  # fmt: skip

    def _start_consumers(self) -> None:
        """One whose messages fail once, two in order, and one for what is committed."""
        ordered = self.topic("ordered")
        common = {"namesrv": self.namesrv, "poll_namesrv_ms": 1000}
        for kind, fail_times in (("delayed", 1), ("traded", 0)):
            topic = self.topic(kind)
            subscribed = {"group": topic, "topics": {topic: "*"}, "fail_times": fail_times}
            self.java.do("push.start", consumer=topic, **common, **subscribed)
        for name in ("a", "b"):
            self.java.do(
                "orderly.start", consumer=f"{ordered}-{name}", group=ordered, topic=ordered,
                work_ms=3, **common,
            )  # fmt: skip

    def send_delayed(self, until: float) -> None:
        """Send one after the other."""
        number = 0
        while time.monotonic() < until:
            body = f"d{number}"
            may_come_ms = time.time() * 1000 + DELAY_MS
            message = {"topic": self.topic("delayed"), "body": body, "delay_level": 1}
            (line,) = self.java.do("producer.send", producer=self.name, messages=[message])
            if line.get("status") == "SEND_OK":
                self.due[body] = may_come_ms
            number += 1
            time.sleep(0.01)

    def check(self) -> None:
        """End the load; everything has come as it should."""
        ordered = self.topic("ordered")
        flood = self.java.do("flood.stop", flood=self.name)
        trades = self.java.do("txflood.stop", flood=self.name)
        assert flood["failures"] + trades["failures"] > 0, "no kill was felt"
        print(
            f"{self.java.version}: {len(self.due)} delayed, {len(flood['acknowledged'])} ordered, "
            f"{len(trades['decided'])} transactions, {trades['failures']} failed"
        )
        check_delayed(self.java, self.topic("delayed"), self.due)
        await_all(lambda: calls_of(self.java, ordered), flood["acknowledged"], within_s=90)
        check_trades(self.java, self.topic("traded"), trades["decided"])
        assert self.java.do("txflood.stop", flood=self.name)["questions"] > 0
        calls = calls_of(self.java, ordered)
        assert_in_order(calls)
        if not clusters.APACHE:  # which forgets with its life who consumes which queue
            assert_one_at_a_time(calls)

    def stop(self) -> None:
        self.java.do("producer.stop", producer=self.name)
        self.java.do("txflood.end", flood=self.name)
        for kind in ("delayed", "traded"):
            self.java.do("push.stop", consumer=self.topic(kind))
        for name in ("a", "b"):
            self.java.do("orderly.stop", consumer=f"{self.topic('ordered')}-{name}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variants", CHOSEN, ids="+".join)
def test_every_kind_of_message_outlives_the_broker(
    tmp_path: Path, sessions: Sessions, fresh: str, variants: tuple[str, str]
) -> None:
    with clusters.running(tmp_path, **CONF) as cluster, ThreadPoolExecutor() as pool:
        names = {name: f"{fresh}-{name.replace('.', '_')}" for name in variants}
        loads = [Load(sessions(name), cluster.namesrv, names[name]) for name in variants]
        for load in loads:
            load.start()
        stop = time.monotonic() + (KILLS + 1) * LIFE_S
        with dying(cluster.server):
            list(pool.map(lambda load: load.send_delayed(stop), loads))
        for result in [pool.submit(load.check) for load in loads]:
            result.result()
        for load in loads:
            load.stop()


def check_delayed(client: JavaSession, consumer: str, due: dict[str, float]) -> None:
    """All came, none early, and each once more after it had failed."""

    def all_came_twice() -> bool:
        rows = client.do("push.received", consumer=consumer)
        again = {row[BODY] for row in rows if row[TIMES] == 1}
        return due.keys() <= again

    assert eventually(all_came_twice, within_s=90), "delayed or retried messages are lost"
    rows = client.do("push.received", consumer=consumer)
    firsts: dict[str, list[Any]] = {}
    for row in rows:
        if row[TIMES] == 0:
            firsts.setdefault(row[BODY], []).append(place(row))
            if row[BODY] in due:  # of others nobody knows when they were sent
                assert row[STORED_MS] >= due[row[BODY]] - 1, "early"
    for row in rows:
        # A client that can't hand a message back tries the same record again by itself.
        if row[TIMES] == 1 and place(row) not in firsts[row[BODY]]:
            delivered_ms = min(stored_ms for stored_ms, _, _ in firsts[row[BODY]])
            assert row[STORED_MS] >= delivered_ms + RETRY_MS - 1, "retried early"


def place(row: Any) -> tuple[int, int, int]:
    """Which record a consumer got."""
    return row[STORED_MS], row[QUEUE], row[OFFSET]


def check_trades(client: JavaSession, consumer: str, decided: dict[str, bool]) -> None:
    """Exactly the committed ones came."""
    wanted = {body for body, committed in decided.items() if committed}

    def bodies() -> set[str]:
        return {row[BODY] for row in client.do("push.received", consumer=consumer)}

    eventually(lambda: wanted <= bodies(), within_s=90)
    time.sleep(3)  # for what should never come
    seen = bodies()
    assert not wanted - seen, "committed messages are lost"
    assert not seen - wanted, "what was rolled back was seen"
    assert Counter(decided.values())[False] > 0
