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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters
from .conftest import VARIANTS
from .java_session import JavaSession, eventually
from .test_java_order import assert_in_order, assert_one_at_a_time, await_all, calls_of

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.usefixtures("java")]

KILLS = rounds(ci=1, proof=6)
LIFE_S = rounds(ci=5, proof=8)
CHOSEN = list(VARIANTS)[: rounds(ci=2, proof=4)]

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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", CHOSEN)
def test_every_kind_of_message_outlives_the_broker(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str, variant: str
) -> None:
    version, binary = VARIANTS[variant]
    producing, consuming = (start_java(version, binary=binary) for _ in range(2))
    delayed, ordered, traded = (f"{fresh}-{kind}" for kind in ("delayed", "ordered", "traded"))
    with (
        clusters.name_server(tmp_path / "namesrv") as names,
        clusters.broker(tmp_path / "broker", names.address, **CONF) as broker,
    ):
        producing.do(
            "producer.start", producer="p", namesrv=names.address, timeout_ms=3000, retries=0,
            poll_namesrv_ms=1000,
        )  # fmt: skip
        for topic in (delayed, ordered, traded):
            producing.do("producer.create_topic", producer="p", topic=topic, queues=4)
        start_consumers(consuming, names.address, delayed, ordered, traded)
        assert producing.do("flood.start", producer="p", flood="f", topic=ordered, pause_ms=5) == 4
        producing.do(
            "txflood.start", flood="t", namesrv=names.address, group=traded, topic=traded,
            timeout_ms=3000, poll_namesrv_ms=1000,
        )  # fmt: skip
        stop = time.monotonic() + (KILLS + 1) * LIFE_S
        with dying(broker):
            due = send_delayed(producing, delayed, until=stop)
        flood = producing.do("flood.stop", flood="f")
        trades = producing.do("txflood.stop", flood="t")
        assert flood["failures"] + trades["failures"] > 0, "no kill was felt"
        print(
            f"{variant}: {len(due)} delayed, {len(flood['acknowledged'])} ordered, "
            f"{len(trades['decided'])} transactions, {trades['failures']} failed"
        )
        check_delayed(consuming, due)
        await_all(lambda: calls_of(consuming, ordered), flood["acknowledged"], within_s=90)
        check_trades(consuming, trades["decided"])
        questions = producing.do("txflood.stop", flood="t")["questions"]
    calls = calls_of(consuming, ordered)
    assert_in_order(calls)
    if not clusters.APACHE:  # which forgets with its life who consumes which queue
        assert_one_at_a_time(calls)
    assert questions > 0


def start_consumers(
    client: JavaSession, namesrv: str, delayed: str, ordered: str, traded: str
) -> None:
    """One whose messages fail once, two in order, and one for what is committed."""
    client.do(
        "push.start", consumer="delayed", namesrv=namesrv, group=delayed, topics={delayed: "*"},
        fail_times=1, poll_namesrv_ms=1000,
    )  # fmt: skip
    for name in ("a", "b"):
        client.do(
            "orderly.start", consumer=name, namesrv=namesrv, group=ordered, topic=ordered,
            poll_namesrv_ms=1000, work_ms=3,
        )  # fmt: skip
    client.do(
        "push.start", consumer="traded", namesrv=namesrv, group=traded, topics={traded: "*"},
        poll_namesrv_ms=1000,
    )  # fmt: skip


def send_delayed(client: JavaSession, topic: str, *, until: float) -> dict[str, float]:
    """Send one after the other; gives by body when it may come, of those that were taken."""
    due: dict[str, float] = {}
    number = 0
    while time.monotonic() < until:
        body = f"d{number}"
        may_come_ms = time.time() * 1000 + DELAY_MS
        message = {"topic": topic, "body": body, "delay_level": 1}
        (line,) = client.do("producer.send", producer="p", messages=[message])
        if line.get("status") == "SEND_OK":
            due[body] = may_come_ms
        number += 1
        time.sleep(0.01)
    return due


def check_delayed(client: JavaSession, due: dict[str, float]) -> None:
    """All came, none early, and each once more after it had failed."""

    def all_came_twice() -> bool:
        rows = client.do("push.received", consumer="delayed")
        again = {row[BODY] for row in rows if row[TIMES] == 1}
        return due.keys() <= again

    assert eventually(all_came_twice, within_s=90), "delayed or retried messages are lost"
    rows = client.do("push.received", consumer="delayed")
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


def check_trades(client: JavaSession, decided: dict[str, bool]) -> None:
    """Exactly the committed ones came."""
    wanted = {body for body, committed in decided.items() if committed}

    def bodies() -> set[str]:
        return {row[BODY] for row in client.do("push.received", consumer="traded")}

    eventually(lambda: wanted <= bodies(), within_s=90)
    time.sleep(3)  # for what should never come
    seen = bodies()
    assert not wanted - seen, "committed messages are lost"
    assert not seen - wanted, "what was rolled back was seen"
    assert Counter(decided.values())[False] > 0
