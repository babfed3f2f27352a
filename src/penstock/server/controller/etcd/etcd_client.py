"""Calls to an etcd cluster through its HTTP gateway.

A call goes to the present member. If that fails, the same request goes to the next member, until
there is an answer or the time is over. So requests must be such that sending them again does no
harm: every write names a revision, a lease or a value that the caller has chosen.

| what happened | what the client does |
|---|---|
| no connection, no answer in time, connection lost, garbage | the next member |
| UNAVAILABLE, DEADLINE_EXCEEDED, ABORTED, UNKNOWN, INTERNAL (no leader, a new one) | the same |
| UNAUTHENTICATED | a new token, once per call |
| other codes of gRPC | EtcdRefused: the answer is final |

At the end it is EtcdOutcomeUnknown if some member may have got the request, else EtcdError.
"""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.clock import Clock, LoopClock, finish_within, pause
from penstock.errors import EtcdError, EtcdOutcomeUnknown, EtcdRefused
from penstock.metrics import Histogram
from penstock.server.controller.etcd.etcd_messages import Refusal, Status, Token, decode
from penstock.server.controller.etcd.http_connection import (
    HttpConnection,
    HttpError,
    HttpResponse,
)

log = logging.getLogger(__name__)

CALL_MS = 10_000
"""Time for a call with all its attempts. A cluster that elects a leader answers after 1 to 2 s."""
ATTEMPT_MS = (1_000, 2_000, 4_000)
"""Time for the first attempts, and for all others: a stopped member is left soon, a slow cluster
gets its time."""
CONNECT_MS = 1_000
PAUSE_MS = 50
"""Time between two attempts when all members have failed; it doubles."""
PAUSE_MS_MAX = 800
IDLE_MAX = 64
"""Idle connections that are kept."""
CALLS_MAX = 32
"""Calls at a time; others wait."""
_LATENCIES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

STATUS_PATH = "/v3/maintenance/status"
OK = 200
NOT_FOUND = 5
FAILED_PRECONDITION = 9
_INVALID_ARGUMENT = 3
_UNAUTHENTICATED = 16
_FINAL = frozenset({3, 5, 6, 7, 9, 11, 12, 16})
"""Codes of gRPC that mean that nothing was done, and that another member would say the same."""

T = TypeVar("T")


class EtcdEndpoint(NamedTuple):
    """A member of the cluster."""

    host: str
    port: int
    ssl: tls.SSLContext | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(slots=True)
class EtcdFigures:
    """What the client counts."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls by path and outcome."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts by member."""
    seconds: Histogram = field(default_factory=lambda: Histogram(_LATENCIES))
    """Of calls that were answered."""
    answered_ms: int = -1
    """When the last call was answered, by the monotonic clock; -1: never."""
    error: str = ""
    """Of the last attempt that failed."""


