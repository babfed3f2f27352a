"""Notifications of many clients, such as all members of a group: some in each loop iteration."""

from collections.abc import Callable, Iterator
from typing import Final

from penstock.rpc.answers import ClientId, NotifyClient, NotifyClients

NOTIFIED_MAX: Final = 200
"""Clients that are notified before the event loop does something else: about 2 ms."""


class Notifications:
    """The notifications that were not sent to all of their clients yet."""

    def __init__(
        self,
        send: Callable[[NotifyClient], None],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`soon` calls a function in the next loop iteration."""
        self._send = send
        self._soon = soon
        self._pending: dict[object, tuple[NotifyClients, Iterator[ClientId]]] = {}
        self._scheduled = False

    def add(self, request: NotifyClients) -> None:
        """Notify these clients; one that is notified already, for the same reason, again."""
        key = (request.code, tuple(request.ext.items()))
        self._pending[key] = (request, iter(request.clients))
        if not self._scheduled:
            self._scheduled = True
            self._soon(self._send_some)

    def _send_some(self) -> None:
        left = NOTIFIED_MAX
        while self._pending and left > 0:
            key, (request, clients) = next(iter(self._pending.items()))
            client = next(clients, None)
            if client is None:
                del self._pending[key]
                continue
            self._send(NotifyClient(client, request.code, request.ext))
            left -= 1
        self._scheduled = bool(self._pending)
        if self._scheduled:
            self._soon(self._send_some)
