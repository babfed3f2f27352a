"""The search of a pop for messages, its result and the fields of its response."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.broker.long_polling import WaitQueue
from penstock.broker.pop.pop_reader import ReadBatch
from penstock.broker.pop.pop_request import PopRequest
from penstock.wire.codes import RETRY_TOPIC_PREFIX
from penstock.wire.receipt_handle import (
    QueueKey,
    format_message_offsets,
    format_start_offsets,
    kind_of,
)


@dataclass(slots=True)
class PopResult:
    """What a pop has read so far."""

    batches: list[ReadBatch] = field(default_factory=list)
    count: int = 0
    size: int = 0
    rest: int = 0  # messages that it left in the queues
    skipped: bool = False  # moved past messages that the filter excludes


@dataclass(slots=True)
class PopSearch:
    """The search of a pop for messages. With very many queues it takes several steps."""

    request: PopRequest
    last: bool  # the polling time of the client is over
    queues: Iterator[tuple[str, int]]  # topic and id of the queues that come next
    watched: WaitQueue | None = None  # the wait queue, if all its queues were watched before
    notifications: int = 0  # of `watched`, before the search
    several_steps: bool = False
    rest: int = 0  # as in PopResult, in the steps so far
    skipped: bool = False


def has_other_retry_topic(result: PopResult, topic: str) -> bool:
    """Whether another retry topic was read already: a response can name only one."""
    return any(
        batch.topic != topic and batch.topic.startswith(RETRY_TOPIC_PREFIX)
        for batch in result.batches
    )


def response_fields(
    request: PopRequest, pop_ms: int, revive_queue_id: int, rest: int, batch: list[ReadBatch]
) -> dict[str, str]:
    """Fields of the response header."""
    starts = {QueueKey(kind_of(t.topic), t.queue.queue_id): t.start_offset for t in batch}
    offsets = {QueueKey(kind_of(t.topic), t.queue.queue_id): t.offsets for t in batch}
    return {
        "popTime": str(pop_ms),
        "invisibleTime": str(request.invisible_ms),
        "reviveQid": str(revive_queue_id),
        "restNum": str(rest),
        "startOffsetInfo": format_start_offsets(starts),
        "msgOffsetInfo": format_message_offsets(offsets),
    }


def empty_response_fields() -> dict[str, str]:
    """Fields that Java clients require in every response."""
    return {"popTime": "0", "invisibleTime": "0", "reviveQid": "0", "restNum": "0"}
