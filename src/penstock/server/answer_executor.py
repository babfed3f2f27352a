"""Executes the answers of handlers, and their effects."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from penstock.broker.pull.pull_handler import WAITS, WRITTEN, SuspendedPull
from penstock.errors import PenstockError, SystemBusy
from penstock.rpc.answers import (
    Answer,
    CallClient,
    Effect,
    EncodedReply,
    InThread,
    NextIteration,
    NotifyClient,
    NotifyMembers,
    PersistSoon,
    QueryRoute,
    RegisterSoon,
    RegisterTopics,
    Reply,
    Suspend,
    TickAt,
    WhenDone,
)
from penstock.rpc.router import bug_text, refusal
from penstock.server.client_calls import ClientCalls
from penstock.server.group_notifications import GroupNotifications
from penstock.server.pending_response import PendingResponse, ResponseConnection
from penstock.server.table_writes import TableWrites
from penstock.server.wake_pace import WakePace
from penstock.server.woken_responses import WokenResponses
from penstock.store.disk import disk_failure
from penstock.wire.codes import ResponseCode
from penstock.wire.output import response

if TYPE_CHECKING:
    from penstock.broker.long_polling import LongPolling, SuspendedRequest
    from penstock.rpc.persistence import Persistence
    from penstock.wire.bodies.client_bodies import TopicRouteData

log = logging.getLogger(__name__)

SUSPENDED_MAX = 200_000
"""Most requests that are suspended at one time."""
SUSPENDED_PER_CLIENT_MAX = 20_000
"""The same for one connection: one for each queue that it reads."""
STEPS_NS = 2_000_000
"""Time for the steps of long requests in one loop iteration, however many requests there are."""
_DONE: Future[None] = Future()
_DONE.set_result(None)


@dataclass(frozen=True, slots=True)
class NameServerCalls:
    """What answers and effects need of the NameServers."""

    register_soon: Callable[[], None]
    """Registers all topics, not before the caller has returned."""
    register_topics: Callable[[tuple[str, ...], int], asyncio.Future[None]]
    """Registers topics until a deadline."""
    find_route: Callable[[str], asyncio.Future[TopicRouteData | None]]
    """Queries the route of a topic; None if it is unknown."""


class ExecutorServer(Protocol):
    """What the executor needs of its server."""

    @property
    def connections(self) -> Mapping[int, ResponseConnection]: ...

    def send_flushed(self, pending: PendingResponse, reply: EncodedReply) -> None:
        """Send a response when the log is flushed up to its offset."""

    def responded(self, pending: PendingResponse, response_code: int) -> None:
        """A response was written after the read of its request was served."""

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the next loop iteration."""

    def soon_from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop; called from another thread."""

    def later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay, unless the server stops before."""

    def monotonic_ms(self) -> int: ...

    def after_work(self) -> None:
        """Called after work outside of a read."""

    def tick_at(self, ms: int) -> None:
        """Call `tick` at this time at the latest."""


