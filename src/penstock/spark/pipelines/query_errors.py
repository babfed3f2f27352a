"""What Spark throws, as errors that people can read: no Java stack, and what to do next.

An error of ours that was raised in a Python worker comes back as text inside a Java exception: the
last line of a traceback in the middle of others. Here it becomes what it was.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock import errors
from penstock.errors import BadSetting, PenstockError, PipelineFailed
from penstock.spark.worker_entry import with_hints

_OURS: Final = re.compile(r"penstock\.errors\.(\w+): (.+)(?:\n *What to do: (.+))?")
"""With the note that `hints.py` leaves."""
_CONDITION: Final = re.compile(r"\[([A-Z_]+(?:\.[A-Z_]+)*)\] (.+?)(?: SQLSTATE: .*)?$", re.M)
_HINTS: Final = {
    "PATH_NOT_FOUND": "check the path, and that this user may read it",
    "DATA_SOURCE_NOT_FOUND": "install penstock[spark] where the driver runs",
    "CONCURRENT_STREAM_LOG_UPDATE": "another run uses this checkpoint: stop it first",
    "STREAMING_PYTHON_RUNNER_INITIALIZATION_FAILURE": "--debug shows what the Python worker said",
}

log = logging.getLogger(__name__)


@contextmanager
def for_people() -> Iterator[None]:
    """Raise PenstockErrors only; the cause is Spark's exception."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise as_penstock_error(str(error)) from error


@contextmanager
def in_batch() -> Iterator[None]:
    """The same inside of a function that Spark calls for each batch: what was before is cut off.

    Spark searches the whole text of such an error by a regular expression that needs a level of
    the stack for each character. With a Java stack inside the thread of the query dies of it, and
    nobody is told that the query has failed.
    """
    try:
        with with_hints(), for_people():
            yield
    except PenstockError as error:
        log.debug("a batch failed", exc_info=True)
        raise error from None


def as_penstock_error(text: str) -> PenstockError:
    """The error that the text of one of Spark's exceptions tells of."""
    if found := _OURS.findall(text):
        # The first traceback is the innermost one: others only report it.
        name, message, hint = found[0]
        kind = getattr(errors, name, None)
        if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
            kind = PipelineFailed
        return _of_kind(kind, message.strip(), hint.strip() or _hint(kind))
    told = text.partition("JVM stacktrace:")[0].strip()
    conditions = _CONDITION.findall(told)
    for condition, message in reversed(conditions):  # the last one is nearest to the cause
        if condition in _HINTS:
            return PipelineFailed(f"Spark: {message}", hint=_HINTS[condition])
    if conditions:
        return PipelineFailed(f"Spark: {conditions[-1][1]}")
    lines = [line for line in told.splitlines() if line.strip() and not _is_frame(line)]
    return PipelineFailed("Spark: " + (lines[0].strip() if lines else "no reason was given"))


def _of_kind(kind: type[PenstockError], message: str, hint: str | None) -> PenstockError:
    error = kind.__new__(kind)
    PenstockError.__init__(error, message, hint=hint)
    return error


def _hint(kind: type[PenstockError]) -> str | None:
    """What replaces the hint of a class where that one is about something else."""
    return "docs/spark.md lists the options" if kind is BadSetting else None


def _is_frame(line: str) -> bool:
    """A line of a Java stack, or of a Python traceback."""
    return line.lstrip().startswith(("at ", "File ", "Traceback", "..."))
