"""kill -9 of a broker while every kind of message flows.

What was acknowledged arrives, at least once; nothing comes before its time; what was rolled back
never comes, nor what is not decided yet; what was seen in a queue stays where it was.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.compat import penstock
from tests.depth import rounds
from tests.faults.driver import (
    COMMIT,
    DEAD_LETTERS,
    RETRIES,
    ROLLBACK,
    Driver,
    History,
    Place,
    Received,
    Sent,
    now_ms,
)

QUEUES = 2
BATCH = 3
LEVEL_MS = 1000
ARRIVE_S = 90.0
SETTLE_S = 3.0
"""How long after the last expected message those that must never come could still come."""

SETTINGS: dict[str, Any] = {
    "messageDelayLevel": "1s 1s 2s", "transactionTimeOut": 700, "transactionCheckInterval": 700,
    "transactionCheckMax": 10_000, "flushConsumerOffsetInterval": 200,
    # Small files, so that they are rolled.
    "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 500,
    "maxHashSlotNum": 500, "maxIndexNum": 5000, "mappedFileSizeTimerLog": 52 * 500,
    "timerFlushIntervalMs": 100,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of message: how one is sent, and what its topic guarantees."""

    name: str
    send: Callable[[Driver, str, str, int], Awaitable[object]]
    in_order: bool  # whether a queue has them in sending order
    rolled_back: bool = False  # whether some of them must never be delivered


async def send_plain(driver: Driver, name: str, topic: str, queue_id: int) -> None:
    sent_ms = now_ms()
    await driver.send(name, topic, queue_id, Sent(sent_ms, sent_ms), {})


async def send_delayed(driver: Driver, name: str, topic: str, queue_id: int) -> None:
    sent_ms = now_ms()
    await driver.send(name, topic, queue_id, Sent(sent_ms, sent_ms + LEVEL_MS), {"DELAY": "1"})


async def send_timed(driver: Driver, name: str, topic: str, queue_id: int) -> None:
    delay_ms, sent_ms = driver.rng.randint(50, 3000), now_ms()
    sent = Sent(sent_ms, sent_ms + delay_ms)
    times = [{"TIMER_DELAY_MS": str(delay_ms)}, {"TIMER_DELIVER_MS": str(sent.due_ms)}]
    await driver.send(name, topic, queue_id, sent, driver.rng.choice(times))


async def send_transaction(driver: Driver, name: str, topic: str, queue_id: int) -> None:
    sent_ms = now_ms()
    sent = Sent(sent_ms, sent_ms, driver.rng.choice((COMMIT, ROLLBACK)))
    await driver.send_transaction(name, topic, queue_id, sent, {})


async def send_late_transaction(driver: Driver, name: str, topic: str, queue_id: int) -> None:
    """A transactional message that is delayed or has a delivery time after its commit."""
    sent_ms = now_ms()
    if driver.rng.random() < 0.5:
        due_ms, later = sent_ms + LEVEL_MS, {"DELAY": "1"}
    else:
        due_ms = sent_ms + driver.rng.randint(500, 3000)
        later = {"TIMER_DELIVER_MS": str(due_ms)}
    sent = Sent(sent_ms, due_ms, driver.rng.choice((COMMIT, ROLLBACK)))
    await driver.send_transaction(name, topic, queue_id, sent, later)


async def send_batch(driver: Driver, name: str, topic: str, queue_id: int) -> None:
    """A batch, whose messages have successive numbers."""
    queue, _, number = name.rpartition("-")
    first = int(number) * BATCH
    names = [f"{queue}-{first + index}" for index in range(BATCH)]
    await driver.send_batch(names, topic, queue_id, now_ms())


KINDS = (
    Kind("plain", send_plain, in_order=True),
    Kind("delayed", send_delayed, in_order=True),
    Kind("timed", send_timed, in_order=False),
    Kind("retried", send_plain, in_order=True),
    Kind("dead", send_plain, in_order=True),
    Kind("batched", send_batch, in_order=True),
    Kind("transactional", send_transaction, in_order=False, rolled_back=True),
    Kind("latetransactional", send_late_transaction, in_order=False, rolled_back=True),
)


async def keep_sending(driver: Driver, kind: Kind, queue_id: int, stop: asyncio.Event) -> None:
    number = 0
    while not stop.is_set():
        await kind.send(driver, f"{kind.name}-{queue_id}-{number}", kind.name, queue_id)
        number += 1
        await asyncio.sleep(driver.rng.uniform(0, 0.02))


def expected(history: History, kind: Kind) -> set[str]:
    """The messages that must be delivered in the topic of a kind."""
    return {
        name for name, sent in history.sent.items()
        if name.startswith(f"{kind.name}-") and sent.acked and sent.outcome == COMMIT
    }  # fmt: skip


def missing(history: History) -> set[str]:
    lost = set()
    for kind in KINDS:
        lost |= expected(history, kind) - history.names(kind.name)
    retried, dead = history.names(RETRIES), history.names(DEAD_LETTERS)
    lost |= {f"{name} again" for name in history.sent_back if name not in retried}
    lost |= {f"{name} as a dead letter" for name in history.given_up if name not in dead}
    return lost