class EtcdClient:
    """A client of one cluster."""

    def __init__(
        self,
        endpoints: Sequence[EtcdEndpoint],
        *,
        user: str = "",
        password: str = "",
        clock: Clock | None = None,
        call_ms: int = 0,
    ) -> None:
        """`call_ms` replaces CALL_MS."""
        assert endpoints
        self._endpoints = list(endpoints)
        self._present = 0
        self._user, self._password = user, password
        self._clock: Clock = clock or LoopClock()
        self._call_ms = call_ms or CALL_MS
        self._token = ""
        self._authenticating = asyncio.Lock()
        self._idle: list[tuple[EtcdEndpoint, HttpConnection]] = []
        self._open: set[HttpConnection] = set()
        self._slots = asyncio.Semaphore(CALLS_MAX)
        self.figures = EtcdFigures()

    def close(self) -> None:
        """Close all connections; calls in flight fail."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()

    async def call(self, path: str, message: Any, kind: type[T]) -> T:
        """The answer to a request. Raises EtcdRefused, EtcdError or EtcdOutcomeUnknown."""
        body = msgspec.json.encode(message)
        return await self.exchange(path, body, lambda answer: parse(answer, kind))

    async def exchange(self, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the body of an answer; it raises HttpError for garbage."""
        began_ms = self._clock.monotonic_ms()
        outcome = "failed"
        async with self._slots:
            try:
                answer = await self._attempts(path, body, read, began_ms + self._call_ms)
                outcome = "ok"
                self.figures.seconds.observe((self._clock.monotonic_ms() - began_ms) / 1000)
                return answer
            except EtcdRefused:
                outcome = "refused"
                raise
            finally:
                if outcome != "failed":
                    self.figures.answered_ms = self._clock.monotonic_ms()
                self.figures.calls[path, outcome] += 1

    @asynccontextmanager
    async def stream(self, path: str, message: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of an answer that does not end, from one attempt. Raises EtcdError, also while
        the lines are read."""
        endpoint = self._endpoints[self._present]
        connection = None
        try:
            headers = await self._headers(self._clock.monotonic_ms() + self._call_ms)
            # A member that is separated from its leader ends the stream.
            headers["Grpc-Metadata-hasleader"] = "true"
            connection = await self._connect(endpoint)
            work = connection.stream(path, headers, msgspec.json.encode(message))
            status, lines = await finish_within(self._clock, ATTEMPT_MS[-1], work)
            if status != OK:
                raise HttpError(f"HTTP status {status}", sent=True)
            yield lines
        except (HttpError, TimeoutError) as error:
            self._token = ""  # perhaps it has expired
            self.leave(endpoint)
            raise EtcdError(f"{endpoint}: {error}") from None
        finally:
            if connection is not None:
                self._drop(connection)

    async def find_leader(self) -> None:
        """Use the member that leads from now on, if one says so: others forward to it."""
        for number in range(len(self._endpoints)):
            at = (self._present + number) % len(self._endpoints)
            try:
                work = self._attempt(self._endpoints[at], STATUS_PATH, {}, b"{}")
                response = await finish_within(self._clock, ATTEMPT_MS[0], work)
                status = parse(response.body, Status)
            except (HttpError, TimeoutError):
                continue
            if status.leader and status.leader == status.header.member_id:
                self._present = at
                return

    def leave(self, endpoint: EtcdEndpoint | None = None) -> None:
        """Use another member from now on, if `endpoint` is the present one."""
        present = self._endpoints[self._present]
        if endpoint is None or endpoint == present:
            self._present = (self._present + 1) % len(self._endpoints)

    # --- attempts

    async def _attempts(
        self, path: str, body: bytes, read: Callable[[bytes], T], deadline_ms: int
    ) -> T:
        causes: dict[str, str] = {}
        sent = authenticated = False
        attempt, pause_ms = 0, PAUSE_MS
        while True:
            endpoint = self._endpoints[self._present]
            left_ms = deadline_ms - self._clock.monotonic_ms()
            wait_ms = min(left_ms, ATTEMPT_MS[min(attempt, len(ATTEMPT_MS) - 1)])
            if wait_ms <= 0:
                raise _no_answer(path, causes, sent)
            try:
                headers = await self._headers(deadline_ms)
                work = self._attempt(endpoint, path, headers, body)
                response = await finish_within(self._clock, wait_ms, work)
                if response.status == OK:
                    return read(response.body)
                refusal = parse(response.body, Refusal)
                if self._user and not authenticated and _wants_token(refusal.code):
                    authenticated, self._token = True, ""
                    continue
                if refusal.code in _FINAL:
                    raise _refused(path, refusal)
                raise HttpError(refusal.message or f"HTTP status {response.status}", sent=True)
            except (HttpError, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                cause = f"no answer within {wait_ms} ms" if late else str(error)
                causes[str(endpoint)] = cause
                self.figures.error = f"{endpoint}: {cause}"
                sent = sent or late or getattr(error, "sent", False)
                self.figures.failures[str(endpoint)] += 1
            self.leave(endpoint)
            attempt += 1
            if attempt % len(self._endpoints) == 0:
                left_ms = deadline_ms - self._clock.monotonic_ms()
                await pause(self._clock, max(min(pause_ms, left_ms), 0))
                pause_ms = min(pause_ms * 2, PAUSE_MS_MAX)

    async def _attempt(
        self, endpoint: EtcdEndpoint, path: str, headers: dict[str, str], body: bytes
    ) -> HttpResponse:
        idle = self._idle_connection(endpoint)
        if idle is None:
            return await self._post(endpoint, await self._connect(endpoint), path, headers, body)
        try:
            return await self._post(endpoint, idle, path, headers, body)
        except HttpError:
            # Usually the member has closed it while it was idle; but it may have got the request.
            try:
                connection = await self._connect(endpoint)
            except HttpError as error:
                raise HttpError(str(error), sent=True) from None
            return await self._post(endpoint, connection, path, headers, body)

    async def _post(
        self,
        endpoint: EtcdEndpoint,
        connection: HttpConnection,
        path: str,
        headers: dict[str, str],
        body: bytes,
    ) -> HttpResponse:
        try:
            response = await connection.post(path, headers, body)
        except BaseException:
            self._drop(connection)
            raise
        if connection.reusable and len(self._idle) < IDLE_MAX:
            self._idle.append((endpoint, connection))
        else:
            self._drop(connection)
        return response

    def _idle_connection(self, endpoint: EtcdEndpoint) -> HttpConnection | None:
        """The connection to this member that was used last."""
        others = []
        found = None
        while self._idle and found is None:
            member, connection = self._idle.pop()
            if not connection.reusable:
                self._drop(connection)
            elif member == endpoint:
                found = connection
            else:
                others.append((member, connection))
        self._idle += others
        return found

    async def _connect(self, endpoint: EtcdEndpoint) -> HttpConnection:
        work = HttpConnection.open(endpoint.host, endpoint.port, endpoint.ssl)
        try:
            connection = await finish_within(self._clock, CONNECT_MS, work)
        except TimeoutError:
            raise HttpError(f"no connection within {CONNECT_MS} ms", sent=False) from None
        self._open.add(connection)
        return connection

    def _drop(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        connection.close()

    # --- authentication

    async def _headers(self, deadline_ms: int) -> dict[str, str]:
        if not self._user:
            return {}
        async with self._authenticating:
            if not self._token:
                self._token = await self._authenticate(deadline_ms)
        return {"Authorization": self._token}

    async def _authenticate(self, deadline_ms: int) -> str:
        """A token for user and password, from any member. Raises EtcdRefused or HttpError."""
        path = "/v3/auth/authenticate"
        body = msgspec.json.encode({"name": self._user, "password": self._password})
        endpoint = self._endpoints[self._present]
        left_ms = max(deadline_ms - self._clock.monotonic_ms(), 1)
        work = self._attempt(endpoint, path, {}, body)
        response = await finish_within(self._clock, min(left_ms, ATTEMPT_MS[-1]), work)
        if response.status == OK:
            return parse(response.body, Token).token
        refusal = parse(response.body, Refusal)
        if refusal.code in _FINAL:
            raise _refused(path, refusal)
        raise HttpError(refusal.message, sent=False)


def parse(body: bytes, kind: type[T]) -> T:
    """A message of etcd. Raises HttpError if it is something else."""
    try:
        return decode(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(f"not an answer of etcd: {error}", sent=True) from None


def _wants_token(code: int) -> bool:
    """The token has expired; or, INVALID_ARGUMENT, rights have changed since it was given."""
    return code in (_UNAUTHENTICATED, _INVALID_ARGUMENT)


def _refused(path: str, refusal: Refusal) -> EtcdRefused:
    return EtcdRefused(f"etcd refused {path}: {refusal.message}", grpc_code=refusal.code)


def _no_answer(path: str, causes: dict[str, str], sent: bool) -> EtcdError:
    reasons = "; ".join(f"{member}: {cause}" for member, cause in causes.items()) or "no time left"
    if sent:
        return EtcdOutcomeUnknown(f"no answer of etcd to {path}: {reasons}")
    return EtcdError(f"no connection to etcd for {path}: {reasons}")
