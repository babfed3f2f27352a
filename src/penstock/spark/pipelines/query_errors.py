"""Translates exceptions of Spark to PenstockErrors, without Java stacks and with a hint.

A PenstockError that is raised in a Python worker reaches the driver as text inside a Java
exception. It is restored from this text.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock import errors
from penstock.errors import BadSetting, PenstockError, PipelineFailed
from penstock.extras import how_to_install

_PENSTOCK_ERROR: Final = re.compile(r"penstock\.errors\.(\w+): (.+)(?:\n *What to do: (.+))?")
"""The last lines of a traceback; the hint is the first note of the exception."""
_CONDITION: Final = re.compile(r"\[([A-Z_]+(?:\.[A-Z_]+)*)\] (.+?)(?: SQLSTATE: .*)?$", re.M)
_HINTS: Final = {
    "PATH_NOT_FOUND": "check the path and the permissions",
    "DATA_SOURCE_NOT_FOUND": f"on the driver's machine {how_to_install('spark')}",
    "CONCURRENT_STREAM_LOG_UPDATE": "another run uses this checkpoint; stop it first",
    "STREAMING_PYTHON_RUNNER_INITIALIZATION_FAILURE": "--debug shows the worker's output",
}

log = logging.getLogger(__name__)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise a PenstockError for each exception of Spark, which becomes its cause."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise as_penstock_error(str(error)) from error


@contextmanager
def translate_batch_errors() -> Iterator[None]:
    """Like `translate_errors`, for a function that Spark calls for each batch.

    The cause is dropped. Spark applies a recursive regular expression to the text of the error;
    with a Java stack in it, the thread of the query dies of a stack overflow, and the query does
    not report its failure.
    """
    try:
        with translate_errors():
            yield
    except PenstockError as error:
        log.debug("a batch failed", exc_info=True)
        raise error from None


def as_penstock_error(text: str) -> PenstockError:
    """The error that is described by the text of one of Spark's exceptions."""
    if found := _PENSTOCK_ERROR.findall(text):
        # The first traceback is the innermost one; the others only repeat it.
        name, message, hint = found[0]
        kind = getattr(errors, name, None)
        if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
            kind = PipelineFailed
        return _of_kind(kind, message.strip(), hint.strip() or _hint(kind))
    message_text = text.partition("JVM stacktrace:")[0].strip()
    conditions = _CONDITION.findall(message_text)
    for condition, message in reversed(conditions):  # the last one is closest to the cause
        if condition in _HINTS:
            return PipelineFailed(f"Spark: {message}", hint=_HINTS[condition])
    if conditions:
        return PipelineFailed(f"Spark: {conditions[-1][1]}")
    lines = [line for line in message_text.splitlines() if line.strip() and not _is_frame(line)]
    return PipelineFailed("Spark: " + (lines[0].strip() if lines else "no reason was given"))


def _of_kind(kind: type[PenstockError], message: str, hint: str | None) -> PenstockError:
    error = kind.__new__(kind)
    PenstockError.__init__(error, message, hint=hint)
    return error


def _hint(kind: type[PenstockError]) -> str | None:
    """A hint for errors whose class has a hint that does not apply here."""
    return "docs/spark.md lists the options" if kind is BadSetting else None


def _is_frame(line: str) -> bool:
    """Whether a line belongs to a Java stack or a Python traceback."""
    return line.lstrip().startswith(("at ", "File ", "Traceback", "..."))
