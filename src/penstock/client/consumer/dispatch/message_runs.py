"""The steps of a message in concurrent dispatch that run for every message: which handler gets it,
and how it is finished when its handler has returned."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.client.consumer.unfinished_messages import UnfinishedMessages
from penstock.client.received_message import FINISHED, HANDLING, WAITING, ReceivedMessage
from penstock.errors import ClientError

if TYPE_CHECKING:
    from penstock.client.consumer.dispatch.handlers import Function, Handler

_FINISHED = FINISHED
_HANDLING = HANDLING
_WAITING = WAITING

_int = int  # hides annotations from the compiler, keeps them for mypy
_bool = bool


class HandlerTable:
    """Handlers by topic (without namespace)."""

    def __init__(self) -> None:
        self.by_topic: dict[str, list[Handler]] = {}

    def find(self, message: ReceivedMessage) -> "Handler | None":
        """The first handler whose tags match; if none does, the first handler of the topic."""
        topic = message.source.topic
        found = self.by_topic.get(message.topic if topic is None else topic)
        if not found:
            return None
        if len(found) > 1:
            tags = message.tags
            for handler in found:
                if handler.tags is None or tags in handler.tags:
                    return handler
        return found[0]


def start(message: ReceivedMessage, handlers: HandlerTable, now_ms: _int) -> "Function | None":
    """Mark a message as being handled, and return its handler; None if it is not handled any more.

    Raises ClientError if there is no handler.
    """
    queue = unfinished_of(message)
    if queue.dropped or message.state == _FINISHED:
        return None
    message.state = _HANDLING
    message.handling_since_ms = now_ms
    handler = handlers.find(message)
    if handler is None:
        raise no_handler_error(message)
    return handler.function


def finish(message: ReceivedMessage, result: object, now_ms: _int) -> _bool:
    """Count the time of a handler that has returned, and finish its message; False if the message
    may have to be redelivered."""
    queue = unfinished_of(message)
    queue.busy_ms += now_ms - message.handling_since_ms
    if (result is None or result is True) and message.retry_level is None:
        queue.finish_one(message)
        return True
    return False


def finish_returned(jobs: "deque[Any]", now_ms: _int, complete: Callable[[Any], None]) -> None:
    """Finish the messages whose handlers have returned None in threads, and remove them from
    `jobs`; `complete` is called for lists of messages and for those that may be redelivered."""
    while jobs:
        job = jobs.popleft()
        if type(job) is not ReceivedMessage:
            complete(job)
            continue
        message = job
        if message.retry_level is not None:
            complete(job)
        elif message.state != _WAITING:  # otherwise its queue was dropped before the handler
            finish(message, None, now_ms)


def unfinished_of(message: ReceivedMessage) -> UnfinishedMessages:
    """The process queue of a message of a push consumer."""
    queue = message.process_queue
    assert isinstance(queue, UnfinishedMessages)
    return queue


def no_handler_error(message: ReceivedMessage) -> ClientError:
    """The error for a message without a handler, usually one that is redelivered."""
    return ClientError(
        f"there is no handler for topic {message.topic!r}",
        hint="its messages are redelivered until they become dead letters; add a handler",
    )
