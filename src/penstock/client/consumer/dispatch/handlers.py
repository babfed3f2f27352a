"""The application's handlers: which one a message goes to, and what its result means."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from penstock.client.consumer.subscription import split_tags
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter

Function = Callable[..., object]
"""Takes a message, or a list of messages where `handle_batch` is more than 1; may be async."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A handler's result: let the message come again later.

    `delay_level` is one of RocketMQ's 1 to 18; 0 leaves it to the broker (10 s, 30 s, 1 min…), less
    than 0 sends the message to the dead letter topic.
    """

    delay_level: int = 0


@dataclass(frozen=True, slots=True)
class Handler:
    """One function and the messages it is for."""

    function: Function
    topic: str
    tags: frozenset[str] | None
    is_async: bool
    takes_list: bool

    def argument(self, messages: list[ReceivedMessage]) -> object:
        return messages if self.takes_list else messages[0]


class Handlers:
    """All handlers of a consumer, by topic (as the application knows it)."""

    def __init__(self, *, takes_list: bool = False) -> None:
        self._takes_list = takes_list
        self._by_topic: dict[str, list[Handler]] = {}
        self._kinds: set[bool] = set()

    def add(self, topic: str, tags: str | None, function: Function) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidParameter(
                f"the handler of {topic} is a generator: to call it does nothing",
                hint="a handler must not yield",
            )
        handler = Handler(function, topic, split_tags(tags), _is_async(function), self._takes_list)
        self._by_topic.setdefault(topic, []).append(handler)
        self._kinds.add(handler.is_async)

    def __bool__(self) -> bool:
        return bool(self._by_topic)

    def any(self, *, is_async: bool) -> bool:
        """Whether there is a handler of this kind."""
        return is_async in self._kinds

    def find(self, message: ReceivedMessage) -> Handler | None:
        """The first handler that the message is for; where no tag fits, the topic's first one."""
        found = self._by_topic.get(message.topic)
        if not found:
            return None
        if len(found) > 1:
            tags = message.tags
            for handler in found:
                if handler.tags is None or tags in handler.tags:
                    return handler
        return found[0]


def verdict(result: object) -> Retry | None:
    """What a handler's result means for all its messages: None for done.

    `message.retry()` inside the handler says the same for one message; see `again`.
    """
    if result is False:
        return Retry()
    return result if isinstance(result, Retry) else None


def again(message: ReceivedMessage, result: Retry | None) -> Retry | None:
    """What is to be done with one message after its handler's result."""
    if result is None and message.again is not None:
        return Retry(message.again)
    return result


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )
