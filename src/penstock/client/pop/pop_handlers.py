"""Runs handlers for popped messages.

A message is acknowledged when its handler succeeds. After a failure it is redelivered with a
growing delay (10 s, 30 s, 1 min … 2 h, or the delay level that the handler asks for); after
`retries_max` redeliveries it becomes a dead letter. The invisible time of a message is extended
while its handler runs, up to `consume_timeout_ms`.

With `fifo` the messages of a queue are handled one by one, and a failure blocks its queue.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.handler_threads import HandlerThreads, Result
from penstock.client.consumer.dispatch.handlers import (
    Handler,
    Handlers,
    Retry,
    retry_for,
    retry_from_result,
)
from penstock.client.consumer.dispatch.message_runs import no_handler_error
from penstock.client.consumer.dispatch.send_back import FIRST_LEVEL, SendBack
from penstock.client.handler_failures import NOT_RETURNED, HandlerFailures
from penstock.client.pop.ack_client import PopAckClient
from penstock.client.pop.pop_options import PopConsumerOptions
from penstock.client.pop.pop_source import PopLimits, PopSource
from penstock.client.pop.popped_messages import MESSAGES_MAX, PopTarget, receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within, pause
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client.telemetry.spans import ClientSpans

log = logging.getLogger(__name__)

LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""Delays of RocketMQ's delay levels 1 to 18."""
RETRY_MS = 3_000
"""Pause after a failed pop."""
EMPTY_MS = 100
"""Pause after an empty response that came at once."""
REFRESH_MS = 30_000
"""Interval of updates of the targets, besides route changes."""
RELEASE_MS = 1_000
"""Invisible time of messages that are returned at the end: our own pops must not get them."""


@dataclass(slots=True)
class _HeldMessage:
    """A message that waits for its handler or is being handled."""

    target: PopTarget
    since_ms: int
    in_thread: bool = False
    timed_out: bool = False


class _Job:
    """A handler call in a thread."""

    def __init__(self, handler: Handler, message: ReceivedMessage) -> None:
        self.context = copy_context()
        self.handler = handler
        self.message = message
        self.ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def run(self) -> object:
        return self.context.run(self.handler.function, self.message)


