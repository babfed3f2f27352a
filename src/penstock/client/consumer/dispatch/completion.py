"""Completion: after its handler a message is finished, or redelivered later."""

import logging
from collections.abc import Awaitable, Callable, Iterable

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.handlers import Retry, retry_for
from penstock.client.consumer.process_queue import ProcessQueue, process_queue_of, queue_text
from penstock.client.handler_failures import NOT_RETURNED, HandlerFailures
from penstock.client.received_message import FINISHED, HANDLING, WAITING, ReceivedMessage
from penstock.clock import pause
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

LOCAL_RETRY_MS = 5_000
"""After this time a message that no broker takes back is handled here again."""
SENDING_BACK = 3
"""State of a message besides those of `received_message`: it is sent back, or waits for a local
retry."""
STUCK_LEVEL = 3
"""Delay level of messages whose handler did not return in time."""

SendBackFunction = Callable[[ReceivedMessage, int], Awaitable[None]]
"""Sends a message back to a broker with a delay level; raises PenstockError."""


class Completion:
    """Completes the messages of one consumer.

    `send_back` is None for broadcast consumers: failed messages are dropped. `resubmit` dispatches
    a message that has to be handled here again.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        send_back: SendBackFunction | None,
        retries_max: int,
        resubmit: Callable[[ReceivedMessage], None],
    ) -> None:
        self._session = session
        self._group = group
        self._send_back = send_back
        self._retries_max = retries_max
        self._resubmit = resubmit
        self.failures = HandlerFailures(session.clock)

    async def complete(self, messages: Iterable[ReceivedMessage], result: Retry | None) -> None:
        """Finish messages, or send back those that have to be redelivered."""
        for message in messages:
            retry = retry_for(message, result)
            if retry is None:
                process_queue_of(message).finish_one(message)
            else:
                await self.retry_later(message, retry)

    async def retry_later(self, message: ReceivedMessage, retry: Retry) -> None:
        """Let the broker redeliver a message. Nothing is done for a dropped queue: its next owner
        gets the message anyway."""
        process_queue = process_queue_of(message)
        if process_queue.dropped or message.state in (FINISHED, SENDING_BACK):
            return
        process_queue.failed += 1
        if self._send_back is None:
            log.info(
                "%s: message %s failed: %s",
                self._group,
                message.message_id,
                self.next_step(message),
            )
            process_queue.finish_one(message)
            return
        message.state = SENDING_BACK
        try:
            await self._send_back(message, retry.delay_level)
        except PenstockError as error:
            log.error(
                "%s: no broker accepts message %s for a retry; handling it here again in %d s: %s",
                self._group,
                message.message_id,
                LOCAL_RETRY_MS // 1000,
                error.remark(),
            )
            self._session.spawn(self._retry_locally(message))
        except BaseException:
            message.state = HANDLING  # it is sent back when its handler counts as stuck
            raise
        else:
            process_queue.finish_one(message)

    async def _retry_locally(self, message: ReceivedMessage) -> None:
        await pause(self._session.clock, LOCAL_RETRY_MS)
        if not process_queue_of(message).dropped and message.state != FINISHED:
            message.local_retries += 1
            message.retry_level = None
            message.state = WAITING
            self._resubmit(message)

    def log_failure(self, messages: list[ReceivedMessage], error: BaseException) -> None:
        """Log the exception of a handler and what happens next."""
        first = messages[0]
        more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
        place = f"{queue_text(first.queue)} at {first.queue_offset}"
        failure = self.failures.report(
            log,
            first.topic,
            f"{self._group}: the handler of topic {first.topic} failed for message"
            f" {first.message_id}{more} ({place}): {self.next_step(first)}",
            error,
        )
        if isinstance(first.process_queue, ProcessQueue):
            first.process_queue.last_failure = failure

    def next_step(self, message: ReceivedMessage) -> str:
        """What happens to a failed message, for log lines."""
        if self._send_back is None:
            return "it is dropped, broadcast messages are not redelivered"
        times = message.reconsume_times
        if 0 <= self._retries_max <= times:
            return f"it failed {times + 1} times and becomes a dead letter"
        limit = f" of {self._retries_max}" if self._retries_max >= 0 else ""
        return f"it will be redelivered, retry {times + 1}{limit}"

    async def expire_stuck(self, process_queues: Iterable[ProcessQueue], timeout_ms: int) -> None:
        """Send messages back whose handler has not returned in time; its result is ignored."""
        before_ms = self._session.clock.monotonic_ms() - timeout_ms
        for process_queue in process_queues:
            for message in process_queue.handling_since_before(before_ms):
                process_queue.last_failure = self.failures.report(
                    log,
                    message.topic,
                    f"{self._group}: the handler of topic {message.topic} has not returned from"
                    f" message {message.message_id} for {timeout_ms // 1000} s:"
                    f" {self.next_step(message)}",
                    NOT_RETURNED,
                )
                await self.retry_later(message, Retry(STUCK_LEVEL))
