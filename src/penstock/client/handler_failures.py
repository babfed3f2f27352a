"""Failures of the application's handlers: logged, counted, and never invisible.

The library prints nothing unless the application configures logging, with one exception: a handler
that fails. Where no log handler would get its failure, the failure is written to stderr, as
`logging` does for warnings of an application without handlers (`logging.lastResort`). Each kind of
failure (topic, class of the exception, line) is written once with its traceback, and later with its
count, at 10, 100, 1,000 … failures.
"""

import logging
from dataclasses import dataclass
from os.path import basename

from penstock.clock import Clock

KINDS_MAX = 20
"""Most kinds of failures that are kept; the oldest one is forgotten."""
TEXT_CHARS_MAX = 200
"""Longest text of an exception in a summary."""
NOT_RETURNED = "it has not returned in time"


@dataclass(slots=True)
class HandlerFailure:
    """The failures of one kind."""

    topic: str
    what: str
    count: int = 0
    last_ms: int = 0


class HandlerFailures:
    """The failures of the handlers of one client; `function` is what the application calls them."""

    def __init__(self, clock: Clock, function: str = "handler") -> None:
        self._clock = clock
        self._function = function
        self._by_kind: dict[tuple[str, str, str], HandlerFailure] = {}

    def report(self, log: logging.Logger, topic: str, text: str, error: BaseException | str) -> str:
        """Log a failure, or write it to stderr; returns what failed, in one line.

        `error` is what the handler raised, or in words what it did wrong.
        """
        what = error if isinstance(error, str) else _summary(error)
        failure = self._count(topic, what, error)
        raised = None if isinstance(error, str) else error
        log.warning("%s", text, exc_info=raised)
        if not is_logged(log):
            if failure.count == 1:
                _write(log, text, raised)
            elif _is_power_of_ten(failure.count):
                _write(log, f"{self._subject(topic)} failed {failure.count} times: {what}")
        return what

    def texts(self) -> list[str]:
        """Each kind of failure as a sentence."""
        now_ms = self._clock.monotonic_ms()
        return [
            f"{self._subject(failure.topic)} failed"
            f" {'once' if failure.count == 1 else f'{failure.count} times'},"
            f" the last time {(now_ms - failure.last_ms) // 1000} s ago: {failure.what}"
            for failure in self._by_kind.values()
        ]

    def _subject(self, topic: str) -> str:
        return f"the {self._function} of topic {topic}"

    def _count(self, topic: str, what: str, error: BaseException | str) -> HandlerFailure:
        kind = (topic, what, "")
        if not isinstance(error, str):
            kind = (topic, type(error).__name__, _place(error))
        failure = self._by_kind.pop(kind, None) or HandlerFailure(topic, what)
        self._by_kind[kind] = failure  # the newest is the last one
        if len(self._by_kind) > KINDS_MAX:
            del self._by_kind[next(iter(self._by_kind))]
        failure.what = what
        failure.count += 1
        failure.last_ms = self._clock.monotonic_ms()
        return failure


def show_error(log: logging.Logger, text: str) -> None:
    """Log an error that the application would not notice otherwise, or write it to stderr."""
    log.error("%s", text)
    if not is_logged(log):
        _write(log, text)


def is_logged(log: logging.Logger) -> bool:
    """Whether a log handler of the application gets warnings of this logger, or they are off."""
    if not log.isEnabledFor(logging.WARNING):
        return True
    logger: logging.Logger | None = log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _write(log: logging.Logger, text: str, error: BaseException | None = None) -> None:
    """Write to stderr, unless the application has switched that off (`logging.lastResort`)."""
    handler = logging.lastResort
    if handler is None:
        return
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    handler.handle(
        log.makeRecord(log.name, logging.WARNING, "", 0, "penstock: %s", (text,), exc_info)
    )


def _summary(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    if len(text) > TEXT_CHARS_MAX:
        text = text[:TEXT_CHARS_MAX] + "…"
    place = _place(error)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({place})" if place else "")


def _place(error: BaseException) -> str:
    """The line that raised an exception, as `file:line`."""
    frame = error.__traceback__
    if frame is None:
        return ""
    while frame.tb_next is not None:
        frame = frame.tb_next
    return f"{basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}"


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"
