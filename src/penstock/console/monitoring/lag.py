"""The lag of groups. An empty queue without an offset has no lag; other queues without one have
an unknown lag, because where a consumer would begin is its own decision."""

from collections.abc import Iterable

from penstock.client.admin.async_admin import GroupProgress, QueueProgress


def queue_lag(queue: QueueProgress) -> int | None:
    """Messages of a queue that are not consumed yet."""
    return 0 if queue.max_offset == 0 else queue.lag


def queue_lag_ms(queue: QueueProgress) -> int | None:
    """The age of the oldest of them."""
    return 0 if queue.max_offset == 0 else queue.lag_ms


def group_lag(progress: GroupProgress) -> int | None:
    """Messages that a group has not consumed yet; None if any queue's is unknown."""
    lags = _known((queue_lag(queue) for queue in progress.queues), progress)
    return None if lags is None else sum(lags)


def group_lag_ms(progress: GroupProgress) -> int | None:
    """The age of the oldest message that a group has not consumed yet."""
    ages = _known((queue_lag_ms(queue) for queue in progress.queues), progress)
    return None if ages is None else max(ages, default=0)


def _known(values: Iterable[int | None], progress: GroupProgress) -> list[int] | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return None if progress.unreachable or len(known) < len(found) else known
