"""Requests of the server to its clients, and the responses to them."""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import FrameError
from penstock.rpc.answers import Answer, CallClient, NotifyClient, Reply
from penstock.rpc.router import refusal
from penstock.server.pending_response import Execute, PendingResponse, ResponseConnection
from penstock.wire.codes import FLAG_ONE_WAY
from penstock.wire.output import encode

CLIENT_CALLS_MAX = 10_000
"""Most requests to clients that wait for a response."""
CLIENT_CALLS_PER_CLIENT_MAX = 1_000
"""The same for one client, so that a client that hangs leaves room for others."""
_DEADLINES_LEAST = 1_000  # deadlines of answered requests are removed above this number
_NEVER_MS = 1 << 62


@dataclass(slots=True)
class _ClientCall:
    """A request to a client that has no response yet."""

    pending: PendingResponse
    then: Callable[[Reply], Answer]
    on_timeout: Reply


class ClientCalls:
    """Requests to clients that wait for a response, with their deadlines."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._calls: dict[int, dict[int, _ClientCall]] = {}  # by client and opaque
        self._count = 0
        self._deadlines: list[tuple[int, int, int]] = []  # (ms, client, opaque), a heap
        self._opaque = 0

    def call(
        self, pending: PendingResponse, request: CallClient, target: ResponseConnection | None
    ) -> bool:
        """Send a request; without room or target it times out at once. Whether it was sent."""
        waiting = len(self._calls.get(request.client, ()))
        full = waiting >= CLIENT_CALLS_PER_CLIENT_MAX or self._count >= CLIENT_CALLS_MAX
        if target is None or full:
            self._execute(pending, lambda: request.on_timeout)
            return False
        opaque = self._next_opaque()
        try:
            data = encode(request.code, request.ext, request.body, opaque=opaque)
        except FrameError as error:
            too_long = refusal(error)
            self._execute(pending, lambda: too_long)
            return False
        call = _ClientCall(pending, request.then, request.on_timeout)
        self._calls.setdefault(request.client, {})[opaque] = call
        self._count += 1
        if len(self._deadlines) > 2 * self._count + _DEADLINES_LEAST:
            self._deadlines = [one for one in self._deadlines if self._is_waiting(*one[1:])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (request.deadline_ms, request.client, opaque))
        target.write(data)
        return True

    def notify(self, request: NotifyClient, target: ResponseConnection) -> None:
        """Send a one-way request."""
        target.write(self.encode_oneway(request.code, request.ext, request.body))

    def encode_oneway(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> bytes:
        """A one-way request, which may be sent to several clients."""
        return encode(code, ext, body, opaque=self._next_opaque(), flag=FLAG_ONE_WAY)

    def responded(self, client: int, opaque: int, reply: Reply) -> None:
        """Take the response of a client."""
        call = self._take(client, opaque)
        if call is not None:
            self._execute(call.pending, lambda: call.then(reply))

    def disconnected(self, client: int) -> None:
        """Give up the requests to a client that has disconnected."""
        for opaque in list(self._calls.get(client, ())):
            self._give_up(client, opaque)

    def due(self) -> int:
        """The nearest deadline, or a time that never comes."""
        return self._deadlines[0][0] if self._deadlines else _NEVER_MS

    def tick(self, now_ms: int) -> None:
        """Give up the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, client, opaque = heapq.heappop(self._deadlines)
            self._give_up(client, opaque)

    def clock_stepped(self, step_ms: int) -> None:
        """Keep the time that is left for each request."""
        self._deadlines = [(ms + step_ms, client, opaque) for ms, client, opaque in self._deadlines]

    def _give_up(self, client: int, opaque: int) -> None:
        call = self._take(client, opaque)
        if call is not None:
            self._execute(call.pending, lambda: call.on_timeout)

    def _is_waiting(self, client: int, opaque: int) -> bool:
        return opaque in self._calls.get(client, ())

    def _take(self, client: int, opaque: int) -> _ClientCall | None:
        of_client = self._calls.get(client, {})
        call = of_client.pop(opaque, None)
        if call is not None:
            self._count -= 1
            if not of_client:
                del self._calls[client]
        return call

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque
