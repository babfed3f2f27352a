"""Handlers for popped messages: called as messages come, and the messages given back after them.

A message whose handler has come back well is acknowledged. One whose handler failed comes again
after a wait that grows (10 s, 30 s, 1 min … 2 h, or the delay level that the handler asks for);
after `retries_max` failures it becomes a dead letter. While a message is here its loan is renewed,
however long its handler takes, up to `consume_timeout_ms`.

In order (`fifo`), the messages of a queue are handled one by one; a failure holds up its queue.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import groupby

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.handler_threads import HandlerThreads, Result
from penstock.client.consumer.dispatch.handlers import Handler, Handlers, Retry, again, verdict
from penstock.client.consumer.dispatch.send_back import FIRST_LEVEL, SendBack
from penstock.client.pop.invisible_time import Loans, loan_of
from penstock.client.pop.pop_options import PopConsumerOptions
from penstock.client.pop.pop_source import PopSource, Wish
from penstock.client.pop.popped_messages import MESSAGES_MAX, Place
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within, pause
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

WAITS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's delay levels, 1 to 18."""
AGAIN_MS = 3_000
"""After so long a broker that failed to lend is asked again."""
QUICK_MS = 100
"""How long to wait after an answer that brought nothing and came at once."""
LOOK_MS = 30_000
"""How often places are looked for, beside changes of routes."""
RELEASE_MS = 1_000
"""So long what is handed back at the end stays lent: until our own waiting requests are gone."""


@dataclass(slots=True)
class _Held:
    """A message that is here."""

    place: Place
    since_ms: int
    in_thread: bool = False
    given_up: bool = False


class _Job:
    """A handler's call in a thread."""

    def __init__(self, handler: Handler, message: ReceivedMessage) -> None:
        self.context = copy_context()
        self.handler = handler
        self.message = message
        self.ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def run(self) -> object:
        return self.context.run(self.handler.function, self.message)


