"""Handlers of the application: which one gets a message, and what its result means."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from penstock.client.consumer.dispatch.message_runs import HandlerTable
from penstock.client.consumer.subscription import split_tags
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter

Function = Callable[..., object]
"""Takes a message, or a list of messages if `handle_batch` is above 1; may be async."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Result of a handler: redeliver the message later.

    `delay_level` is one of RocketMQ's levels 1 to 18; 0 leaves it to the broker (10 s, 30 s,
    1 min…); below 0 the message becomes a dead letter.
    """

    delay_level: int = 0


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler function and the messages that it handles."""

    function: Function
    topic: str
    tags: frozenset[str] | None
    is_async: bool
    takes_list: bool

    def argument(self, messages: list[ReceivedMessage]) -> object:
        return messages if self.takes_list else messages[0]


class Handlers(HandlerTable):
    """All handlers of a consumer, by topic (without namespace)."""

    def __init__(self, *, takes_list: bool = False) -> None:
        HandlerTable.__init__(self)
        self.takes_list = takes_list
        self._kinds: set[bool] = set()

    def add(self, topic: str, tags: str | None, function: Function) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidParameter(
                f"the handler of topic {topic} is a generator function",
                hint="a handler must not yield",
            )
        handler = Handler(function, topic, split_tags(tags), _is_async(function), self.takes_list)
        self.by_topic.setdefault(topic, []).append(handler)
        self._kinds.add(handler.is_async)

    def __bool__(self) -> bool:
        return bool(self.by_topic)

    def any(self, *, is_async: bool) -> bool:
        """Whether there is a handler of this kind."""
        return is_async in self._kinds


def retry_from_result(result: object) -> Retry | None:
    """The retry that a handler's result asks for, for all its messages; None: done.

    `message.retry()` in the handler does the same for one message; see `retry_for`.
    """
    if result is False:
        return Retry()
    return result if isinstance(result, Retry) else None


def retry_for(message: ReceivedMessage, result: Retry | None) -> Retry | None:
    """The retry of one message after its handler; None: done."""
    if result is None and message.retry_level is not None:
        return Retry(message.retry_level)
    return result


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )
