"""What waits in a store goes on under the next broker that opens it, Apache's or ours.

One store travels from broker to broker. Each of them takes messages with a delay level, for a time,
in open transactions and popped ones, and stops before they are due; the next one delivers them.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.depth import DEPTH

from . import apache, maven, penstock
from .clusters import LARGE_FILES, Cluster
from .java_session import JavaSession
from .test_java_pop import Popper, make_topic, send_numbers
from .test_java_pop import bodies as popped_bodies
from .test_java_timers import at, recall
from .test_java_timers import send_all as send_timers
from .test_java_transactions import checks, message

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(900)]

OURS = "penstock"
# Every release hands its store to us, and we hand ours to every release.
ROUTES = {
    "5.4-ours-5.5-ours": (maven.V5_4, OURS, maven.V5_5, OURS),
    "5.5-ours-5.4-ours": (maven.V5_5, OURS, maven.V5_4, OURS),
}
CHOSEN = list(ROUTES)[: None if DEPTH == "proof" else 1]

DELAY_S = {OURS: 8, "apache": 18}
"""How long messages wait that a broker leaves behind: longer than it takes to send them and to stop
its services. Those of Apache's take many seconds."""

CONF: dict[str, Any] = {
    **LARGE_FILES,
    "brokerName": "moving",
    "recallMessageEnable": True,
    "messageDelayLevel": f"1s {DELAY_S[OURS]}s {DELAY_S['apache']}s",
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
}
APACHE_CONF = {
    **CONF,
    # It notes the ends of transactions in batches, every 3 s otherwise.
    "transactionOpBatchInterval": 100,
    # It counts each round, also while a half message is immune.
    "transactionCheckMax": 1000,
}

# Places of what a push consumer tells of each message.
BODY, STORED_MS = 3, 11


@dataclass
class Pending:
    """What a broker left behind."""

    due_ms: dict[str, int]
    checked: set[str]
    in_flight: list[str]


