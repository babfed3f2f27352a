"""Starting queries: each source of a stream is a Python process that has ten seconds to call back.

Several at once, or one on a busy machine, may miss that. Nothing has happened by then, so it is
tried again.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

STARTS_MAX: Final = 5
_INITIALIZING: Final = "Initializing"
"""So begins what Spark says of a query until its sources are there."""
_NOT_CALLED_BACK: Final = "Python worker failed to connect back"
_POLL_SECONDS: Final = 0.1

log = logging.getLogger(__name__)


def all_started(*starts: "Callable[[], StreamingQuery]") -> "list[StreamingQuery]":
    """All queries, or none: if one can't be started, those before it are stopped."""
    queries = []
    with ExitStack() as undo:
        for start in starts:
            query = started(start)
            undo.callback(query.stop)
            queries.append(query)
        undo.pop_all()
    return queries


def started(start: "Callable[[], StreamingQuery]") -> "StreamingQuery":
    """A query that has its sources, or has ended."""
    for _ in range(STARTS_MAX - 1):
        query = start()
        if not _is_late(query):
            return query
        log.warning("the query %s had no Python process in time; once more", query.name)
    return start()


def _is_late(query: "StreamingQuery") -> bool:
    """Whether its process was too late, which is known when it is there or the query has ended."""
    from pyspark.errors import StreamingQueryException

    with suppress(StreamingQueryException):
        while query.status["message"].startswith(_INITIALIZING):
            if query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                break
    error = query.exception()
    return error is not None and _NOT_CALLED_BACK in str(error)