class AnswerExecutor:
    """Executes answers and effects for a server."""

    def __init__(
        self,
        server: ExecutorServer,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        *,
        long_polling: LongPolling | None = None,
        persistence: Persistence | None = None,
        nameservers: NameServerCalls | None = None,
    ) -> None:
        """Without `nameservers` nothing is registered, and no route is known."""
        self._server = server
        self._submit = submit
        self._long_polling = long_polling
        self._nameservers = nameservers
        self.client_calls = ClientCalls(self._run)
        self._group_notifications = GroupNotifications(server, self.client_calls)
        self.tables = TableWrites(
            persistence, submit, server.soon_from_thread, server.later, server.monotonic_ms
        )
        # Thread work by `ordered_by`, in the order of the requests.
        self._ordered: dict[Hashable, deque[tuple[PendingResponse, InThread, Future[Any]]]] = {}
        self._steps: deque[tuple[PendingResponse, NextIteration]] = deque()
        self._stepping = False  # `_run_steps` is called in the next loop iteration
        self._woken = WokenResponses()
        self._collecting = False  # `_woken` is flushed at the end of the running work
        self._pace = WakePace()
        self._woken_messages = 0  # how many messages woken pulls have got
        self.thread_jobs = 0
        self.refusals: dict[str, int] = {}  # by the error's name
        if long_polling is not None:
            long_polling.on_wake(self.wake, self._work_soon, self._gather)

    # --- answers

    def execute(self, pending: PendingResponse, answer: Answer) -> None:
        """Execute an answer."""
        if answer is None:
            return
        if isinstance(answer, Reply):
            self._reply(pending, answer)
        elif isinstance(answer, InThread):
            self._run_in_thread(pending, answer)
        elif isinstance(answer, NextIteration):
            self._add_step(pending, answer)
        elif isinstance(answer, Suspend):
            self._suspend(pending, answer)
        elif isinstance(answer, EncodedReply):
            self._server.send_flushed(pending, answer)
        elif isinstance(answer, RegisterTopics):
            self._register_topics(pending, answer)
        elif isinstance(answer, QueryRoute):
            self._query_route(pending, answer)
        elif isinstance(answer, WhenDone):
            self._await_work(pending, answer)
        else:
            self._call_client(pending, answer)

    def _run(self, pending: PendingResponse, handler: Callable[[], Answer]) -> None:
        """Execute the answer of a piece of a handler, or answer with the error it raises."""
        try:
            answer = handler()
        except PenstockError as error:
            name = type(error).__name__
            self.refusals[name] = self.refusals.get(name, 0) + 1
            answer = refusal(error)
        except Exception as error:
            failure = disk_failure(error)
            if failure is not None:
                log.error("a request failed: %s", failure)
                answer = refusal(failure)
            else:
                log.exception("a handler failed")
                answer = Reply(ResponseCode.SYSTEM_ERROR, remark=bug_text(error))
        self.execute(pending, answer)

    def _resume(self, pending: PendingResponse, handler: Callable[[], Answer]) -> None:
        """Go on with a request that was in flight outside of the event loop."""
        pending.connection.adjust_in_flight(-1)
        self._run(pending, handler)
        self._server.after_work()

    # --- steps of long requests

    def _add_step(self, pending: PendingResponse, step: NextIteration) -> None:
        pending.connection.adjust_in_flight(1)
        self._steps.append((pending, step))
        if not self._stepping:
            self._stepping = True
            self._server.soon(self._run_steps)

    def _run_steps(self) -> None:
        """Run the next steps of long requests, in turn; those for which there is no time left run
        in the next loop iterations."""
        stop_ns = perf_counter_ns() + STEPS_NS
        try:
            for _ in range(len(self._steps)):
                pending, step = self._steps.popleft()
                self._resume(pending, step.then)
                if perf_counter_ns() >= stop_ns:
                    break
        finally:
            self._stepping = bool(self._steps)
            if self._stepping:
                self._server.soon(self._run_steps)

    # --- responses

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
            code = reply.code
        except PenstockError as error:  # it is too long, or a field is
            code, remark = error.code, error.remark()
            data = response(code, pending.opaque, pending.encoding, remark=remark)
        pending.connection.write(data)
        self._server.responded(pending, code)

    def _run_in_thread(self, pending: PendingResponse, job: InThread) -> None:
        pending.connection.adjust_in_flight(1)
        self.thread_jobs += 1
        try:
            future = _DONE if job.work is None else self._submit(job.work)
        except RuntimeError as error:  # the pool is closing
            self.thread_jobs -= 1
            pending.connection.adjust_in_flight(-1)
            self._reply(pending, Reply(ResponseCode.SERVICE_NOT_AVAILABLE, remark=str(error)))
            return
        if job.ordered_by is not None:
            self._ordered.setdefault(job.ordered_by, deque()).append((pending, job, future))
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
        jobs = self._ordered.get(job.ordered_by)
        while jobs and jobs[0][2].done():
            self._after_thread(*jobs.popleft())
        if not jobs:
            self._ordered.pop(job.ordered_by, None)

    def _after_thread(self, pending: PendingResponse, job: InThread, done: Future[Any]) -> None:
        self.thread_jobs -= 1
        self._resume(pending, lambda: job.then(done.result()))

    def _register_topics(self, pending: PendingResponse, answer: RegisterTopics) -> None:
        if self._nameservers is None:
            self._run(pending, answer.then)
            return
        pending.connection.adjust_in_flight(1)
        registered = self._nameservers.register_topics(answer.topics, answer.deadline_ms)
        registered.add_done_callback(lambda _: self._resume(pending, answer.then))

    def _query_route(self, pending: PendingResponse, answer: QueryRoute) -> None:
        if self._nameservers is None:
            self._run(pending, lambda: answer.then(None))
            return
        pending.connection.adjust_in_flight(1)
        self._nameservers.find_route(answer.topic).add_done_callback(
            lambda done: self._resume(
                pending, lambda: answer.then(None if done.cancelled() else done.result())
            )
        )

    def _await_work(self, pending: PendingResponse, answer: WhenDone) -> None:
        pending.connection.adjust_in_flight(1)
        answer.work.add_done_callback(
            lambda done: self._resume(pending, lambda: answer.then(done.result()))
        )

    def _call_client(self, pending: PendingResponse, request: CallClient) -> None:
        target = self._server.connections.get(request.client)
        if self.client_calls.call(pending, request, target):
            self._server.tick_at(request.deadline_ms)

    # --- long polling

    def _suspend(self, pending: PendingResponse, suspend: Suspend) -> None:
        assert self._long_polling is not None
        client = pending.connection.client
        figure, limit = len(self._long_polling), SUSPENDED_MAX
        what = "suspended requests of all clients"
        if figure < limit:
            figure, limit = self._long_polling.count_of(client), SUSPENDED_PER_CLIENT_MAX
            what = "suspended requests of this client"
        if figure >= limit:
            busy = SystemBusy.over(what, figure=figure, limit=limit, unit="requests")
            self._reply(pending, refusal(busy))
            return
        pending.suspended = True
        self._long_polling.add(client, pending, suspend)
        self._server.tick_at(suspend.deadline_ms)

    def wake(self, suspended: SuspendedRequest, last: bool) -> None:
        """Retry a suspended request."""
        pending: PendingResponse = suspended.pending_response
        retry = suspended.suspend.retry
        if pending.connection.postpone(suspended, last):
            if not last and self._long_polling is not None:
                self._long_polling.pass_on(suspended)
        elif last or not isinstance(retry, SuspendedPull) or not self._wake_pull(pending, retry):
            self._run(pending, lambda: retry(last))

    def _wake_pull(self, pending: PendingResponse, pull: SuspendedPull) -> bool:
        """Write the response to a pull, or let it wait for later messages; whether that is all."""
        outcome = self._woken.write(pending, pull)
        if outcome == WRITTEN:
            self._server.responded(pending, ResponseCode.SUCCESS)
            self._woken_messages = pull.handler.woken_messages
            if not self._collecting:
                self._woken.flush()
        elif outcome == WAITS:
            assert self._long_polling is not None
            suspend = Suspend(pull.target.queue, pull.deadline_ms, pull)
            self._long_polling.add(pending.connection.client, pending, suspend)
            self._server.tick_at(pull.deadline_ms)
        return outcome in (WRITTEN, WAITS)

    def _work_soon(self, work: Callable[[], None]) -> None:
        """Wake requests in the next loop iteration."""
        self._server.soon(self._wake_together, work)

    def _gather(self, work: Callable[[], None]) -> None:
        """Wake requests soon, together with those for which messages arrive until then."""
        delay_ms = self._pace.delay_ms(self._woken_messages, self._server.monotonic_ms())
        if delay_ms:
            self._server.later(delay_ms, self._wake_together, work)
        else:
            self._server.soon(self._wake_together, work)

    def _wake_together(self, work: Callable[[], None]) -> None:
        """Wake requests; the responses to pulls are sent together."""
        self._collecting = True
        try:
            work()
        finally:
            self._collecting = False
            self._woken.flush()
        self._server.after_work()

    # --- effects

    def perform(self, effects: list[Effect]) -> None:
        """Execute effects in order."""
        for effect in effects:
            if isinstance(effect, PersistSoon):
                self.tables.write(effect.table)
            elif isinstance(effect, RegisterSoon):
                if self._nameservers is not None:
                    self._nameservers.register_soon()
            elif isinstance(effect, TickAt):
                self._server.tick_at(effect.ms)
            elif isinstance(effect, NotifyClient):
                self._notify(effect)
            elif isinstance(effect, NotifyMembers):
                self._group_notifications.notify(effect)
            else:
                connection = self._server.connections.get(effect.client)
                if connection is not None:
                    connection.close(effect.why)

    def _notify(self, notification: NotifyClient) -> None:
        connection = self._server.connections.get(notification.client)
        if connection is not None:
            self.client_calls.notify(notification, connection)
