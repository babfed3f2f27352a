"""What begins where Spark calls our code: it shows nothing of an error but its traceback, and of
warnings nothing at all."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.spark.worker_logs import show_warnings


@contextmanager
def hints_shown() -> Iterator[None]:
    """Let tracebacks of our errors end with what to do about them."""
    try:
        yield
    except PenstockError as error:
        note = f"What to do: {error.hint}"
        if error.hint and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


@contextmanager
def in_worker() -> Iterator[None]:
    """The same in a Python process of Spark's, where warnings of ours are let out besides."""
    show_warnings()
    with hints_shown():
        yield
