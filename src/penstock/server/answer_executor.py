"""Carries out what handlers answered: replies, work in the pool, held pulls, calls to clients.

And their effects: requests to clients, tables to files, registration, closed connections.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.broker.long_polling import LongPolling, SuspendedRequest
from penstock.errors import FrameError, PenstockError, SystemBusy
from penstock.rpc.answers import (
    Answer,
    CallClient,
    Effect,
    EncodedReply,
    InThread,
    NotifyClient,
    PersistentTable,
    PersistSoon,
    PersistTable,
    QueryRoute,
    RegisterSoon,
    RegisterTopics,
    Reply,
    Suspend,
    TickAt,
)
from penstock.rpc.router import refusal
from penstock.wire.codes import FLAG_ONE_WAY, ResponseCode
from penstock.wire.output import encode, response

if TYPE_CHECKING:
    from penstock.rpc.persistence import Persistence
    from penstock.server.connection import ClientConnection
    from penstock.server.server import Server
    from penstock.wire.bodies.client_bodies import TopicRouteData

log = logging.getLogger(__name__)

HOLDS_MAX = 200_000
"""Most pulls that wait at one time."""
HOLDS_PER_CLIENT_MAX = 20_000
"""Most pulls of one connection that wait: one for each queue it reads."""
RELAYS_MAX = 10_000
"""Most requests that wait for another client's answer."""
RELAYS_PER_CLIENT_MAX = 1_000
"""Most requests that wait for one client's answer: one that hangs leaves room for others."""
_DONE: Future[None] = Future()
_DONE.set_result(None)
_DEADLINES_LEAST = 1_000  # those of answered requests are cleared away beyond this


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """Who waits for an answer."""

    connection: ClientConnection
    opaque: int
    encoding: int
    oneway: bool


@dataclass(slots=True)
class _Asked:
    """A request on its way to a client."""

    pending: PendingResponse
    then: Callable[[Reply], Answer]
    on_timeout: Reply