class PopHandlerRunner:
    """Runs the handlers of one consumer."""

    def __init__(
        self,
        session: Session,
        group: str,
        source: PopSource,
        acks: PopAckClient,
        handlers: Handlers,
        options: PopConsumerOptions,
        failures: HandlerFailures,
        spans: "ClientSpans | None" = None,
    ) -> None:
        self._session = session
        self._group = group
        self._source = source
        self._acks = acks
        self._handlers = handlers
        self._options = options
        self._send_back = SendBack(session, group, retries_max=options.retries_max)
        self._failures = failures
        self._spans = spans
        self._slots = asyncio.Semaphore(options.concurrency)
        self._threads: HandlerThreads[_Job] | None = None
        self._held: dict[ReceivedMessage, _HeldMessage] = {}
        self._counts: Counter[PopTarget] = Counter()
        self._below_limit: dict[PopTarget, asyncio.Event] = {}
        self._pop_tasks: dict[PopTarget, asyncio.Task[object]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Event()
        self._stopping: asyncio.Task[object] | None = None

    async def run(self) -> None:
        """Handle messages until `stop`."""
        extending = self._session.spawn(self._keep_invisible())
        try:
            while self._stopping is None:
                self._changed.clear()
                await self._update_targets()
                try:
                    await finish_within(self._session.clock, REFRESH_MS, self._changed.wait())
                except TimeoutError:
                    continue
        finally:
            await self.stop()
            extending.cancel()

    def wake(self) -> None:
        """Routes or subscriptions have changed."""
        self._changed.set()

    async def stop(self) -> None:
        """Stop popping, wait for handlers, and return messages that are not handled."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
            self._changed.set()
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await _cancel(self._pop_tasks.values())
        clock, drain_ms = self._session.clock, self._options.drain_ms
        end_ms = clock.monotonic_ms() + drain_ms
        if self._tasks:
            try:
                await finish_within(clock, drain_ms, asyncio.wait(self._tasks))
            except TimeoutError:
                log.warning("%s: handlers have not returned within %d ms", self._group, drain_ms)
        if self._threads is not None:
            await self._threads.close(clock, max(end_ms - clock.monotonic_ms(), 0))
        await _cancel(self._tasks)
        free = [message for message, held in self._held.items() if not held.in_thread]
        await asyncio.gather(*(self._extend(message, RELEASE_MS) for message in free))

    # --- popping

    async def _update_targets(self) -> None:
        try:
            targets = set(await self._source.targets())
        except PenstockError as error:
            log.warning("%s: cannot find the brokers to pop from: %s", self._group, error)
            return
        gone = self._pop_tasks.keys() - targets
        await _cancel([self._pop_tasks.pop(target) for target in gone])
        for target in targets - self._pop_tasks.keys():
            self._pop_tasks[target] = self._session.spawn(self._keep_popping(target))

    async def _keep_popping(self, target: PopTarget) -> None:
        """Pop from one target while fewer than `messages_max` messages are held."""
        options, clock = self._options, self._session.clock
        below_limit = self._below_limit.setdefault(target, asyncio.Event())
        failure = ""  # of the last pop
        while True:
            free = options.messages_max - self._counts[target]
            if free <= 0:
                below_limit.clear()
                await below_limit.wait()
                continue
            request = PopLimits(min(free, MESSAGES_MAX), options.invisible_ms, options.wait_ms)
            sent_ms = clock.monotonic_ms()
            try:
                messages = await self._source.pop(target, request)
            except PenstockError as error:
                if str(error) != failure:  # repeated failures are logged once
                    failure = str(error)
                    log.warning(
                        "%s: pop of topic %s at broker %s failed, retrying: %s",
                        self._group,
                        target.topic,
                        target.broker_name,
                        error.remark(),
                    )
                await pause(clock, RETRY_MS)
                continue
            failure = ""
            if messages:
                self._start_handling(target, messages)
            elif clock.monotonic_ms() - sent_ms < EMPTY_MS:
                await pause(clock, EMPTY_MS)

    def _start_handling(self, target: PopTarget, messages: Sequence[ReceivedMessage]) -> None:
        now_ms = self._session.clock.monotonic_ms()
        self._counts[target] += len(messages)
        for message in messages:
            self._held[message] = _HeldMessage(target, now_ms)
        groups: Iterable[list[ReceivedMessage]] = ([message] for message in messages)
        if self._options.fifo:
            ordered = sorted(messages, key=_order)
            groups = (list(group) for _, group in groupby(ordered, key=lambda m: _order(m)[:2]))
        for group in groups:
            task = self._session.spawn(self._handle_in_order(group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # --- handling

    async def _handle_in_order(self, messages: Sequence[ReceivedMessage]) -> None:
        """Handle messages one after another, until one has to be redelivered."""
        try:
            for number, message in enumerate(messages):
                async with self._slots:
                    if self._stopping is not None:
                        return
                    failed = await self._handle_observed(message)
                self._forget(message)
                delay_ms = await self._complete(message, failed)
                if delay_ms:
                    later = messages[number + 1 :]
                    await asyncio.gather(*(self._extend(each, delay_ms) for each in later))
                    return
        finally:
            if self._stopping is None:  # otherwise `_stop` returns the held messages
                for message in messages:
                    self._forget(message)

    async def _handle_observed(self, message: ReceivedMessage) -> Retry | None:
        if self._spans is None:
            return await self._handle(message)
        span = self._spans.process([message])
        failed: Retry | None = Retry()
        try:
            failed = await self._handle(message, span.failed)
        finally:
            span.end(retried=failed is not None)
        return failed

    async def _handle(
        self, message: ReceivedMessage, on_error: Callable[[Exception], None] | None = None
    ) -> Retry | None:
        """Call the handler; None if the message is done. `on_error` gets what it raises."""
        handler = self._handlers.find(message)
        if handler is None:
            self._failures.report(
                log,
                message.topic,
                f"{self._group}: there is no handler for topic {message.topic}",
                no_handler_error(message),
            )
            return Retry()
        try:
            if handler.is_async:
                result = await _coroutine(handler, message)
            else:
                result = await self._in_thread(handler, message)
        except Exception as error:  # raised by the application
            if on_error is not None:
                on_error(error)
            self._failures.report(
                log,
                message.topic,
                f"{self._group}: the handler of topic {message.topic} failed for message"
                f" {message.message_id}, it will be redelivered",
                error,
            )
            return Retry()
        return retry_for(message, retry_from_result(result))

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

    async def _complete(self, message: ReceivedMessage, failed: Retry | None) -> int:
        """Acknowledge or return a message; returns the delay of its redelivery, 0 for none."""
        times, most = message.reconsume_times, self._options.retries_max
        if failed is not None and (failed.delay_level < 0 or 0 <= most <= times):
            try:
                await self._send_back(message, -1)
                failed = None
            except PenstockError as error:
                log.warning(
                    "%s: cannot make message %s a dead letter: %s",
                    self._group,
                    message.message_id,
                    error,
                )
        if failed is None:
            await self._acks.ack_or_log(receipt_of(message))
            return 0
        level = failed.delay_level if failed.delay_level > 0 else FIRST_LEVEL + times
        delay_ms = LEVELS_S[min(level, len(LEVELS_S)) - 1] * 1000
        await self._extend(message, delay_ms)
        return delay_ms

    async def _extend(self, message: ReceivedMessage, ms: int) -> None:
        """Change the invisible time; if that fails, the old one stays in effect."""
        receipt = receipt_of(message)
        try:
            await self._acks.extend(receipt, ms)
        except PenstockError as error:
            log.warning(
                "%s: cannot change the invisible time of message %s: %s",
                self._group,
                message.message_id,
                error,
            )

    def _forget(self, message: ReceivedMessage) -> None:
        held = self._held.pop(message, None)
        if held is not None:
            self._counts[held.target] -= 1
            self._below_limit[held.target].set()

    # --- invisible time

    async def _keep_invisible(self) -> None:
        """Extend the invisible time of held messages when less than half of it is left."""
        options, clock = self._options, self._session.clock
        while True:
            await pause(clock, max(options.invisible_ms // 4, 1))
            now_ms = clock.monotonic_ms()
            due = [
                message
                for message, held in self._held.items()
                if self._may_extend(message, held, now_ms)
                and receipt_of(message).visible_ms - now_ms <= options.invisible_ms // 2
            ]
            for at in range(0, len(due), MESSAGES_MAX):
                some = [m for m in due[at : at + MESSAGES_MAX] if m in self._held]
                await asyncio.gather(*(self._extend(m, options.invisible_ms) for m in some))

    def _may_extend(self, message: ReceivedMessage, held: _HeldMessage, now_ms: int) -> bool:
        if now_ms - held.since_ms < self._options.consume_timeout_ms:
            return True
        if not held.timed_out:
            held.timed_out = True
            self._failures.report(
                log,
                message.topic,
                f"{self._group}: the handler of topic {message.topic} has not returned from"
                f" message {message.message_id} for {now_ms - held.since_ms} ms, it is redelivered",
                NOT_RETURNED,
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
    else:  # SystemExit in a thread must not end the loop
        ended.set_exception(
            RuntimeError(f"the handler raised {type(result.error).__name__}: {result.error}")
        )


def _order(message: ReceivedMessage) -> tuple[str, int, int]:
    return message.stored_topic, message.queue_id, message.queue_offset


async def _cancel(tasks: Iterable[asyncio.Task[object]]) -> None:
    some = list(tasks)
    for task in some:
        task.cancel()
    await asyncio.gather(*some, return_exceptions=True)
