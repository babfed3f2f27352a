"""How a push-style consumer works."""

import os
from dataclasses import dataclass
from typing import Literal

from penstock.client.consumer.process_queue import BYTES_MAX, MESSAGES_MAX, SPAN_MAX, FlowLimits
from penstock.client.consumer.pull_loop import PULL_BATCH
from penstock.client.consumer.queue_assignment import Strategy, strategy_of
from penstock.client.consumer.rebalance import REBALANCE_MS, StartAt, check_start_at
from penstock.errors import BadSetting
from penstock.wire.codes import group_fault

MODELS = ("cluster", "broadcast")
CONSUME_TIMEOUT_MS = 15 * 60_000
DRAIN_MS = 10_000
_LEAST = {
    "concurrency": 1,
    "handle_batch": 1,
    "pull_batch": 1,
    "rebalance_ms": 1,
    "consume_timeout_ms": 1,
    "drain_ms": 0,
}
RETRIES_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Checked and complete.

    `retries_max` is how often a failed message comes again before it is a dead letter; -1 is
    without end. By default 16 times, and without end in order, as in RocketMQ.
    """

    group: str
    model: Literal["cluster", "broadcast"] = "cluster"
    orderly: bool = False
    start_at: StartAt = "last"
    strategy: str | Strategy = "averagely"
    concurrency: int = 20
    handle_batch: int = 1
    pull_batch: int = PULL_BATCH
    messages_max: int = MESSAGES_MAX
    bytes_max: int = BYTES_MAX
    span_max: int = SPAN_MAX
    rebalance_ms: int = REBALANCE_MS
    retries_max: int | None = None
    consume_timeout_ms: int = CONSUME_TIMEOUT_MS
    drain_ms: int = DRAIN_MS
    offsets_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        fault = group_fault(self.group)
        if fault is not None:
            raise BadSetting(
                f"no group can be called {self.group[:80]!r}: {fault}", hint="rename it"
            )
        if self.model not in MODELS:
            raise BadSetting(f"model is {self.model!r}", hint='"cluster" or "broadcast"')
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise BadSetting(f"{name} is {getattr(self, name)}", hint=f"{least} or more")
        if self.offsets_path is not None and not self.broadcast:
            raise BadSetting(
                "offsets_path is for broadcast consumers",
                hint="groups that share queues keep their progress with the brokers",
            )
        check_start_at(self.start_at)
        strategy_of(self.strategy)
        self.limits()

    @property
    def broadcast(self) -> bool:
        return self.model == "broadcast"

    def limits(self) -> FlowLimits:
        return FlowLimits(self.messages_max, self.bytes_max, self.span_max)

    @property
    def retries(self) -> int:
        """`retries_max`, settled."""
        if self.retries_max is None:
            return -1 if self.orderly else RETRIES_MAX
        return self.retries_max
