"""Pulls that wait: by queue, woken when it gets messages, or by their deadline."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.broker.answers import ClientId, Hold
from penstock.store.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore


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
        self._by_queue: dict[ConsumeQueue, list[Held]] = {}
        self._by_client: dict[ClientId, set[Held]] = {}
        self._deadlines: list[tuple[int, int, Held]] = []
        self._number = 0
        self.wake: Callable[[Held, bool], None] = lambda held, last: None
        store.on_arrival = self._arrived

    def __len__(self) -> int:
        return sum(len(held) for held in self._by_queue.values())

    def add(self, client: ClientId, ticket: Any, hold: Hold) -> None:
        """Let a request wait."""
        held = Held(client, ticket, hold)
        self._by_queue.setdefault(hold.queue, []).append(held)
        self._by_client.setdefault(client, set()).add(held)
        self._number += 1
        heapq.heappush(self._deadlines, (hold.deadline_ms, self._number, held))
        self._store.watch(hold.queue)

    def drop(self, client: ClientId) -> None:
        """Forget what a client waited for: it is gone."""
        for held in self._by_client.pop(client, ()):
            held.alive = False
            waiting = self._by_queue.get(held.hold.queue)
            if waiting is not None:
                waiting.remove(held)
                if not waiting:
                    del self._by_queue[held.hold.queue]

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
        while self._deadlines and (
            self._deadlines[0][0] <= now_ms or not self._deadlines[0][2].alive
        ):
            held = heapq.heappop(self._deadlines)[2]
            if held.alive:
                self._forget(held)
                self.wake(held, True)

    def _arrived(self, queue: ConsumeQueue) -> None:
        for held in self._by_queue.pop(queue, ()):
            self._forget(held)
            self.wake(held, False)

    def _forget(self, held: Held) -> None:
        held.alive = False
        waiting = self._by_queue.get(held.hold.queue)
        if waiting is not None and held in waiting:
            waiting.remove(held)
            if not waiting:
                del self._by_queue[held.hold.queue]
        mine = self._by_client.get(held.client)
        if mine is not None:
            mine.discard(held)
            if not mine:
                del self._by_client[held.client]
