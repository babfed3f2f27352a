"""The messages of one queue that are not finished, with their counts; runs for every message."""

import asyncio

from penstock.client.received_message import FINISHED, ReceivedMessage

_FINISHED = FINISHED
_int = int  # hides annotations from the compiler, keeps them for mypy
_bool = bool


class UnfinishedMessages:
    """Messages in offset order, and the totals since the queue was assigned.

    `process_queue.ProcessQueue`, a subclass, has the flow control.
    """

    def __init__(self, next_offset: _int) -> None:
        self.next_offset: int = next_offset  # offset of the next pull
        self.dropped: bool = False  # no longer assigned; never reset
        self.messages: dict[ReceivedMessage, None] = {}  # not finished, in offset order
        self.count: int = 0  # their number
        self.bytes: int = 0  # their size
        # Totals since the queue was assigned.
        self.received: int = 0
        self.finished: int = 0
        self.busy_ms: int = 0  # time spent in handlers
        self.pull_waiter: asyncio.Future[None] | None = None  # pulling waits for finished messages

    def add_messages(self, messages: list[ReceivedMessage], next_offset: _int) -> None:
        """Add the messages of a pull; `next_offset` is where the next pull continues."""
        self.next_offset = next_offset
        unfinished = self.messages
        size = 0
        for message in messages:
            message.process_queue = self
            size += message.size
            unfinished[message] = None
        self.bytes += size
        self.count += len(messages)
        self.received += len(messages)

    def finish_one(self, message: ReceivedMessage) -> _bool:
        """Finish a message: it is handled or sent back. False if it was finished before."""
        if message.state == _FINISHED or message.process_queue is not self:
            return False
        message.state = _FINISHED
        self.count -= 1
        self.bytes -= message.size
        self.finished += 1
        del self.messages[message]
        if self.pull_waiter is not None:
            self.resume_pull()
        return True

    def resume_pull(self) -> None:
        """Resume pulling if flow control permits."""
        raise NotImplementedError
