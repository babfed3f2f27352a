"""The next step, where Spark shows nothing of an error but its traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError


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
