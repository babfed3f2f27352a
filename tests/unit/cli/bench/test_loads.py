"""The open and the closed loop with a producer that the test controls."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.cli.bench.bench_report import Workload
from penstock.cli.bench.loads import ClosedLoop, Requests, run_open
from penstock.cli.bench.measurement import MS_NS, Measurement
from penstock.cli.bench.schedule import SECOND_NS, Schedule, Window
from penstock.cli.bench.wake_timer import WakeTimer
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.errors import TooMuchInFlight

EVER = Window(0, 2**62)
STALL_MS = 50


def receipt(status: SendStatus = SendStatus.SEND_OK) -> SendReceipt:
    return SendReceipt(status, "id", "offset", MessageQueue("t", "b", 0), 0)


class ScriptedProducer:
    """Answers each message with the next outcome, or with the last one."""

    def __init__(self, *outcomes: Callable[[], SendReceipt]) -> None:
        self._outcomes = list(outcomes)
        self.sent: list[Message] = []
        self.waiting = 0
        self.waiting_max = 0

    def submit(self, message: Message) -> "asyncio.Future[SendReceipt]":
        self.sent.append(message)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        return asyncio.ensure_future(self._answer(outcome))

    async def send_batch(self, messages: list[Message]) -> list[SendReceipt]:
        return [await self.submit(message) for message in messages]

    async def _answer(self, outcome: Callable[[], SendReceipt]) -> SendReceipt:
        self.waiting += 1
        self.waiting_max = max(self.waiting_max, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        return outcome()


def load(producer: ScriptedProducer, *, batch: int = 1) -> Requests:
    work = Workload(
        mode="send", topic="t", rate=None, concurrency=1, size=10, batch=batch, producers=1,
        consumers=0, warmup_s=0, duration_s=1,
    )  # fmt: skip
    producers: Any = [producer]
    return Requests(producers, work, Measurement(EVER))


def test_a_stall_of_the_generator_is_part_of_the_latency() -> None:
    """The event loop is blocked during one request; the others count from their intended time."""

    def stall() -> SendReceipt:
        time.sleep(STALL_MS / 1000)
        return receipt()

    async def main() -> Measurement:
        requests = load(ScriptedProducer(receipt, stall, receipt))
        schedule = Schedule(time.monotonic_ns(), 1000, STALL_MS)
        await run_open(requests, schedule, asyncio.Event())
        await requests.drain(10)
        return requests.measured

    measured = asyncio.run(main())
    assert measured.messages == STALL_MS
    assert measured.behind.max >= (STALL_MS - 10) * MS_NS
    # In a closed loop only one message would have this latency.
    half = measured.latency.percentile(50)
    assert half is not None
    assert half >= STALL_MS // 2 * MS_NS // 2


def test_an_open_loop_stops_when_asked() -> None:
    async def main() -> int:
        stop = asyncio.Event()
        producer = ScriptedProducer(receipt)
        requests = load(producer)
        asyncio.get_running_loop().call_later(0.01, stop.set)
        await run_open(requests, Schedule(time.monotonic_ns(), 100, 1_000_000), stop)
        return len(producer.sent)

    assert 1 <= asyncio.run(main()) < 1_000


def test_a_closed_loop_keeps_its_concurrency_and_count() -> None:
    async def main() -> tuple[ScriptedProducer, Measurement]:
        producer = ScriptedProducer(receipt)
        requests = load(producer)
        await ClosedLoop(requests, 5, asyncio.Event(), count=50).run()
        return producer, requests.measured

    producer, measured = asyncio.run(main())
    assert (len(producer.sent), measured.messages, producer.waiting_max) == (50, 50, 5)


def test_errors_and_statuses_are_counted_by_kind() -> None:
    def refuse() -> SendReceipt:
        raise TooMuchInFlight("full")

    async def main() -> Measurement:
        outcomes = (refuse, lambda: receipt(SendStatus.FLUSH_DISK_TIMEOUT), receipt)
        requests = load(ScriptedProducer(*outcomes))
        await ClosedLoop(requests, 1, asyncio.Event(), count=3).run()
        return requests.measured

    measured = asyncio.run(main())
    assert dict(measured.errors) == {"TooMuchInFlight": 1}
    assert dict(measured.statuses) == {"FLUSH_DISK_TIMEOUT": 1}
    assert measured.messages == 2


def test_each_message_of_a_batch_counts() -> None:
    async def main() -> Measurement:
        requests = load(ScriptedProducer(receipt), batch=4)
        await ClosedLoop(requests, 2, asyncio.Event(), count=3).run()
        return requests.measured

    measured = asyncio.run(main())
    assert (measured.messages, measured.byte_count, measured.latency.count) == (12, 120, 12)


@pytest.mark.parametrize("delay_ns", [-SECOND_NS, 300_000])
def test_the_timer_is_never_early(delay_ns: int) -> None:
    async def main() -> int:
        timer = WakeTimer()
        wanted = time.monotonic_ns() + delay_ns
        await timer.until(wanted)
        timer.close()
        return time.monotonic_ns() - wanted

    assert asyncio.run(main()) >= 0
