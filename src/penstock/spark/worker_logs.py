"""What our code logs in Spark's Python workers, on their stderr: Spark shows that as its own.

A library is silent where an application has not set up logging. In a worker there is no
application that could, so warnings (lost messages, brokers that are away) would be lost there.
"""

import logging
import sys
from contextlib import suppress
from typing import Final

PACKAGE: Final = "penstock"


class WorkerLog(logging.Handler):
    """Lines on stderr, unless somebody has set up logging: Spark does where it collects logs
    (`spark.sql.pyspark.worker.logging.enabled`), and then takes stderr as well."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(line, "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        with suppress(OSError, ValueError):  # stderr is closed
            print(self.format(record), file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Let this process, a worker of Spark's, say what our code warns of."""
    ours = logging.getLogger(PACKAGE)
    if not any(isinstance(handler, WorkerLog) for handler in ours.handlers):
        ours.addHandler(WorkerLog())
