"""Options of pull consumers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.client.client_options import check_at_least
from penstock.client.consumer.consumer_options import QueueConsumerOptions
from penstock.client.messages import MessageQueue

Listener: TypeAlias = Callable[[list[MessageQueue]], Awaitable[object] | object]
"""Called with the queues that were assigned or are revoked; may be async."""


@dataclass(frozen=True, kw_only=True)
class PullConsumerOptions(QueueConsumerOptions):
    """Options of `AsyncPullConsumer` and `PullConsumer`.

    With `auto_commit` the offsets of polled messages are committed every `auto_commit_ms`.
    `on_assigned` is called with queues that a rebalance has assigned, `on_revoked` with queues that
    it revokes; their offsets can still be committed there.
    """

    auto_commit: bool = True
    auto_commit_ms: int = 5_000
    on_assigned: Listener | None = None
    on_revoked: Listener | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, "auto_commit_ms", 1)
