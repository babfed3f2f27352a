"""The messages of one queue that are in work, and how far that has come.

Messages come in order of their offsets and are finished in any order. Progress is the smallest
offset in work, or the next one to pull when nothing is: what lies before it is handled, sent back
or not for us. A queue that was dropped takes nothing more and tells nothing more.

Cost: each message is put in and taken out once. Finished ones are let go at once, also behind the
first that is not: the limits are for all that is kept alive here.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.client.messages import MessageQueue
from penstock.client.received_message import FINISHED, WORKING, ReceivedMessage
from penstock.errors import BadSetting

MESSAGES_MAX = 1_000
BYTES_MAX = 100 * 1024 * 1024
SPAN_MAX = 2_000


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """How much of one queue may be in work before its pulling pauses."""

    messages_max: int = MESSAGES_MAX
    bytes_max: int = BYTES_MAX
    span_max: int = SPAN_MAX

    def __post_init__(self) -> None:
        for name in ("messages_max", "bytes_max", "span_max"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}: it must be 1 at least")


def queue_text(queue: MessageQueue) -> str:
    """A queue in logs."""
    return f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"


class ProcessQueue:
    """One queue that this consumer has been given."""

    def __init__(
        self, queue: MessageQueue, offset: int, limits: FlowLimits, *, ordered: bool = False
    ) -> None:
        self.queue = queue
        self.next_offset = offset
        """What the next pull asks for."""
        self.end_offset = -1
        """The broker's end of the queue, by its last answer."""
        self.dropped = False
        self.paused = False
        self.count = 0
        self.bytes = 0
        self.received = 0
        """Messages handed out so far."""
        self.finished = 0
        self.failed = 0
        self.busy_ms = 0
        """Time that handlers have taken, in sum."""
        self.throttled = 0
        """How often pulling has waited for room."""
        self.last_pull_ms = 0
        self._limits = limits
        self._span_max = 2**62 if ordered else limits.span_max
        self._work: dict[ReceivedMessage, None] = {}  # in the order of their offsets
        self._waiting: deque[ReceivedMessage] | None = deque() if ordered else None
        self._room: asyncio.Future[None] | None = None

    # --- messages

    def add(self, messages: list[ReceivedMessage], next_offset: int) -> None:
        """Messages of a pull, and where the next one goes on."""
        if self.dropped:
            return
        self.next_offset = next_offset
        size = 0
        for message in messages:
            message.owner = self
            size += message.size
        self._work.update(dict.fromkeys(messages))
        if self._waiting is not None:
            self._waiting += messages
        self.bytes += size
        self.count += len(messages)
        self.received += len(messages)

    def take(self, count_max: int) -> list[ReceivedMessage]:
        """The next messages in order (of an ordered queue); in work until they are finished."""
        waiting = self._waiting
        assert waiting is not None
        taken: list[ReceivedMessage] = []
        while waiting and len(taken) < count_max:
            message = waiting.popleft()
            message.state = WORKING
            taken.append(message)
        return taken

    def finish(self, messages: Iterable[ReceivedMessage]) -> int:
        """They need no more work; returns the progress."""
        for message in messages:
            self.finish_one(message)
        return self.progress

    def finish_one(self, message: ReceivedMessage) -> bool:
        """One message needs no more work; False if it had been settled before."""
        if message.state == FINISHED or message.owner is not self:
            return False
        message.state = FINISHED
        self.count -= 1
        self.bytes -= message.size
        self.finished += 1
        del self._work[message]
        if self._room is not None:
            self._give_room()
        return True

    @property
    def progress(self) -> int:
        """The offset to store: everything before it is settled."""
        return next(iter(self._work)).queue_offset if self._work else self.next_offset

    @property
    def oldest(self) -> ReceivedMessage | None:
        """The message in work with the smallest offset: the one that holds up progress."""
        return next(iter(self._work), None)

    def begun_before(self, ms: int) -> list[ReceivedMessage]:
        """Messages whose handler was called before this moment and has not come back."""
        return [m for m in self._work if m.state == WORKING and m.since_ms < ms]

    # --- flow

    @property
    def full(self) -> str | None:
        """Why nothing more is pulled for now; None if there is room."""
        limits = self._limits
        if self.count >= limits.messages_max:
            return f"{self.count} messages in work, the limit is {limits.messages_max}"
        if self.bytes >= limits.bytes_max:
            return f"{self.bytes} bytes in work, the limit is {limits.bytes_max}"
        progress = self.progress
        if self.next_offset - progress >= self._span_max:
            return (
                f"offsets from {progress} to {self.next_offset} in work,"
                f" the limit is {self._span_max}"
            )
        return None

    async def room(self) -> None:
        """Return when pulling may go on, or the queue is dropped."""
        while not self.dropped and (self.paused or self.full is not None):
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def pause(self) -> None:
        """Pull nothing more; what is here is still handled."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._give_room()

    def drop(self) -> None:
        """The queue is not ours any more."""
        self.dropped = True
        if self._waiting:
            self._waiting.clear()
        self._give_room()

    def _give_room(self) -> None:
        room = self._room
        if room is None or not (self.dropped or (not self.paused and self.full is None)):
            return
        self._room = None
        if not room.done():
            room.set_result(None)
