"""The new messages of a topic: one pull per queue is suspended at its broker.

If a broker can't be reached, the pull is retried; if it refuses a request, following ends. Queues
that are added later start where the others did. If these started at the last message, a later one
starts with the messages that were stored since then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Literal, TypeAlias

from penstock.client.admin.admin_browse import PULL_COUNT, QueueView
from penstock.client.admin.admin_core import AdminCore, timestamp_ms
from penstock.client.admin.admin_values import perm_text
from penstock.client.consumer.subscription import Subscription
from penstock.client.received_message import ReceivedMessage
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue

log = logging.getLogger(__name__)

WAIT_MS = 15_000
RETRY_MS = 1_000
BUFFERED_MAX = 256
"""Messages that were pulled, but not yet returned; pulls wait while there are as many."""

StartAt: TypeAlias = datetime | Literal["first", "last"]
_Buffer: TypeAlias = "asyncio.Queue[ReceivedMessage | PenstockError]"


class Follower:
    """Follows all queues of a topic."""

    def __init__(
        self, core: AdminCore, wanted: Subscription, start_at: StartAt, group: str
    ) -> None:
        self._core = core
        self._view = QueueView(core, group)
        self._wanted = wanted
        self._start_at = start_at
        self._began_ms = core.session.clock.now_ms()
        self._tasks: dict[MessageQueue, asyncio.Task[None]] = {}

    async def messages(self) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages, without end; raises the error of a broker that refuses a request."""
        session = self._core.session
        buffer: _Buffer = asyncio.Queue(BUFFERED_MAX)
        route = await session.route(self._wanted.topic)
        await self._view.check_filter(self._wanted)
        if not route.read_queues:
            topic = session.without_namespace(self._wanted.topic)
            log.warning(
                "topic %s can't be read: its permission is %s; waiting", topic, _perm(route)
            )
        starts = await self._core.for_each(route.read_queues, self._try_start)
        failures = [start for start in starts if isinstance(start, PenstockError)]
        if failures and len(failures) == len(starts):
            raise failures[0]
        for queue, start in zip(route.read_queues, starts, strict=True):
            self._begin(queue, None if isinstance(start, PenstockError) else start, buffer)
        watch = asyncio.ensure_future(self._watch_route(buffer))
        try:
            while True:
                item = await buffer.get()
                if isinstance(item, PenstockError):
                    raise item
                yield item
        finally:
            tasks = [watch, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, queue: MessageQueue, *, late: bool) -> int:
        if self._start_at == "first":
            return await self._view.min_offset(queue)
        if self._start_at != "last":
            return await self._view.offset_at(queue, timestamp_ms(self._start_at))
        if late:
            return await self._view.offset_at(queue, self._began_ms)
        return await self._view.max_offset(queue)

    async def _try_start(self, queue: MessageQueue) -> int | PenstockError:
        """The first offset, or an error that can be retried; raises other errors."""
        try:
            return await self._start(queue, late=False)
        except PenstockError as error:
            if not error.retry:
                raise
            return error

    def _begin(self, queue: MessageQueue, offset: int | None, buffer: _Buffer) -> None:
        self._tasks[queue] = asyncio.ensure_future(self._follow(queue, offset, buffer))

    async def _follow(self, queue: MessageQueue, offset: int | None, buffer: _Buffer) -> None:
        while True:
            try:
                if offset is None:
                    offset = await self._start(queue, late=True)
                pulled = await self._view.pull(
                    queue, offset, PULL_COUNT, self._wanted, wait_ms=WAIT_MS
                )
            except PenstockError as error:
                if not error.retry:
                    await buffer.put(error)
                    return
                log.warning("%s; retrying in %d ms", error, RETRY_MS)
                await pause(self._core.session.clock, RETRY_MS)
                continue
            for message in pulled.messages:
                await buffer.put(message)
            offset = pulled.next_offset

    async def _watch_route(self, buffer: _Buffer) -> None:
        session = self._core.session
        while True:
            await pause(session.clock, session.options.route_refresh_ms)
            try:
                route = await session.find_route(self._wanted.topic)
            except PenstockError as error:
                log.warning("cannot update the route of topic %s: %s", self._wanted.topic, error)
                continue
            for queue in route.read_queues if route is not None else ():
                if queue not in self._tasks:
                    self._begin(queue, None, buffer)


def _perm(route: Route) -> str:
    """The permissions of a topic on its brokers."""
    return "/".join(sorted({perm_text(data.perm) for data in route.data.queue_datas}))