@dataclass
class Traveller:
    """The clients that follow the store; their names and the bodies tell the stations apart."""

    java: JavaSession
    name: str
    station: int = 0

    def topic(self, kind: str) -> str:
        return f"{self.name}-{kind}"

    def leave(self, cluster: Cluster, *, delay_s: int) -> Pending:
        """Send what is due after the store has moved on; what must not be late is sent last."""
        in_flight = self._leave_popped(cluster, delay_s)
        checked = self._leave_transactions(cluster, delay_s)
        due_ms = self._leave_delayed(cluster, delay_s) | self._leave_timers(cluster, delay_s)
        return Pending(due_ms, checked, in_flight)

    def _body(self, what: str) -> str:
        return f"{self.station}: {what}"

    def _leave_delayed(self, cluster: Cluster, delay_s: int) -> dict[str, int]:
        producer = self.topic("delayed")
        self.java.do("producer.start", producer=producer, namesrv=cluster.namesrv)
        level = 2 if delay_s == DELAY_S[OURS] else 3
        due_ms = _now_ms() + delay_s * 1000
        body = self._body("delayed")
        delayed = {"topic": self.topic("delayed"), "body": body, "delay_level": level, "tags": "A"}
        (line,) = self.java.do("producer.send", producer=producer, messages=[delayed])
        assert line["status"] == "SEND_OK", line
        self.java.do("producer.stop", producer=producer)
        return {body: due_ms}

    def _leave_timers(self, cluster: Cluster, delay_s: int) -> dict[str, int]:
        topic, begin_ms = self.topic("timers"), _now_ms() + delay_s * 1000
        due_ms = {self._body(f"timer {n}"): begin_ms + n * 50 for n in range(50)}
        messages = [at(topic, body, time_ms) for body, time_ms in due_ms.items()]
        lines = dict(zip(due_ms, send_timers(self.java, cluster, messages), strict=True))
        recalled = [self._body(f"timer {n}") for n in range(0, 50, 7)]
        handles = [lines[body]["recall_handle"] for body in recalled]
        assert all("msg_id" in line for line in recall(self.java, cluster, topic, handles))
        return {body: time_ms for body, time_ms in due_ms.items() if body not in recalled}

    def _leave_transactions(self, cluster: Cluster, delay_s: int) -> set[str]:
        topic = self.topic("trades")
        self._start_trading(cluster)
        later = {"properties": {"CHECK_IMMUNITY_TIME_IN_SECONDS": str(delay_s)}}
        lines = self.java.do(
            "tx.send",
            producer=topic,
            messages=[
                message(topic, self._body("committed"), "commit"),
                message(topic, self._body("never"), "rollback"),
                message(topic, self._body("checked"), "unknown", "commit", **later),
                message(topic, self._body("checked in vain"), "unknown", "rollback", **later),
            ],
        )
        assert {line.get("status") for line in lines} == {"SEND_OK"}, lines
        self.java.do("tx.stop", producer=topic)
        return {line["transaction_id"] for line in lines[2:]}

    def _leave_popped(self, cluster: Cluster, delay_s: int) -> list[str]:
        topic = self.topic("popped")
        make_topic(self.java, cluster, topic)
        send_numbers(self.java, cluster, topic, 10, first=10 * self.station)
        popper = Popper(self.java, cluster, topic, topic)
        popped = popper.gather(10, invisible_ms=delay_s * 1000)
        assert len(popped) == 10
        popper.ack_all([one for one in popped if int(one["body"]) % 10 < 6])
        return sorted(one["body"] for one in popped if int(one["body"]) % 10 >= 6)

    def _start_trading(self, cluster: Cluster) -> None:
        topic = self.topic("trades")
        self.java.do("tx.start", producer=topic, namesrv=cluster.namesrv, group=topic)

    def meet(self, cluster: Cluster, pending: Pending) -> None:
        """All that was left behind comes, in its time, and nothing else."""
        self._meet_due(cluster, pending)
        self._meet_transactions(cluster, pending)
        popper = Popper(self.java, cluster, self.topic("popped"), self.topic("popped"))
        again = popper.gather(len(pending.in_flight), within_s=60)
        assert sorted(popped_bodies(again)) == pending.in_flight
        assert {one["times"] for one in again} == {1}
        popper.ack_all(again)
        assert popper.pop(poll_ms=1_000) == []

    def _meet_due(self, cluster: Cluster, pending: Pending) -> None:
        rows = []
        counts = Counter("delayed" if "delayed" in body else "timers" for body in pending.due_ms)
        for kind, count in counts.items():
            topic = self.topic(kind)
            subscribed = {"group": topic, "topics": {topic: "A" if kind == "delayed" else "*"}}
            self.java.do("push.start", consumer=topic, namesrv=cluster.namesrv, **subscribed)
            rows += self.java.do("push.received", consumer=topic, count=count, within_ms=90_000)
        for kind in counts:
            self.java.do("push.stop", consumer=self.topic(kind))
        assert {row[BODY] for row in rows} == pending.due_ms.keys()
        for row in rows:
            assert row[STORED_MS] >= pending.due_ms[row[BODY]], "early"

    def _meet_transactions(self, cluster: Cluster, pending: Pending) -> None:
        topic, before = self.topic("trades"), f"{self.station - 1}: "
        self._start_trading(cluster)
        # Clients of 5.x know of no broker before they send.
        hello = message(topic, f"{before}hello", "commit")
        self.java.do("tx.send", producer=topic, messages=[hello])
        asked = {check["transaction_id"] for check in checks(self.java, topic, 2)}
        assert asked == pending.checked
        self.java.do(
            "push.start", consumer=topic, namesrv=cluster.namesrv, group=topic, topics={topic: "*"}
        )
        wanted = {f"{before}{what}" for what in ("committed", "checked", "hello")}
        self.java.do("push.received", consumer=topic, count=3)
        rows = self.java.do("push.received", consumer=topic, count=4, within_ms=1_500)
        # Apache may ask, and commit, twice.
        assert {row[BODY] for row in rows} == wanted
        self.java.do("push.stop", consumer=topic)
        self.java.do("tx.stop", producer=topic)


@pytest.mark.parametrize("route", CHOSEN)
def test_what_waits_moves_with_its_store(
    java54: JavaSession, tmp_path: Path, fresh: str, route: str
) -> None:
    traveller = Traveller(java54, fresh)
    pending: Pending | None = None
    stations = ROUTES[route]
    with penstock.NameServer(tmp_path / "namesrv") as names:
        for station, kind in enumerate(stations):
            traveller.station = station
            directory = tmp_path / f"{station}-{kind}"
            broker = _broker(kind, directory, tmp_path / "store", names.address)
            with broker:
                cluster = Cluster(names.address, broker.name, broker.address)
                if pending is not None:
                    traveller.meet(cluster, pending)
                if station + 1 < len(stations):
                    delay_s = DELAY_S[OURS if kind == OURS else "apache"]
                    pending = traveller.leave(cluster, delay_s=delay_s)
                    broker.stop()


def _broker(
    kind: str, directory: Path, store: Path, namesrv: str
) -> apache.Broker | penstock.Broker:
    """Apache's broker of that release, or ours."""
    if kind == OURS:
        return penstock.Broker(directory, store, namesrv, **CONF)
    return apache.Broker(directory, store, namesrv, version=kind, **APACHE_CONF)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
