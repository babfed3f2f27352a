"""The identity of a write task."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskId:
    """One attempt of one task; picklable."""

    sink_id: str
    batch_id: int
    partition: int
    attempt: int
    query_id: str = ""
    """The id of the streaming query; "" in a batch write.

    A sinkId that another query has used is refused: batches of this query would be mistaken for
    batches of that one, which are published.
    """