class AnswerExecutor:
    """The hands of a server."""

    def __init__(
        self,
        server: Server,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        long_polling: LongPolling | None = None,
        persistence: Persistence | None = None,
        register: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = server
        self._submit = submit
        self._long_polling = long_polling
        self._persistence = persistence
        self.register = register
        self.tell_names: Callable[[tuple[str, ...], int], asyncio.Future[None]] | None = None
        """Tells the NameServers of topics until a deadline; without it nobody is to be told."""
        self.find_route: Callable[[str], asyncio.Future[TopicRouteData | None]] | None = None
        """Asks the NameServers for a topic's route; never fails."""
        self._asked: dict[int, dict[int, _Asked]] = {}  # by client and opaque
        self._asked_count = 0
        self._deadlines: list[tuple[int, int, int]] = []  # ms, client, opaque
        self._opaque = 0
        self._saving: dict[str, bool] = {}  # by file: whether to write it once more
        self._unsaved: dict[
            str, list[tuple[PendingResponse, PersistTable]]
        ] = {}  # who waits for the next write
        self._lines: dict[Hashable, deque[tuple[PendingResponse, InThread, Future[Any]]]] = {}
        self.pool_jobs = 0
        self.refusals: dict[str, int] = {}  # by the error's name
        if long_polling is not None:
            long_polling.on_wake(self.wake)

    # --- answers

    def carry(self, pending: PendingResponse, answer: Answer) -> None:
        """Do what an answer says."""
        if answer is None:
            return
        if isinstance(answer, Reply):
            self._reply(pending, answer)
        elif isinstance(answer, InThread):
            self._in_thread(pending, answer)
        elif isinstance(answer, Suspend):
            self._hold(pending, answer)
        elif isinstance(answer, EncodedReply):
            self._server.send_flushed(pending.connection, answer)
        elif isinstance(answer, RegisterTopics):
            self._register(pending, answer)
        elif isinstance(answer, QueryRoute):
            self._route(pending, answer)
        elif isinstance(answer, PersistTable):
            pending.connection.adjust_work(1)
            self._unsaved.setdefault(answer.table.FILE, []).append((pending, answer))
            self.save(answer.table)
        else:
            self._relay(pending, answer)

    def _reply(self, pending: PendingResponse, reply: Reply) -> None:
        if pending.oneway:
            return
        try:
            data = response(
                reply.code,
                pending.opaque,
                pending.encoding,
                ext=reply.ext,
                body=reply.body,
                remark=reply.remark,
            )
        except FrameError as error:
            remark = error.remark()
            data = response(error.code, pending.opaque, pending.encoding, remark=remark)
        pending.connection.write(data)

    def _in_thread(self, pending: PendingResponse, job: InThread) -> None:
        pending.connection.adjust_work(1)
        self.pool_jobs += 1
        try:
            future = _DONE if job.work is None else self._submit(job.work)
        except RuntimeError as error:  # the pool is closing
            self.pool_jobs -= 1
            pending.connection.adjust_work(-1)
            self._reply(pending, Reply(ResponseCode.SERVICE_NOT_AVAILABLE, remark=str(error)))
            return
        if job.ordered_by is not None:
            self._lines.setdefault(job.ordered_by, deque()).append((pending, job, future))
        if future is _DONE:
            self._thread_done(pending, job, future)
            return
        future.add_done_callback(
            lambda done: self._server.soon_from_thread(self._thread_done, pending, job, done)
        )

    def _thread_done(self, pending: PendingResponse, job: InThread, done: Future[Any]) -> None:
        if job.ordered_by is None:
            self._after_thread(pending, job, done)
            return
        line = self._lines.get(job.ordered_by)
        while line and line[0][2].done():
            self._after_thread(*line.popleft())
        if not line:
            self._lines.pop(job.ordered_by, None)

    def _after_thread(self, pending: PendingResponse, job: InThread, done: Future[Any]) -> None:
        self.pool_jobs -= 1
        pending.connection.adjust_work(-1)
        self.carry(pending, self._safely(lambda: job.then(done.result())))
        self._server.after_work()

    def _register(self, pending: PendingResponse, answer: RegisterTopics) -> None:
        if self.tell_names is None:
            self.carry(pending, self._safely(answer.then))
            return
        pending.connection.adjust_work(1)
        told = self.tell_names(answer.topics, answer.deadline_ms)
        told.add_done_callback(lambda _: self._registered(pending, answer))

    def _registered(self, pending: PendingResponse, answer: RegisterTopics) -> None:
        pending.connection.adjust_work(-1)
        self.carry(pending, self._safely(answer.then))
        self._server.after_work()

    def _route(self, pending: PendingResponse, answer: QueryRoute) -> None:
        if self.find_route is None:
            self.carry(pending, self._safely(lambda: answer.then(None)))
            return
        pending.connection.adjust_work(1)
        found = self.find_route(answer.topic)
        found.add_done_callback(lambda done: self._routed(pending, answer, done))

    def _routed(
        self,
        pending: PendingResponse,
        answer: QueryRoute,
        done: asyncio.Future[TopicRouteData | None],
    ) -> None:
        pending.connection.adjust_work(-1)
        self.carry(
            pending,
            self._safely(lambda: answer.then(None if done.cancelled() else done.result())),
        )
        self._server.after_work()

    def _safely(self, make: Callable[[], Answer]) -> Answer:
        """What a piece of a handler answers, be it an error."""
        try:
            return make()
        except PenstockError as error:
            name = type(error).__name__
            self.refusals[name] = self.refusals.get(name, 0) + 1
            return refusal(error)
        except Exception as error:
            log.exception("a handler failed")
            remark = f"a bug of Penstock: {type(error).__name__}: {error}"
            return Reply(ResponseCode.SYSTEM_ERROR, remark=remark)

    # --- held pulls

    def _hold(self, pending: PendingResponse, hold: Suspend) -> None:
        assert self._long_polling is not None
        client = pending.connection.client
        for what, figure, limit in (
            ("pulls of all clients wait here", len(self._long_polling), HOLDS_MAX),
            (
                "pulls of this client wait here",
                self._long_polling.count_of(client),
                HOLDS_PER_CLIENT_MAX,
            ),
        ):
            if figure >= limit:
                busy = SystemBusy.over(what, figure=figure, limit=limit, unit="pulls")
                self._reply(pending, refusal(busy))
                return
        self._long_polling.add(client, pending, hold)
        self._server.wake_at(hold.deadline_ms)

    def wake(self, suspended: SuspendedRequest, last: bool) -> None:
        """Try a held pull again."""
        pending: PendingResponse = suspended.pending_response
        if not pending.connection.hold_back(suspended, last):
            self.carry(pending, self._safely(lambda: suspended.suspend.retry(last)))
        elif not last and self._long_polling is not None:
            self._long_polling.pass_on(suspended)

    # --- calls to clients

    def _relay(self, pending: PendingResponse, relay: CallClient) -> None:
        target = self._server.connections.get(relay.client)
        waiting = len(self._asked.get(relay.client, ()))
        if target is None or waiting >= RELAYS_PER_CLIENT_MAX or self._asked_count >= RELAYS_MAX:
            self.carry(pending, relay.on_timeout)
            return
        opaque = self._next_opaque()
        try:
            data = encode(relay.code, relay.ext, relay.body, opaque=opaque)
        except FrameError as error:
            self._reply(pending, refusal(error))
            return
        asked = _Asked(pending, relay.then, relay.on_timeout)
        self._asked.setdefault(relay.client, {})[opaque] = asked
        self._asked_count += 1
        if len(self._deadlines) > 2 * self._asked_count + _DEADLINES_LEAST:
            self._deadlines = [one for one in self._deadlines if self._is_asked(*one[1:])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (relay.deadline_ms, relay.client, opaque))
        self._server.wake_at(relay.deadline_ms)
        target.write(data)

    def answered(self, client: int, opaque: int, reply: Reply) -> None:
        """A client has answered something that we asked it."""
        asked = self._take_asked(client, opaque)
        if asked is not None:
            self.carry(asked.pending, self._safely(lambda: asked.then(reply)))

    def lost(self, client: int) -> None:
        """A client has gone: it answers nothing any more."""
        for opaque in list(self._asked.get(client, ())):
            self._give_up(client, opaque)

    def due(self) -> int:
        """When the next call to a client is given up."""
        return self._deadlines[0][0] if self._deadlines else 1 << 62

    def tick(self, now_ms: int) -> None:
        """Give up calls to clients whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, client, opaque = heapq.heappop(self._deadlines)
            self._give_up(client, opaque)

    def _give_up(self, client: int, opaque: int) -> None:
        asked = self._take_asked(client, opaque)
        if asked is not None:
            self.carry(asked.pending, asked.on_timeout)

    def _is_asked(self, client: int, opaque: int) -> bool:
        return opaque in self._asked.get(client, ())

    def _take_asked(self, client: int, opaque: int) -> _Asked | None:
        of_client = self._asked.get(client, {})
        asked = of_client.pop(opaque, None)
        if asked is not None:
            self._asked_count -= 1
            if not of_client:
                del self._asked[client]
        return asked

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    # --- effects

    def perform(self, effects: list[Effect]) -> None:
        """Carry out what handlers asked for besides their answers."""
        for effect in effects:
            if isinstance(effect, NotifyClient):
                self._tell(effect)
            elif isinstance(effect, PersistSoon):
                self.save(effect.table)
            elif isinstance(effect, RegisterSoon):
                self.register()
            elif isinstance(effect, TickAt):
                self._server.wake_at(effect.ms)
            else:
                connection = self._server.connections.get(effect.client)
                if connection is not None:
                    connection.close(effect.why)

    def _tell(self, tell: NotifyClient) -> None:
        connection = self._server.connections.get(tell.client)
        if connection is not None:
            opaque = self._next_opaque()
            connection.write(
                encode(tell.code, tell.ext, tell.body, opaque=opaque, flag=FLAG_ONE_WAY)
            )

    def save(self, table: PersistentTable) -> None:
        """Write a table soon: at once, or when the write under way is done."""
        assert self._persistence is not None
        name = table.FILE
        if name in self._saving:
            self._saving[name] = True
            return
        waiting = self._unsaved.pop(name, [])
        if not table.dirty:
            self._tell_saved(waiting, True)
            return
        work = self._persistence.save(table)
        try:
            future = self._submit(work)
        except RuntimeError:  # the pool is closing; the broker's end writes what is dirty
            table.dirty = True
            self._tell_saved(waiting, False)
            return
        self._saving[name] = False
        future.add_done_callback(
            lambda done: self._server.soon_from_thread(self._saved, table, waiting, done)
        )

    def _saved(
        self,
        table: PersistentTable,
        waiting: list[tuple[PendingResponse, PersistTable]],
        done: Future[Any],
    ) -> None:
        again = self._saving.pop(table.FILE)
        error = done.exception()
        if error is not None:
            log.error("%s can't be written: %s", table.FILE, error)
        # These first: the next write takes another snapshot.
        self._tell_saved(waiting, error is None)
        if again and (error is None or table.FILE in self._unsaved):
            self.save(table)

    def _tell_saved(
        self, waiting: list[tuple[PendingResponse, PersistTable]], written: bool
    ) -> None:
        for pending, answer in waiting:
            pending.connection.adjust_work(-1)
            self.carry(pending, self._safely(partial(answer.then, written)))
        if waiting:
            self._server.after_work()

    @property
    def saving(self) -> bool:
        """Whether a table is being written."""
        return bool(self._saving)