class PopPush:
    """The handlers of one consumer at work."""

    def __init__(
        self,
        session: Session,
        group: str,
        source: PopSource,
        loans: Loans,
        handlers: Handlers,
        options: PopConsumerOptions,
    ) -> None:
        self._session = session
        self._group = group
        self._source = source
        self._loans = loans
        self._handlers = handlers
        self._options = options
        self._send_back = SendBack(session, group, retries_max=options.retries_max)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._threads: HandlerThreads[_Job] | None = None
        self._held: dict[ReceivedMessage, _Held] = {}
        self._counts: Counter[Place] = Counter()
        self._room: dict[Place, asyncio.Event] = {}
        self._feeds: dict[Place, asyncio.Task[object]] = {}
        self._works: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Event()
        self._stopping: asyncio.Task[object] | None = None

    async def run(self) -> None:
        """Handle messages until `stop`."""
        renewing = self._session.spawn(self._keep_lent())
        try:
            while self._stopping is None:
                self._changed.clear()
                await self._look_for_places()
                try:
                    await finish_within(self._session.clock, LOOK_MS, self._changed.wait())
                except TimeoutError:
                    continue
        finally:
            await self.stop()
            renewing.cancel()

    def wake(self) -> None:
        """Routes or subscriptions have changed."""
        self._changed.set()

    async def stop(self) -> None:
        """Ask for no more, let handlers finish, and hand back what they have not begun."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
            self._changed.set()
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await _cancel(self._feeds.values())
        clock, drain_ms = self._session.clock, self._options.drain_ms
        end_ms = clock.monotonic_ms() + drain_ms
        if self._works:
            try:
                await finish_within(clock, drain_ms, asyncio.wait(self._works))
            except TimeoutError:
                log.warning("%s: handlers are still at work after %d ms", self._group, drain_ms)
        if self._threads is not None:
            await self._threads.close(clock, max(end_ms - clock.monotonic_ms(), 0))
        await _cancel(self._works)
        free = [message for message, held in self._held.items() if not held.in_thread]
        await asyncio.gather(*(self._extend(message, RELEASE_MS) for message in free))

    # --- where messages come from

    async def _look_for_places(self) -> None:
        try:
            places = set(await self._source.places())
        except PenstockError as error:
            log.warning("%s: nowhere to pop from yet: %s", self._group, error)
            return
        gone = self._feeds.keys() - places
        await _cancel([self._feeds.pop(place) for place in gone])
        for place in places - self._feeds.keys():
            self._feeds[place] = self._session.spawn(self._feed(place))

    async def _feed(self, place: Place) -> None:
        """Pop from one place as long as there is room."""
        options, clock = self._options, self._session.clock
        room = self._room.setdefault(place, asyncio.Event())
        while True:
            free = options.messages_max - self._counts[place]
            if free <= 0:
                room.clear()
                await room.wait()
                continue
            wish = Wish(min(free, MESSAGES_MAX), options.invisible_ms, options.wait_ms)
            asked_ms = clock.monotonic_ms()
            try:
                messages = await self._source.pop(place, wish)
            except PenstockError as error:
                log.warning("%s lends nothing of %s: %s", place.broker_name, place.topic, error)
                await pause(clock, AGAIN_MS)
                continue
            if messages:
                self._begin(place, messages)
            elif clock.monotonic_ms() - asked_ms < QUICK_MS:
                await pause(clock, QUICK_MS)

    def _begin(self, place: Place, messages: Sequence[ReceivedMessage]) -> None:
        now_ms = self._session.clock.monotonic_ms()
        self._counts[place] += len(messages)
        for message in messages:
            self._held[message] = _Held(place, now_ms)
        lines: Iterable[list[ReceivedMessage]] = ([message] for message in messages)
        if self._options.fifo:
            ordered = sorted(messages, key=_order)
            lines = (list(line) for _, line in groupby(ordered, key=lambda m: _order(m)[:2]))
        for line in lines:
            work = self._session.spawn(self._work_through(line))
            self._works.add(work)
            work.add_done_callback(self._works.discard)

    # --- handling

    async def _work_through(self, messages: Sequence[ReceivedMessage]) -> None:
        """Messages one after another, until one of them has to come again."""
        try:
            for number, message in enumerate(messages):
                async with self._slots:
                    if self._stopping is not None:
                        return
                    failed = await self._handle(message)
                self._forget(message)
                wait_ms = await self._settle(message, failed)
                if wait_ms:
                    later = messages[number + 1 :]
                    await asyncio.gather(*(self._extend(each, wait_ms) for each in later))
                    return
        finally:
            if self._stopping is None:  # then what is still held is handed back
                for message in messages:
                    self._forget(message)

    async def _handle(self, message: ReceivedMessage) -> Retry | None:
        """Call the handler; None if the message is done."""
        handler = self._handlers.find(message)
        if handler is None:
            log.error("%s: there is no handler for %r", self._group, message)
            return Retry()
        try:
            if handler.is_async:
                result = await _coroutine(handler, message)
            else:
                result = await self._in_thread(handler, message)
        except Exception as error:  # the application's
            log.warning(
                "%s: %r comes again, its handler failed", self._group, message, exc_info=error
            )
            return Retry()
        return again(message, verdict(result))

    async def _in_thread(self, handler: Handler, message: ReceivedMessage) -> object:
        if self._threads is None:
            self._threads = HandlerThreads(
                self._group, self._options.concurrency, run=_Job.run, done=_ended
            )
        job = _Job(handler, message)
        held = self._held[message]
        held.in_thread = True
        self._threads.submit([job])
        result = await job.ended
        held.in_thread = False
        return result

    async def _settle(self, message: ReceivedMessage, failed: Retry | None) -> int:
        """Say how it went; after how many ms it comes again, 0 if it does not."""
        times, most = message.reconsume_times, self._options.retries_max
        if failed is not None and (failed.delay_level < 0 or 0 <= most <= times):
            try:
                await self._send_back(message, -1)
                failed = None
            except PenstockError as error:
                log.warning("%s: %r is no dead letter yet: %s", self._group, message, error)
        if failed is None:
            await self._loans.ack_or_log(loan_of(message))
            return 0
        level = failed.delay_level if failed.delay_level > 0 else FIRST_LEVEL + times
        wait_ms = WAITS_S[min(level, len(WAITS_S)) - 1] * 1000
        await self._extend(message, wait_ms)
        return wait_ms

    async def _extend(self, message: ReceivedMessage, ms: int) -> None:
        """Have it lent for so long from now on; if that fails, it comes when its time is over."""
        loan = loan_of(message)
        try:
            await self._loans.extend(loan, ms)
        except PenstockError as error:
            log.warning("%s: %r stays lent as it is: %s", self._group, message, error)

    def _forget(self, message: ReceivedMessage) -> None:
        held = self._held.pop(message, None)
        if held is not None:
            self._counts[held.place] -= 1
            self._room[held.place].set()

    # --- loans

    async def _keep_lent(self) -> None:
        """Renew loans of which less than half is left."""
        options, clock = self._options, self._session.clock
        while True:
            await pause(clock, max(options.invisible_ms // 4, 1))
            now_ms = clock.monotonic_ms()
            due = [
                message
                for message, held in self._held.items()
                if self._may_renew(message, held, now_ms)
                and loan_of(message).ends_ms - now_ms <= options.invisible_ms // 2
            ]
            for at in range(0, len(due), MESSAGES_MAX):
                some = [m for m in due[at : at + MESSAGES_MAX] if m in self._held]
                await asyncio.gather(*(self._extend(m, options.invisible_ms) for m in some))

    def _may_renew(self, message: ReceivedMessage, held: _Held, now_ms: int) -> bool:
        if now_ms - held.since_ms < self._options.consume_timeout_ms:
            return True
        if not held.given_up:
            held.given_up = True
            log.error(
                "%s: %r comes again: its handler has not come back for %d ms",
                self._group,
                message,
                now_ms - held.since_ms,
            )
        return False


async def _coroutine(handler: Handler, message: ReceivedMessage) -> object:
    result: object = handler.function(message)
    return await result if asyncio.iscoroutine(result) else result


def _ended(result: Result[_Job]) -> None:
    ended = result.job.ended
    if ended.done():
        return
    if result.error is None:
        ended.set_result(result.value)
    elif isinstance(result.error, Exception):
        ended.set_exception(result.error)
    else:  # a thread's SystemExit is not the loop's
        ended.set_exception(RuntimeError(repr(result.error)))


def _order(message: ReceivedMessage) -> tuple[str, int, int]:
    return message.stored_topic, message.queue_id, message.queue_offset


async def _cancel(tasks: Iterable[asyncio.Task[object]]) -> None:
    some = list(tasks)
    for task in some:
        task.cancel()
    await asyncio.gather(*some, return_exceptions=True)
