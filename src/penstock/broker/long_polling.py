"""Requests that wait for messages: by queue, woken when it gets some, or by their deadline.

A pull waits at its queue, and all that wait there are woken. Pops of one group wait in a `Line` for
any of several queues: whoever came first is woken, and whoever finds more messages than it takes
calls the next. So a message wakes one of a thousand, not all of them.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.rpc.answers import ClientId, Hold
from penstock.store.consumequeue.consumequeue import ConsumeQueue
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


@dataclass(slots=True, eq=False)
class Line:
    """Requests that wait for the same: messages in any of these queues, in the order they came."""

    queues: dict[ConsumeQueue, None] = field(default_factory=dict)
    missing: dict[ConsumeQueue, None] = field(default_factory=dict)  # where it does not listen yet
    waiting: OrderedDict[Held, None] = field(default_factory=OrderedDict)
    origin: tuple[object, ...] = ()  # what its queues were found by
    heard: int = 0  # how often it was called, also when nobody waited
    calls: int = 0
    calling: bool = False
    woken: int = 0  # by the calls that are under way

    def listen_at(self, queues: Iterable[ConsumeQueue]) -> None:
        """Wait for messages in these queues too."""
        for queue in queues:
            if queue not in self.queues:
                self.queues[queue] = self.missing[queue] = None


class Holds:
    """All waiting requests. `wake` of the carrier is called for those to be tried again."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._by_queue: dict[ConsumeQueue, dict[Held | Line, None]] = {}
        self._by_client: dict[ClientId, dict[Held, None]] = {}
        self._deadlines: list[tuple[int, int, Held]] = []
        self._number = 0
        self._alive = 0
        self.lined = 0  # of them in lines
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
        queue, missed = hold.queue, False
        if isinstance(queue, Line):
            queue.waiting[held] = None
            self.lined += 1
            self.listen(queue)
            missed = queue.heard != hold.heard
        else:
            assert isinstance(queue, ConsumeQueue)
            self._by_queue.setdefault(queue, {})[held] = None
            self._store.watch(queue)
        self._by_client.setdefault(client, {})[held] = None
        self._alive += 1
        self._number += 1
        heapq.heappush(self._deadlines, (hold.deadline_ms, self._number, held))
        if len(self._deadlines) > 2 * self._alive + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].alive]
            heapq.heapify(self._deadlines)
        if missed and isinstance(queue, Line):
            self.call(queue)

    def listen(self, line: Line) -> None:
        """Hear of messages in all queues of a line."""
        missing, line.missing = line.missing, {}
        for queue in missing:
            self._by_queue.setdefault(queue, {})[line] = None
            self._store.watch(queue)

    def call(self, line: Line) -> None:
        """Try the first of a line again. Called while that is under way, it tries one more.

        Whoever is on its way into the line, decided upon before in the same turn, is tried when it
        comes.
        """
        line.heard += 1
        line.calls += 1
        if line.calling:
            return
        line.calling = True
        try:
            while line.calls and line.waiting:
                line.calls -= 1
                line.woken += 1
                held = next(iter(line.waiting))
                self._forget(held)
                self.wake(held, False)
        finally:
            line.calling = False
            line.calls = line.woken = 0

    def pass_on(self, held: Held) -> None:
        """Whoever was woken can't take an answer now: the next of its line is tried as well."""
        if isinstance(held.hold.queue, Line):
            self.call(held.hold.queue)

    def dismiss(self, line: Line) -> None:
        """Nobody waits in a line, and nobody will: hear of its queues no longer."""
        for queue in line.queues:
            self._leave(queue, line)

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
        for waiting in self._by_queue.pop(queue, {}):
            if isinstance(waiting, Held):
                self._forget(waiting)
                self.wake(waiting, False)
                continue
            if queue.gone:  # there may be a new one of its name
                del waiting.queues[queue]
                waiting.origin = ()
            else:
                waiting.missing[queue] = None
            self.call(waiting)
            if waiting.waiting:
                self.listen(waiting)

    def _leave(self, queue: ConsumeQueue, who: Held | Line) -> None:
        waiting = self._by_queue.get(queue)
        if waiting is not None and waiting.pop(who, 0) is None and not waiting:
            del self._by_queue[queue]

    def _forget(self, held: Held) -> None:
        held.alive = False
        self._alive -= 1
        queue = held.hold.queue
        if isinstance(queue, Line):
            del queue.waiting[held]
            self.lined -= 1
        else:
            assert isinstance(queue, ConsumeQueue)
            self._leave(queue, held)
        mine = self._by_client.get(held.client)
        if mine is not None and mine.pop(held, 0) is None and not mine:
            del self._by_client[held.client]
