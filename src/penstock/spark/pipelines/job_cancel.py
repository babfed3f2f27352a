"""Cancels Spark jobs on Ctrl-C and SIGTERM, for pipelines without streaming queries.

A streaming query can be stopped from outside. In other pipelines the main thread waits for a Spark
job, which may take minutes, so another thread cancels the job.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS: Final = 0.2


class Stopped(Exception):  # noqa: N818 - stopping is not an error
    """The pipeline was asked to stop, and its Spark job was cancelled."""


@contextmanager
def cancel_on_stop(spark: "SparkSession", stop: threading.Event) -> Iterator[None]:
    """Cancel the Spark jobs of this block when `stop` is set, and raise Stopped.

    Other jobs of the session continue.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    context = spark.sparkContext
    tag = f"penstock-{secrets.token_hex(8)}"
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_SECONDS):
            if stop.is_set():  # repeatedly: between two jobs there is none to cancel
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
        finished.set()
        watcher.join()
        context.removeJobTag(tag)