def check_times(history: History) -> None:
    """No message is delivered before its time, before its commit, or after a rollback."""
    for (topic, _), rows in history.got.items():
        for one in rows:
            sent = history.sent[one.name]
            due_ms = sent.due_ms
            if topic == RETRIES:
                due_ms = history.sent_back[one.name].first_ms + LEVEL_MS
                assert one.message.reconsume_times == 1
            assert one.store_ms >= due_ms, (one.name, "early by", due_ms - one.store_ms)
            assert one.got_ms >= due_ms, one.name
            assert sent.outcome == COMMIT, f"{one.name} was rolled back and came"
            if "transactional" in topic:
                assert 0 < sent.decided_ms <= one.got_ms, f"{one.name} came undecided"


def check_batches(history: History) -> None:
    """All messages of a batch were stored, one after another, or none."""
    for (topic, _), rows in history.got.items():
        if topic == "batched":
            numbers = [int(one.name.rpartition("-")[2]) for one in rows]
            for first in range(0, len(numbers), BATCH):
                batch = numbers[first : first + BATCH]
                assert batch == [batch[0] // BATCH * BATCH + index for index in range(BATCH)]


def check_order(rows: list[Received], place: Place) -> None:
    """First deliveries are in sending order; some messages are delivered again after a crash."""
    seen: dict[str, int] = {}
    for one in rows:
        seen.setdefault(one.name, int(one.name.rpartition("-")[2]))
    by_queue: dict[str, list[int]] = {}  # retries of all queues share one queue
    for name, number in seen.items():
        by_queue.setdefault(name.rpartition("-")[0], []).append(number)
    for numbers in by_queue.values():
        assert numbers == sorted(numbers), place


async def read_again(driver: Driver) -> None:
    """Every queue still has the messages that were received from it, and nothing else."""
    for (topic, queue_id), rows in driver.history.got.items():
        again: list[Received] = []
        while len(again) < len(rows):
            again += await driver.pull(topic, queue_id, len(again))
        assert [(one.name, one.store_ms) for one in again[: len(rows)]] == [
            (one.name, one.store_ms) for one in rows
        ]
        assert len(again) == len(rows), f"more came to {topic} after the end"


async def wait_for_all(driver: Driver) -> None:
    deadline = time.monotonic() + ARRIVE_S
    while missing(driver.history) and time.monotonic() < deadline:
        driver.check()
        await asyncio.sleep(0.05)
    lost = missing(driver.history)
    assert not lost, f"{len(lost)} did not come: {sorted(lost)[:20]}"


class Load:
    """Messages of every kind, which are sent and consumed until the end."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stop = asyncio.Event()
        self._senders: list[asyncio.Task[None]] = []

    def start(self) -> None:
        driver = self._driver
        for kind in KINDS:
            for queue_id in range(QUEUES):
                self.send(kind, queue_id)
                then = driver.send_back if kind.name in ("retried", "dead") else None
                driver.start(driver.consume(kind.name, queue_id, then))
        driver.start(driver.consume(RETRIES, 0, self._retried))
        driver.start(driver.consume(DEAD_LETTERS, 0, None))

    def send(self, kind: Kind, queue_id: int) -> None:
        """Send messages of a kind to a queue until the end."""
        sender = keep_sending(self._driver, kind, queue_id, self._stop)
        self._senders.append(self._driver.start(sender))

    async def _retried(self, got: Received) -> None:
        if got.name.startswith("dead-"):
            await self._driver.give_up(got)

    async def end(self) -> None:
        """Stop sending, wait until everything has come, and read it once more."""
        self._stop.set()
        await asyncio.gather(*self._senders)
        await wait_for_all(self._driver)
        await asyncio.sleep(SETTLE_S)
        self._driver.check()
        await read_again(self._driver)


async def run(broker: penstock.Broker, mode: str) -> History:
    rng, driver = random.Random(f"kinds-{mode}"), Driver(broker.address, mode)
    load = Load(driver)
    await asyncio.to_thread(broker.start)
    await driver.broker_is_up()
    load.start()
    for _ in range(rounds(ci=2, proof=20)):
        await asyncio.sleep(rng.uniform(0.2, 2.5))
        driver.broker_dies()
        await asyncio.to_thread(broker.kill)
        driver.check()
        await asyncio.to_thread(broker.start)
        await driver.broker_is_up()
    await asyncio.sleep(0.5)
    await load.end()
    await driver.close()
    return driver.history


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_every_kind_of_message_survives_kill_9(tmp_path: Path, mode: str) -> None:
    broker = penstock.Broker(
        tmp_path / "broker", tmp_path / "store", "", brokerName="mortal", flushDiskType=mode,
        **SETTINGS,
    )  # fmt: skip
    try:
        history = asyncio.run(run(broker, mode))
        broker.stop()
    finally:
        broker.kill()
    check(history, mode)


def check(history: History, title: str) -> None:
    """What is promised for each kind holds."""
    check_times(history)
    check_batches(history)
    shared = RETRIES, DEAD_LETTERS
    for place, rows in history.got.items():
        if place[0] in shared or next(k for k in KINDS if k.name == place[0]).in_order:
            check_order(rows, place)
    for kind in KINDS:
        wanted, came = expected(history, kind), history.names(kind.name)
        assert wanted
        places = [rows for (topic, _), rows in history.got.items() if topic == kind.name]
        twice = sum(map(len, places)) - len(came)
        print(
            f"{title} {kind.name}: {len(wanted)} promised, {len(came)} came, {twice} of them twice"
        )
        if kind.rolled_back:
            sent = {n: s for n, s in history.sent.items() if n.startswith(f"{kind.name}-")}
            assert any(one.outcome == ROLLBACK for one in sent.values())
    assert history.given_up, "no message became a dead letter"
    assert history.checks, "no transaction was checked"
