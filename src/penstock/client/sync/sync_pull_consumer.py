"""`PullConsumer`: `AsyncPullConsumer` for code that blocks."""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, Unpack

from penstock.client.client_options import ClientKeywords
from penstock.client.consumer.process_queue import BYTES_MAX, MESSAGES_MAX
from penstock.client.consumer.pull_loop import PULL_BATCH
from penstock.client.consumer.queue_assignment import Strategy
from penstock.client.consumer.rebalance import REBALANCE_MS, StartAt
from penstock.client.messages import MessageQueue
from penstock.client.pull.async_pull_consumer import AUTO_COMMIT_MS, AsyncPullConsumer
from penstock.client.pull.pull_core import Listener
from penstock.client.sync.loop_thread import Face, blocking, in_loop

_Wish = tuple[str, str | None]  # tags, sql


class PullConsumer(Face[AsyncPullConsumer]):
    """Polls messages of queues that are assigned to it, or that its group shares out.

    `AsyncPullConsumer` tells what the options mean. A child process that inherits one goes on as
    another member of the group, with the same topics and queues, where the group's progress is.
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        group: str,
        model: Literal["cluster", "broadcast"] = "cluster",
        start_at: StartAt = "last",
        strategy: str | Strategy = "averagely",
        auto_commit: bool = True,
        auto_commit_ms: int = AUTO_COMMIT_MS,
        pull_batch: int = PULL_BATCH,
        messages_max: int = MESSAGES_MAX,
        bytes_max: int = BYTES_MAX,
        rebalance_ms: int = REBALANCE_MS,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        offsets_path: str | os.PathLike[str] | None = None,
        **client: Unpack[ClientKeywords],
    ) -> None:
        self._topics: dict[str, _Wish] = {}
        self._assigned: tuple[tuple[MessageQueue, ...], _Wish] | None = None
        self._of = partial(
            AsyncPullConsumer,
            nameservers,
            group=group,
            model=model,
            start_at=start_at,
            strategy=strategy,
            auto_commit=auto_commit,
            auto_commit_ms=auto_commit_ms,
            pull_batch=pull_batch,
            messages_max=messages_max,
            bytes_max=bytes_max,
            rebalance_ms=rebalance_ms,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            offsets_path=offsets_path,
            **client,
        )
        super().__init__(self._make_anew)

    def _make_anew(self) -> AsyncPullConsumer:
        consumer = self._of()
        for topic, (tags, sql) in self._topics.items():
            consumer.subscribe(topic, tags, sql=sql)
        if self._assigned is not None:
            queues, (tags, sql) = self._assigned
            consumer.assign(queues, tags, sql=sql)
        return consumer

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Poll a topic whose queues the members of the group share: all, some tags, or by SQL92."""
        inner = self._live()
        self._do(lambda: inner.subscribe(topic, tags, sql=sql))
        self._topics[topic] = (tags, sql)

    def unsubscribe(self, topic: str) -> None:
        """Poll a topic no more."""
        inner = self._live()
        self._do(lambda: inner.unsubscribe(topic))
        self._topics.pop(topic, None)

    def assign(
        self, queues: Iterable[MessageQueue], tags: str = "*", *, sql: str | None = None
    ) -> None:
        """Poll exactly these queues, whoever else does; replaces what was assigned before."""
        inner, wanted = self._live(), tuple(queues)
        self._do(lambda: inner.assign(wanted, tags, sql=sql))
        self._assigned = (wanted, (tags, sql))

    assignment = in_loop(AsyncPullConsumer.assignment)
    queues = blocking(AsyncPullConsumer.queues)
    pause = in_loop(AsyncPullConsumer.pause)
    resume = in_loop(AsyncPullConsumer.resume)
    poll = blocking(AsyncPullConsumer.poll)
    seek = blocking(AsyncPullConsumer.seek)
    seek_to_begin = blocking(AsyncPullConsumer.seek_to_begin)
    seek_to_end = blocking(AsyncPullConsumer.seek_to_end)
    seek_to_time = blocking(AsyncPullConsumer.seek_to_time)
    commit = blocking(AsyncPullConsumer.commit)
    committed = blocking(AsyncPullConsumer.committed)
    position = blocking(AsyncPullConsumer.position)
    begin_offset = blocking(AsyncPullConsumer.begin_offset)
    end_offset = blocking(AsyncPullConsumer.end_offset)
    offset_at = blocking(AsyncPullConsumer.offset_at)
