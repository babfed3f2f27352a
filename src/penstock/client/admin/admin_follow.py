"""A topic's messages as they come: one pull per queue that waits at its broker.

A broker that can't be reached is tried again; a refusal ends it. Queues that come later, because
the topic has grown or because their broker was away, begin where the others did: one followed from
the last message on begins with what was stored since.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Literal, TypeAlias

from penstock.client.admin.admin_browse import PIECE, QueueView
from penstock.client.admin.admin_core import AdminCore, moment_ms
from penstock.client.consumer.subscription import Subscription
from penstock.client.received_message import ReceivedMessage
from penstock.clock import pause
from penstock.errors import PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue

log = logging.getLogger(__name__)

WAIT_MS = 15_000
AGAIN_MS = 1_000
HELD_MAX = 256
"""Messages that wait to be taken; pulls wait, too, when there are so many."""

StartAt: TypeAlias = datetime | Literal["first", "last"]
_Held: TypeAlias = "asyncio.Queue[ReceivedMessage | PenstockError]"


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
        """What comes, for ever; raises what a broker refuses."""
        session = self._core.session
        held: _Held = asyncio.Queue(HELD_MAX)
        route = await session.route(self._wanted.topic)
        await self._view.check_filter(self._wanted)
        starts = await self._core.for_each(route.read_queues, self._try_start)
        failures = [start for start in starts if isinstance(start, PenstockError)]
        if failures and len(failures) == len(starts):
            raise failures[0]
        for queue, start in zip(route.read_queues, starts, strict=True):
            self._begin(queue, None if isinstance(start, PenstockError) else start, held)
        watch = asyncio.ensure_future(self._watch_route(held))
        try:
            while True:
                item = await held.get()
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
            return await self._view.offset_at(queue, moment_ms(self._start_at))
        if late:
            return await self._view.offset_at(queue, self._began_ms)
        return await self._view.max_offset(queue)

    async def _try_start(self, queue: MessageQueue) -> int | PenstockError:
        """Where to begin, or why its broker can't tell now; raises what it refuses for good."""
        try:
            return await self._start(queue, late=False)
        except PenstockError as error:
            if not error.retry:
                raise
            return error

    def _begin(self, queue: MessageQueue, offset: int | None, held: _Held) -> None:
        self._tasks[queue] = asyncio.ensure_future(self._follow(queue, offset, held))

    async def _follow(self, queue: MessageQueue, offset: int | None, held: _Held) -> None:
        while True:
            try:
                if offset is None:
                    offset = await self._start(queue, late=True)
                pulled = await self._view.pull(queue, offset, PIECE, self._wanted, wait_ms=WAIT_MS)
            except PenstockError as error:
                if not error.retry:
                    await held.put(error)
                    return
                log.warning("%s: tried again in %d ms", error, AGAIN_MS)
                await pause(self._core.session.clock, AGAIN_MS)
                continue
            for message in pulled.messages:
                await held.put(message)
            offset = pulled.next_offset

    async def _watch_route(self, held: _Held) -> None:
        session = self._core.session
        while True:
            await pause(session.clock, session.options.route_refresh_ms)
            try:
                route = await session.find_route(self._wanted.topic)
            except PenstockError as error:
                log.warning("the route of %s is not fresh: %s", self._wanted.topic, error)
                continue
            for queue in route.read_queues if route is not None else ():
                if queue not in self._tasks:
                    self._begin(queue, None, held)
