"""Process queues: the messages of one queue that were pulled and are not handled yet.

Messages are added in the order of their offsets and finished in any order. The progress is the
smallest offset that is not finished, or the next offset to pull if all are: everything before it is
handled, sent back or filtered out. A dropped process queue accepts and reports nothing more.

Cost: each message is added and removed once. Finished messages are released at once, even behind
one that is not finished: the limits are for the memory in use.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.client.consumer.unfinished_messages import UnfinishedMessages
from penstock.client.messages import MessageQueue
from penstock.client.received_message import HANDLING, ReceivedMessage
from penstock.errors import BadSetting

MESSAGES_MAX = 1_000
BYTES_MAX = 100 * 1024 * 1024
SPAN_MAX = 2_000


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Flow control: pulling a queue pauses while one of these is reached."""

    messages_max: int = MESSAGES_MAX
    bytes_max: int = BYTES_MAX
    span_max: int = SPAN_MAX

    def __post_init__(self) -> None:
        for name in ("messages_max", "bytes_max", "span_max"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}", hint="give 1 or more")


def queue_text(queue: MessageQueue) -> str:
    """A queue for log lines: `topic/broker/queue id`."""
    return f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"


class ProcessQueue(UnfinishedMessages):
    """One queue that is assigned to this consumer."""

    def __init__(
        self, queue: MessageQueue, offset: int, limits: FlowLimits, *, ordered: bool = False
    ) -> None:
        UnfinishedMessages.__init__(self, offset)
        self.queue = queue
        self.end_offset = -1  # the broker's max offset, from its last response; -1: none yet
        self.last_pull_ms = 0  # time of day of the last pull
        self.pull_failure: str | None = None  # why the last pull has failed
        self.paused = False  # by the application
        self.failed = 0
        self.last_failure: str | None = None  # the last failure of a handler, in one line
        self.throttled = 0  # pauses of pulling by flow control
        self._limits = limits
        self._span_max = 2**62 if ordered else limits.span_max
        self._ordered: deque[ReceivedMessage] | None = deque() if ordered else None  # not taken

    # --- messages

    def add(self, messages: list[ReceivedMessage], next_offset: int) -> None:
        """Add the messages of a pull; `next_offset` is where the next pull continues."""
        if self.dropped:
            return
        self.add_messages(messages, next_offset)
        if self._ordered is not None:
            self._ordered += messages

    def take(self, count_max: int) -> list[ReceivedMessage]:
        """The next messages of an ordered queue; they are not finished yet."""
        ordered = self._ordered
        assert ordered is not None
        taken: list[ReceivedMessage] = []
        while ordered and len(taken) < count_max:
            message = ordered.popleft()
            message.state = HANDLING
            taken.append(message)
        return taken

    def finish(self, messages: Iterable[ReceivedMessage]) -> int:
        """Finish messages; returns the progress."""
        for message in messages:
            self.finish_one(message)
        return self.progress

    @property
    def progress(self) -> int:
        """The offset to commit: every message before it is finished."""
        return next(iter(self.messages)).queue_offset if self.messages else self.next_offset

    @property
    def oldest(self) -> ReceivedMessage | None:
        """The message with the smallest offset that is not finished."""
        return next(iter(self.messages), None)

    def handling_since_before(self, ms: int) -> list[ReceivedMessage]:
        """Messages whose handler was called before this time (monotonic) and has not returned."""
        return [m for m in self.messages if m.state == HANDLING and m.handling_since_ms < ms]

    # --- flow control

    @property
    def full(self) -> str | None:
        """The limit that pauses pulling, as text; None if there is none."""
        limits = self._limits
        if self.count >= limits.messages_max:
            return f"{self.count} messages are not handled, the limit is {limits.messages_max}"
        if self.bytes >= limits.bytes_max:
            return f"{self.bytes} bytes are not handled, the limit is {limits.bytes_max}"
        progress = self.progress
        if self.next_offset - progress >= self._span_max:
            return (
                f"the offsets {progress} to {self.next_offset} are not handled,"
                f" the limit is {self._span_max} offsets"
            )
        return None

    async def wait_for_pull(self) -> None:
        """Return when pulling may continue, or the queue is dropped."""
        while not self.dropped and (self.paused or self.full is not None):
            self.pull_waiter = asyncio.get_running_loop().create_future()
            await self.pull_waiter

    def pause(self) -> None:
        """Stop pulling; messages that were pulled are still handled."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.resume_pull()

    def drop(self) -> None:
        """The queue is no longer assigned to this consumer."""
        self.dropped = True
        if self._ordered:
            self._ordered.clear()
        self.resume_pull()

    def resume_pull(self) -> None:
        waiter = self.pull_waiter
        if waiter is None or not (self.dropped or (not self.paused and self.full is None)):
            return
        self.pull_waiter = None
        if not waiter.done():
            waiter.set_result(None)


def process_queue_of(message: ReceivedMessage) -> ProcessQueue:
    """The process queue of a message of a push consumer."""
    process_queue = message.process_queue
    assert isinstance(process_queue, ProcessQueue)
    return process_queue
