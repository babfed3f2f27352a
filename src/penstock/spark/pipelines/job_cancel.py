"""Ctrl-C and SIGTERM for pipelines that have done all when they return: their jobs are cancelled.

A streaming query is stopped by whoever follows it. Here the thread that would have to notice waits
for a job of Spark's, which may take minutes.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS: Final = 0.2


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Whoever runs it wants it to end, and a job was cancelled for that."""


@contextmanager
def stoppable(spark: "SparkSession", stop: threading.Event) -> Iterator[None]:
    """When `stop` is set, cancel the Spark jobs of this block; the one that fails of it raises
    Stopped. Other jobs of the session go on."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    context = spark.sparkContext
    tag = f"penstock-{secrets.token_hex(8)}"
    left = threading.Event()

    def watch() -> None:
        while not left.wait(POLL_SECONDS):
            if stop.is_set():  # again and again: between two jobs there is none to cancel
                context.cancelJobsWithTag(tag)

    watcher = threading.Thread(target=watch, name="penstock-stop", daemon=True)
    context.addJobTag(tag)
    watcher.start()
    try:
        yield
    except (PySparkException, Py4JError) as error:
        if stop.is_set():
            raise Stopped from error
        raise
    finally:
        left.set()
        watcher.join()
        context.removeJobTag(tag)
