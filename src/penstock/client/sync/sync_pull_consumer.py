"""`PullConsumer`, the synchronous pull consumer."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from penstock.client.client_options import same_arguments_as
from penstock.client.messages import MessageQueue
from penstock.client.pull.async_pull_consumer import AsyncPullConsumer
from penstock.client.sync.sync_client import SyncClient, blocking, in_loop

_Filter = tuple[str, str | None]  # tags, sql


class PullConsumer(SyncClient[AsyncPullConsumer]):
    """Polls messages of queues that are assigned to it, or that its group shares.

    The options are described at `PullConsumerOptions`. A child process can use an inherited
    consumer: it becomes another member of the group, with the same topics and queues, and continues
    at the committed offsets.
    """

    @same_arguments_as(AsyncPullConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._topics: dict[str, _Filter] = {}
        self._assigned: tuple[tuple[MessageQueue, ...], _Filter] | None = None
        self._make_consumer = partial(AsyncPullConsumer, *args, **kwargs)
        super().__init__(self._make_subscribed)

    def _make_subscribed(self) -> AsyncPullConsumer:
        consumer = self._make_consumer()
        for topic, (tags, sql) in self._topics.items():
            consumer.subscribe(topic, tags, sql=sql)
        if self._assigned is not None:
            queues, (tags, sql) = self._assigned
            consumer.assign(queues, tags, sql=sql)
        return consumer

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Poll a topic whose queues the members of the group share: all, some tags, or by SQL92."""
        client = self._current()
        self._call_in_loop(lambda: client.subscribe(topic, tags, sql=sql))
        self._topics[topic] = (tags, sql)

    def unsubscribe(self, topic: str) -> None:
        """Stop polling a topic."""
        client = self._current()
        self._call_in_loop(lambda: client.unsubscribe(topic))
        self._topics.pop(topic, None)

    def assign(
        self, queues: Iterable[MessageQueue], tags: str = "*", *, sql: str | None = None
    ) -> None:
        """Poll exactly these queues, without sharing them; replaces the previous assignment."""
        client, wanted = self._current(), tuple(queues)
        self._call_in_loop(lambda: client.assign(wanted, tags, sql=sql))
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
