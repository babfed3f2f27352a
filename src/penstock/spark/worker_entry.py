"""What runs first where Spark calls our code: it makes warnings visible.

Spark shows only the traceback of an error (which ends with the hint), and no warnings at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.spark.worker_logs import show_warnings


@contextmanager
def in_worker() -> Iterator[None]:
    """Log our warnings in a Python worker of Spark."""
    show_warnings()
    yield
