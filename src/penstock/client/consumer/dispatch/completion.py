"""What happens to messages after their handler: they are done, or they come again later."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.handlers import Retry, again
from penstock.client.consumer.process_queue import ProcessQueue, queue_text
from penstock.client.received_message import FINISHED, WAITING, WORKING, ReceivedMessage
from penstock.clock import pause
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

AGAIN_MS = 5_000
"""When a message that no broker takes back is handled again here."""
RETURNING = 3
"""State of a message, besides those in `records`: on its way back, or soon to be handled again."""
TIMEOUT_LEVEL = 3
"""Delay level of messages whose handler did not come back."""

GiveBack = Callable[[ReceivedMessage, int], Awaitable[None]]
"""(message, delay level): hand it back to a broker; raises PenstockError."""


class Settling:
    """Settles messages of one consumer. `give_back` is None for broadcast: failures are dropped."""

    def __init__(
        self, session: Session, group: str, *, give_back: GiveBack | None, retries_max: int
    ) -> None:
        self._session = session
        self._group = group
        self._give_back = give_back
        self._retries_max = retries_max
        self.resubmit: Callable[[ReceivedMessage], None] = lambda message: None
        """Where a message goes that has to be handled here once more."""

    async def settle(self, messages: Iterable[ReceivedMessage], result: Retry | None) -> None:
        """Finish messages, or hand back those that have to come again."""
        for message in messages:
            retry = again(message, result)
            if retry is None:
                cast(ProcessQueue, message.owner).finish_one(message)
            else:
                await self.back(message, retry)

    async def back(self, message: ReceivedMessage, retry: Retry) -> None:
        """Let a message come again later. Nothing is done for a queue that is not ours any more:
        its next owner gets the message anyway."""
        work = cast(ProcessQueue, message.owner)
        if work.dropped or message.state in (FINISHED, RETURNING):
            return
        work.failed += 1
        if self._give_back is None:
            log.info("%s: %r failed: %s", self._group, message, self.next_step(message))
            work.finish_one(message)
            return
        message.state = RETURNING
        try:
            await self._give_back(message, retry.delay_level)
        except PenstockError as error:
            log.error(
                "%s: no broker takes %r back, so it is handled here again in %d s: %s",
                self._group,
                message,
                AGAIN_MS // 1000,
                error.remark(),
            )
            self._session.spawn(self._handle_again(message))
        except BaseException:
            message.state = WORKING  # it is handed back when its handler's time is over
            raise
        else:
            work.finish_one(message)

    async def _handle_again(self, message: ReceivedMessage) -> None:
        await pause(self._session.clock, AGAIN_MS)
        if not cast(ProcessQueue, message.owner).dropped and message.state != FINISHED:
            message.local_retries += 1
            message.again = None
            message.state = WAITING
            self.resubmit(message)

    def complain(self, messages: list[ReceivedMessage], error: BaseException) -> None:
        """Log a handler's exception, with what happens next."""
        first = messages[0]
        more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
        log.warning(
            "%s: the handler of %s failed on message %s%s (%s at %d): %s",
            self._group,
            first.topic,
            first.message_id,
            more,
            queue_text(first.queue),
            first.queue_offset,
            self.next_step(first),
            exc_info=error,
        )

    def next_step(self, message: ReceivedMessage) -> str:
        """What becomes of a message that failed."""
        if self._give_back is None:
            return "broadcast messages are not sent again, it is dropped"
        times = message.reconsume_times
        if 0 <= self._retries_max <= times:
            return f"it failed {times + 1} times and goes to the dead letter topic"
        limit = f" of {self._retries_max}" if self._retries_max >= 0 else ""
        return f"it comes again later, retry {times + 1}{limit}"

    async def expire(self, works: Iterable[ProcessQueue], timeout_ms: int) -> None:
        """Hand back what handlers hold for too long; what they still say of it does not count."""
        before_ms = self._session.clock.monotonic_ms() - timeout_ms
        for work in works:
            for message in work.begun_before(before_ms):
                log.warning(
                    "%s: the handler of %s has not come back from message %s for %d s: %s",
                    self._group,
                    message.topic,
                    message.message_id,
                    timeout_ms // 1000,
                    self.next_step(message),
                )
                await self.back(message, Retry(TIMEOUT_LEVEL))
