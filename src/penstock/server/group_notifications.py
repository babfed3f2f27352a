"""Notifies the members of consumer groups that the group has changed, so that they rebalance.

| Group | Sent |
|---|---|
| up to AT_ONCE_MAX members | at once, unless this loop iteration has sent that many already |
| larger | from the next loop iteration on, PART_MAX notifications in each |

A group that waits has at most one notification per member to send. Further changes of it only make
the broker notify all members once more afterwards, for a large group after a pause. So n members
that join one after another cause far fewer than n² notifications, and no long loop iteration.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.rpc.answers import ClientId, NotifyMembers
from penstock.server.client_calls import ClientCalls
from penstock.server.pending_response import ResponseConnection
from penstock.wire.codes import RequestCode

AT_ONCE_MAX = 100
"""Notifications that are sent at once in one loop iteration; one takes about 10 µs."""
PART_MAX = 100
"""Notifications to groups that wait, in one loop iteration."""
PAUSE_MS = 100
"""Between two notifications to the same member of a group with more than AT_ONCE_MAX members."""


class NotifyingServer(Protocol):
    """What the notifications need of their server."""

    @property
    def connections(self) -> Mapping[int, ResponseConnection]: ...

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the next loop iteration."""

    def later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay, unless the server stops before."""


@dataclass(slots=True)
class _Round:
    """One notification of each member of a group."""

    request: NotifyMembers
    frame: bytes = b""
    """Empty before the round begins."""
    clients: list[ClientId] = field(default_factory=list)
    """Those that have not been notified yet."""
    changed: bool = False
    """Whether the group has changed since the round began."""


class GroupNotifications:
    """Sends NOTIFY_CONSUMER_IDS_CHANGED to the members of groups."""

    def __init__(self, server: NotifyingServer, client_calls: ClientCalls) -> None:
        self._server = server
        self._client_calls = client_calls
        self._rounds: dict[str, _Round] = {}  # by group: those that wait or pause
        self._waiting: deque[_Round] = deque()
        self._at_once = AT_ONCE_MAX  # left in this loop iteration
        self._scheduled = False  # `_next_iteration` is called in the next loop iteration

    def notify(self, request: NotifyMembers) -> None:
        """Notify the members of a group, now or soon."""
        running = self._rounds.get(request.group)
        if running is not None:
            running.request, running.changed = request, bool(running.frame)
        elif len(request.members) <= self._at_once:
            self._at_once -= len(request.members)
            at_once = _Round(request)
            self._begin(at_once)
            self._send(at_once, len(request.members))
            self._schedule()
        else:
            self._wait(request)

    def _wait(self, request: NotifyMembers) -> None:
        waiting = self._rounds[request.group] = _Round(request)
        self._waiting.append(waiting)
        self._schedule()

    def _begin(self, began: _Round) -> None:
        request, code = began.request, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        began.frame = self._client_calls.encode_oneway(code, {"consumerGroup": request.group})
        began.clients = list(request.members)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._server.soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._scheduled = False
        self._at_once = AT_ONCE_MAX
        left = PART_MAX
        while self._waiting and left > 0:
            first = self._waiting.popleft()
            if not first.frame:
                self._begin(first)
            part = min(left, len(first.clients))
            self._send(first, part)
            left -= part + 1  # a group of which nobody is left costs something too
            if first.clients:
                self._waiting.append(first)
            else:
                self._sent(first)
        if self._waiting:
            self._schedule()

    def _send(self, part_of: _Round, count: int) -> None:
        members, connections = part_of.request.members, self._server.connections
        at = len(part_of.clients) - count
        for client in part_of.clients[at:]:
            connection = connections.get(client)
            if connection is not None and client in members:
                connection.write(part_of.frame)
        del part_of.clients[at:]

    def _sent(self, done: _Round) -> None:
        if len(done.request.members) > AT_ONCE_MAX:
            self._server.later(PAUSE_MS, self._end, done)
        else:
            self._end(done)

    def _end(self, done: _Round) -> None:
        del self._rounds[done.request.group]
        if done.changed:
            self._wait(done.request)
