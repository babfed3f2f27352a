"""Options of push consumers, and those that push and pull consumers share."""

import os
from dataclasses import dataclass
from typing import Literal

from penstock.client.client_options import ClientOptions, check_at_least, check_group
from penstock.client.consumer.process_queue import BYTES_MAX, MESSAGES_MAX, SPAN_MAX, FlowLimits
from penstock.client.consumer.pull_loop import PULL_BATCH
from penstock.client.consumer.queue_assignment import Strategy, strategy_of
from penstock.client.consumer.rebalance import REBALANCE_MS, StartAt, check_start_at
from penstock.errors import BadSetting

MODELS = ("cluster", "broadcast")
RETRIES_MAX = 16


@dataclass(frozen=True, kw_only=True)
class QueueConsumerOptions(ClientOptions):
    """Options of consumers whose queues are assigned by rebalancing.

    `start_at` is where a group without committed offsets begins. With `model="broadcast"` every
    consumer gets every message, and offsets are kept in memory or in the file `offsets_path`. Up to
    `messages_max` messages and `bytes_max` bytes of each queue are fetched ahead.
    """

    group: str
    model: Literal["cluster", "broadcast"] = "cluster"
    start_at: StartAt = "last"
    strategy: str | Strategy = "averagely"
    pull_batch: int = PULL_BATCH
    messages_max: int = MESSAGES_MAX
    bytes_max: int = BYTES_MAX
    rebalance_ms: int = REBALANCE_MS
    offsets_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        if self.model not in MODELS:
            raise BadSetting(f"model is {self.model!r}", hint='give "cluster" or "broadcast"')
        for name in ("pull_batch", "rebalance_ms"):
            check_at_least(self, name, 1)
        if self.offsets_path is not None and not self.broadcast:
            raise BadSetting(
                "offsets_path is only for broadcast consumers",
                hint="other groups store their offsets at the brokers",
            )
        check_start_at(self.start_at)
        strategy_of(self.strategy)
        self.limits()

    @property
    def broadcast(self) -> bool:
        return self.model == "broadcast"

    def limits(self) -> FlowLimits:
        """The limits of flow control; raises BadSetting."""
        return FlowLimits(self.messages_max, self.bytes_max)


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions(QueueConsumerOptions):
    """Options of `AsyncConsumer` and `Consumer`.

    `concurrency` handlers run at the same time; with `orderly` one at a time for each queue. With
    `handle_batch` above 1 a handler takes a list of messages. `retries_max` is the number of
    redeliveries before a message becomes a dead letter, -1 for no limit; by default 16, and no
    limit with `orderly`, as in RocketMQ. A handler that runs longer than `consume_timeout_ms`
    counts as stuck. `close` waits `drain_ms` for handlers.
    """

    orderly: bool = False
    concurrency: int = 20
    handle_batch: int = 1
    span_max: int = SPAN_MAX
    retries_max: int | None = None
    consume_timeout_ms: int = 15 * 60_000
    drain_ms: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("concurrency", "handle_batch", "consume_timeout_ms"):
            check_at_least(self, name, 1)
        check_at_least(self, "drain_ms", 0)

    def limits(self) -> FlowLimits:
        return FlowLimits(self.messages_max, self.bytes_max, self.span_max)

    @property
    def retries(self) -> int:
        """`retries_max`, or its default."""
        if self.retries_max is None:
            return -1 if self.orderly else RETRIES_MAX
        return self.retries_max
