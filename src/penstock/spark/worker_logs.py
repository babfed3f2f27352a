"""Logs our warnings in Spark's Python workers to their stderr, which Spark copies into its log.

A library is silent where the application has not configured logging. A worker has no application,
so warnings (lost messages, unavailable brokers) would never be seen there.
"""

import logging
import sys
from contextlib import suppress
from typing import Final

PACKAGE: Final = "penstock"


class WorkerLog(logging.Handler):
    """Writes to stderr unless the root logger has handlers.

    Spark adds one where it collects logs itself (`spark.sql.pyspark.worker.logging.enabled`).
    """

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
    """Log the warnings of our code in this process, a Python worker of Spark's."""
    logger = logging.getLogger(PACKAGE)
    if not any(isinstance(handler, WorkerLog) for handler in logger.handlers):
        logger.addHandler(WorkerLog())
