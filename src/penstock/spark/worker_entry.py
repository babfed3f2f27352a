"""What runs first where Spark calls our code: it makes hints and warnings visible.

Spark shows only the traceback of an error, and no warnings at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.spark.worker_logs import show_warnings


@contextmanager
def with_hints() -> Iterator[None]:
    """Let the tracebacks of our errors end with their hints."""
    try:
        yield
    except PenstockError as error:
        note = f"What to do: {error.hint}"
        if error.hint and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


@contextmanager
def in_worker() -> Iterator[None]:
    """As `with_hints`, in a Python worker of Spark, which also logs our warnings."""
    show_warnings()
    with with_hints():
        yield
