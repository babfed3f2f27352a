"""Starts streaming queries, again if a Python worker was too slow.

Each source of a stream is a Python process that must connect to Spark within ten seconds. On a busy
machine, or when several start at once, it can be too late. Nothing has been read by then, so the
query is started again.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

STARTS_MAX: Final = 5
_INITIALIZING: Final = "Initializing"
"""The status message of a query begins with this until its sources are ready."""
_NO_CONNECTION: Final = "Python worker failed to connect back"
_POLL_SECONDS: Final = 0.1

log = logging.getLogger(__name__)


def start_queries(*starts: "Callable[[], StreamingQuery]") -> "list[StreamingQuery]":
    """Start all queries; if one can't be started, the others are stopped."""
    queries = []
    with ExitStack() as undo:
        for start in starts:
            query = start_query(start)
            undo.callback(query.stop)
            queries.append(query)
        undo.pop_all()
    return queries


def start_query(start: "Callable[[], StreamingQuery]") -> "StreamingQuery":
    """Start a query and wait until its sources are ready or it has ended."""
    for _ in range(STARTS_MAX - 1):
        query = start()
        if not _worker_timed_out(query):
            return query
        log.warning("the Python worker of query %s started too late; starting again", query.name)
    return start()


def _worker_timed_out(query: "StreamingQuery") -> bool:
    """Wait until the query is initialized or has ended; whether its worker was too late."""
    from pyspark.errors import StreamingQueryException

    with suppress(StreamingQueryException):
        while query.status["message"].startswith(_INITIALIZING):
            if query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                break
    error = query.exception()
    return error is not None and _NO_CONNECTION in str(error)
