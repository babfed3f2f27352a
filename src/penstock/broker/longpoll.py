"""Pulls that wait: by queue, woken when it gets messages, or by their deadline."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.broker.answers import ClientId, Hold
from penstock.store.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore

_SLACK = 1024
"""Deadlines of pulls that are gone stay in the heap until there are more of them than this and
than those alive."""


@dataclass(slots=True, eq=False)
class Held:
    """One waiting request; `ticket` is its carrier's business."""

    client: ClientId
    ticket: Any
    hold: Hold
    alive: bool = True


class Holds:
    """All waiting requests. `wake` of the carrier is called for those to be tried again."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._by_queue: dict[ConsumeQueue, dict[Held, None]] = {}
        self._by_client: dict[ClientId, dict[Held, None]] = {}
        self._deadlines: list[tuple[int, int, Held]] = []
        self._number = 0
        self._alive = 0
        self.wake: Callable[[Held, bool], None] = lambda held, last: None
        store.on_arrival = self._arrived

    def __len__(self) -> int:
        return self._alive

    def of(self, client: ClientId) -> int:
        """How many requests of a client wait."""
        return len(self._by_client.get(client, ()))

    def add(self, client: ClientId, ticket: Any, hold: Hold) -> None:
        """Let a request wait."""
        held = Held(client, ticket, hold)
        self._by_queue.setdefault(hold.queue, {})[held] = None
        self._by_client.setdefault(client, {})[held] = None
        self._alive += 1
        self._number += 1
        heapq.heappush(self._deadlines, (hold.deadline_ms, self._number, held))
        if len(self._deadlines) > 2 * self._alive + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].alive]
            heapq.heapify(self._deadlines)
        self._store.watch(hold.queue)

    def drop(self, client: ClientId) -> None:
        """Forget what a client waited for: it is gone."""
        for held in self._by_client.pop(client, {}):
            self._forget(held)

    def poke(self, queue: ConsumeQueue) -> None:
        """Try those waiting at this queue again: not a message, but something else changed."""
        self._arrived(queue)

    def due(self) -> int:
        """The nearest deadline, or a time that never comes."""
        while self._deadlines and not self._deadlines[0][2].alive:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else 1 << 62

    def tick(self, now_ms: int) -> None:
        """Answer those whose time is over."""
        while self.due() <= now_ms:
            held = heapq.heappop(self._deadlines)[2]
            self._forget(held)
            self.wake(held, True)

    def _arrived(self, queue: ConsumeQueue) -> None:
        for held in self._by_queue.pop(queue, {}):
            self._forget(held)
            self.wake(held, False)

    def _forget(self, held: Held) -> None:
        held.alive = False
        self._alive -= 1
        waiting = self._by_queue.get(held.hold.queue)
        if waiting is not None and waiting.pop(held, 0) is None and not waiting:
            del self._by_queue[held.hold.queue]
        mine = self._by_client.get(held.client)
        if mine is not None and mine.pop(held, 0) is None and not mine:
            del self._by_client[held.client]
