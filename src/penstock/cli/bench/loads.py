"""Sending: requests by several producers in turn, in an open or a closed loop.

In the open loop the schedule decides when a request is sent, however many are in flight. In the
closed loop a request follows the response to another one.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.bench.bench_report import Workload
from penstock.cli.bench.measurement import Measurement
from penstock.cli.bench.schedule import Schedule
from penstock.cli.bench.stamped_body import SeenNumbers, StampedBodies
from penstock.cli.bench.wake_timer import WakeTimer
from penstock.client.messages import Message, SendReceipt
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client.producer.async_producer import AsyncProducer

BURST = 128
"""Requests without a break: responses have to be read meanwhile."""
WAKE_NS_MIN = 200_000
"""At high rates several requests are sent at each wake-up; each keeps its intended time."""
PAUSE_AFTER_ERROR_S = 0.05
"""A closed loop would otherwise repeat failing requests without a pause."""

Finished = Callable[[bool], None]


class Requests:
    """Sends requests and records their outcome."""

    def __init__(
        self,
        producers: "Sequence[AsyncProducer]",
        workload: Workload,
        measured: Measurement,
        bodies: StampedBodies | None = None,
    ) -> None:
        self._producers = producers
        self._work = workload
        self._bodies = bodies
        self._body = os.urandom(workload.size)
        self._number = 0
        self._turn = 0
        self._tasks: set[asyncio.Future[Any]] = set()
        self.measured = measured
        self.acknowledged = SeenNumbers()
        """Numbers of stamped messages that were acknowledged."""
        self.in_flight = 0

    def start(self, begin_ns: int, finished: Finished | None = None) -> None:
        """Send one request, whose latency begins at this time."""
        work = self._work
        first = self._number
        self._number += work.batch
        messages = [
            Message(work.topic, self._body_of(begin_ns, first + n), work.tags)
            for n in range(work.batch)
        ]
        self._turn += 1
        producer = self._producers[self._turn % len(self._producers)]
        self.measured.sent(begin_ns, time.monotonic_ns())
        self.in_flight += 1
        future: asyncio.Future[Any]
        try:
            if work.batch == 1:
                future = producer.submit(messages[0])
            else:
                future = asyncio.ensure_future(producer.send_batch(messages))
                self._tasks.add(future)
        except PenstockError as error:
            self._failed(begin_ns, error, finished)
            return
        future.add_done_callback(lambda done: self._done(begin_ns, first, done, finished))

    async def drain(self, timeout_s: float) -> None:
        """Wait until all requests have their responses."""
        deadline = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _body_of(self, begin_ns: int, number: int) -> bytes:
        return self._body if self._bodies is None else self._bodies.body(begin_ns, number)

    def _done(
        self, begin_ns: int, first: int, future: "asyncio.Future[Any]", finished: Finished | None
    ) -> None:
        self._tasks.discard(future)
        if future.cancelled():
            self.in_flight -= 1
            return
        error = future.exception()
        if error is not None:
            self._failed(begin_ns, error, finished)
            return
        now_ns = time.monotonic_ns()
        self.in_flight -= 1
        found = future.result()
        receipts: Sequence[SendReceipt] = found if isinstance(found, list) else (found,)
        for receipt in receipts:
            self.measured.succeeded(
                begin_ns,
                now_ns,
                self._work.size,
                status=receipt.status.name if receipt.status else "",
            )
        if self._bodies is not None:
            for number in range(first, first + len(receipts)):
                self.acknowledged.add(number)
        if finished is not None:
            finished(True)

    def _failed(self, begin_ns: int, error: BaseException, finished: Finished | None) -> None:
        self.in_flight -= 1
        self.measured.failed(begin_ns, type(error).__name__, self._work.batch)
        if finished is not None:
            finished(False)


async def run_open(requests: Requests, schedule: Schedule, stop: asyncio.Event) -> None:
    """Send each request at its intended time, or as soon as possible after it."""
    timer = WakeTimer()
    try:
        number = 0
        while number < schedule.count and not stop.is_set():
            now_ns = time.monotonic_ns()
            last = min(number + BURST, schedule.count)
            while number < last and (intended_ns := schedule.at(number)) <= now_ns:
                requests.start(intended_ns)
                number += 1
            if number < schedule.count:
                wake_ns = schedule.at(number)
                await timer.until(wake_ns if number == last else max(wake_ns, now_ns + WAKE_NS_MIN))
    finally:
        timer.close()


class ClosedLoop:
    """Keeps a fixed number of requests in flight until a time, or until enough were sent."""

    def __init__(
        self,
        requests: Requests,
        concurrency: int,
        stop: asyncio.Event,
        *,
        end_ns: int | None = None,
        count: int | None = None,
    ) -> None:
        self._requests = requests
        self._concurrency = concurrency
        self._stop = stop
        self._end_ns = end_ns
        self._left = count
        self._active = concurrency
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Send, and return when the last response has arrived."""
        for _ in range(self._concurrency):
            self._next()
        await self._ended.wait()

    def _next(self) -> None:
        now_ns = time.monotonic_ns()
        over = self._stop.is_set() or (self._end_ns is not None and now_ns >= self._end_ns)
        if over or self._left == 0:
            self._active -= 1
            if self._active == 0:
                self._ended.set()
            return
        if self._left is not None:
            self._left -= 1
        self._requests.start(now_ns, self._finished)

    def _finished(self, success: bool) -> None:
        if success:
            self._next()
        else:
            self._loop.call_later(PAUSE_AFTER_ERROR_S, self._next)
