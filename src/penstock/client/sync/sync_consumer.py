"""`Consumer` and `PopConsumer`: the asynchronous ones for code that blocks.

with Consumer("localhost:9876", group="coupons") as consumer:
    @consumer.on("UserRegistered", tags="trial || vip")
    def grant(message): ...
    consumer.run()
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, Unpack

from penstock.client.client_options import ClientKeywords
from penstock.client.consumer.async_consumer import AsyncConsumer
from penstock.client.consumer.consumer_options import CONSUME_TIMEOUT_MS, DRAIN_MS
from penstock.client.consumer.process_queue import BYTES_MAX, MESSAGES_MAX, SPAN_MAX
from penstock.client.consumer.pull_loop import PULL_BATCH
from penstock.client.consumer.queue_assignment import Strategy
from penstock.client.consumer.rebalance import REBALANCE_MS, StartAt
from penstock.client.messages import SendReceipt
from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
from penstock.client.received_message import ReceivedMessage
from penstock.client.sync.loop_thread import blocking, in_loop
from penstock.client.sync.sync_runner import RunningFace


class Consumer(RunningFace[AsyncConsumer]):
    """Consumes topics for a group; `AsyncConsumer` tells what the options mean.

    Handlers that are plain functions run in threads. It can't be used across a fork.
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        group: str,
        model: Literal["cluster", "broadcast"] = "cluster",
        orderly: bool = False,
        start_at: StartAt = "last",
        strategy: str | Strategy = "averagely",
        concurrency: int = 20,
        handle_batch: int = 1,
        pull_batch: int = PULL_BATCH,
        messages_max: int = MESSAGES_MAX,
        bytes_max: int = BYTES_MAX,
        span_max: int = SPAN_MAX,
        rebalance_ms: int = REBALANCE_MS,
        retries_max: int | None = None,
        consume_timeout_ms: int = CONSUME_TIMEOUT_MS,
        drain_ms: int = DRAIN_MS,
        offsets_path: str | os.PathLike[str] | None = None,
        **client: Unpack[ClientKeywords],
    ) -> None:
        super().__init__(
            partial(
                AsyncConsumer,
                nameservers,
                group=group,
                model=model,
                orderly=orderly,
                start_at=start_at,
                strategy=strategy,
                concurrency=concurrency,
                handle_batch=handle_batch,
                pull_batch=pull_batch,
                messages_max=messages_max,
                bytes_max=bytes_max,
                span_max=span_max,
                rebalance_ms=rebalance_ms,
                retries_max=retries_max,
                consume_timeout_ms=consume_timeout_ms,
                drain_ms=drain_ms,
                offsets_path=offsets_path,
                **client,
            )
        )

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages one by one; a message is done when the next one is asked for.

        `message.retry()` before that lets it come again later.
        """
        self.start()
        return self._each(aiter(self._inner))

    unsubscribe = in_loop(AsyncConsumer.unsubscribe)
    pause = in_loop(AsyncConsumer.pause)
    resume = in_loop(AsyncConsumer.resume)
    queues = in_loop(AsyncConsumer.queues)
    explain = blocking(AsyncConsumer.explain)

    def reply(self, message: ReceivedMessage, body: bytes | str, **fields: Any) -> SendReceipt:
        """Answer a message that was sent as a request; `fields` are those of Message."""
        return self._run(self._open().reply, message, body, **fields)


class PopConsumer(RunningFace[AsyncPopConsumer]):
    """Receives messages that are lent to its group; see `AsyncPopConsumer`."""

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        group: str,
        fifo: bool = False,
        start_at: Literal["last", "first"] = "last",
        wait_ms: int = 15_000,
        invisible_ms: int = 60_000,
        concurrency: int = 20,
        messages_max: int = 96,
        retries_max: int = 16,
        consume_timeout_ms: int = 900_000,
        drain_ms: int = 10_000,
        **client: Unpack[ClientKeywords],
    ) -> None:
        super().__init__(
            partial(
                AsyncPopConsumer,
                nameservers,
                group=group,
                fifo=fifo,
                start_at=start_at,
                wait_ms=wait_ms,
                invisible_ms=invisible_ms,
                concurrency=concurrency,
                messages_max=messages_max,
                retries_max=retries_max,
                consume_timeout_ms=consume_timeout_ms,
                drain_ms=drain_ms,
                **client,
            )
        )

    receive = blocking(AsyncPopConsumer.receive)
    ack = blocking(AsyncPopConsumer.ack)
    extend = blocking(AsyncPopConsumer.extend)
