"""Long polling: requests that wait until messages arrive, or until their deadline.

A pull waits at its queue; an arrival there wakes all requests of the queue. They are woken together
with those of other queues when the reads of this loop iteration have been served, or a moment later
under load, so that what arrives until then goes out together. POP requests of one group wait in a
`WaitQueue` for any of several queues. An arrival wakes one of them, and a request that leaves
messages behind wakes the next. So a message wakes one of a thousand requests, not all of them.

One loop iteration wakes a limited number of pulls, and one tick answers a limited number of
requests, so that a message that very many of them wait for, or a deadline that very many have in
common, does not block the event loop.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from penstock.rpc.answers import ClientId, Suspend
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore

WAKES_MAX = 128
"""Requests that are woken before the event loop does something else."""
_SLACK = 1024
"""The heap keeps deadlines of requests that ended until they outnumber the others by this."""


@dataclass(slots=True, eq=False)
class SuspendedRequest:
    """One suspended request. `pending_response` belongs to the server: where to respond."""

    client: ClientId
    pending_response: Any
    suspend: Suspend
    alive: bool = True


@dataclass(slots=True, eq=False)
class WaitQueue:
    """Requests that wait for messages in any of these queues, in the order of arrival.

    The oldest request is woken first, or the newest with `newest_first`.
    """

    newest_first: bool = False
    queues: dict[ConsumeQueue, None] = field(default_factory=dict)
    unwatched: dict[ConsumeQueue, None] = field(default_factory=dict)  # those not watched yet
    waiting: OrderedDict[SuspendedRequest, None] = field(default_factory=OrderedDict)
    resolved_from: tuple[object, ...] = ()  # what `queues` was computed from
    to_add: Iterator[ConsumeQueue] = field(default_factory=lambda: iter(()))  # to `queues`
    notifications: int = 0  # how often `wake_next` was called, also when no request waited
    wakeups_due: int = 0  # requests that `wake_next` still has to wake
    waking: bool = False  # `wake_next` is running
    woken: int = 0  # requests that the running `wake_next` has woken

    def add_queues(self, queues: Iterable[ConsumeQueue]) -> None:
        """Wait for messages in these queues too."""
        for queue in queues:
            if queue not in self.queues:
                self.queues[queue] = self.unwatched[queue] = None


class LongPolling:
    """All suspended requests. `on_wake` names the function that retries a request."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._by_queue: dict[ConsumeQueue, dict[SuspendedRequest | WaitQueue, None]] = {}
        self._by_client: dict[ClientId, dict[SuspendedRequest, None]] = {}
        self._deadlines: list[tuple[int, int, SuspendedRequest]] = []
        self._number = 0
        self._alive = 0
        self.in_wait_queues = 0  # how many requests wait in wait queues
        # Pulls that are to be woken in the next loop iterations, and whether `_wake_some` will be
        # called there.
        self._to_wake: deque[SuspendedRequest] = deque()
        self._waking_soon = False
        self._wake: Callable[[SuspendedRequest, bool], None] = lambda suspended, last: None
        self._gather: Callable[[Callable[[], None]], None] = lambda call: call()
        self._call_soon: Callable[[Callable[[], None]], None] = lambda call: call()
        store.on_arrival(self._arrived)

    def __len__(self) -> int:
        return self._alive

    def on_wake(
        self,
        wake: Callable[[SuspendedRequest, bool], None],
        call_soon: Callable[[Callable[[], None]], None] = lambda call: call(),
        gather: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Call `wake(request, last)` for each request that is to be retried.

        `call_soon` calls a function in the next loop iteration; `gather` does so after a first
        arrival, perhaps a little later.
        """
        self._wake = wake
        self._call_soon = call_soon
        self._gather = gather or call_soon

    def count_of(self, client: ClientId) -> int:
        """How many requests of a client are suspended."""
        return len(self._by_client.get(client, ()))

    def add(self, client: ClientId, pending_response: Any, suspend: Suspend) -> None:
        """Suspend a request."""
        suspended = SuspendedRequest(client, pending_response, suspend)
        queue, missed = suspend.queue, False
        if isinstance(queue, WaitQueue):
            queue.waiting[suspended] = None
            self.in_wait_queues += 1
            self.watch(queue)
            missed = queue.notifications != suspend.notifications
        else:
            assert isinstance(queue, ConsumeQueue)
            self._by_queue.setdefault(queue, {})[suspended] = None
            self._store.watch(queue)
        self._by_client.setdefault(client, {})[suspended] = None
        self._alive += 1
        self._number += 1
        heapq.heappush(self._deadlines, (suspend.deadline_ms, self._number, suspended))
        if len(self._deadlines) > 2 * self._alive + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].alive]
            heapq.heapify(self._deadlines)
        if missed and isinstance(queue, WaitQueue):
            self.wake_next(queue)

    def watch(self, wait_queue: WaitQueue, count_max: int | None = None) -> bool:
        """Watch for arrivals in all queues of a wait queue, or in some more of them; whether all
        are watched."""
        unwatched = wait_queue.unwatched
        for queue in list(islice(unwatched, count_max)):
            del unwatched[queue]
            self._by_queue.setdefault(queue, {})[wait_queue] = None
            self._store.watch(queue)
        return not unwatched

    def wake_next(self, wait_queue: WaitQueue) -> None:
        """Retry the next request of a wait queue. A nested call makes the outer one retry one
        more.

        A request that is about to be added, decided before in the same loop iteration, is retried
        when it is added.
        """
        wait_queue.notifications += 1
        wait_queue.wakeups_due += 1
        if wait_queue.waking:
            return
        wait_queue.waking = True
        try:
            while wait_queue.wakeups_due and wait_queue.waiting:
                wait_queue.wakeups_due -= 1
                wait_queue.woken += 1
                waiting = wait_queue.waiting
                suspended = next(reversed(waiting) if wait_queue.newest_first else iter(waiting))
                self._forget(suspended)
                self._wake(suspended, False)
        finally:
            wait_queue.waking = False
            wait_queue.wakeups_due = wait_queue.woken = 0

    def pass_on(self, suspended: SuspendedRequest) -> None:
        """The woken request can't take an answer now: wake the next of its wait queue as well."""
        if isinstance(suspended.suspend.queue, WaitQueue):
            self.wake_next(suspended.suspend.queue)

    def unwatch(self, wait_queue: WaitQueue) -> Iterator[None]:
        """Stop watching the queues of a wait queue that is empty and no longer used, one after
        another."""
        for queue in list(wait_queue.queues):
            self._leave(queue, wait_queue)
            yield

    def drop(self, client: ClientId) -> None:
        """Forget the requests of a client that has disconnected."""
        for suspended in self._by_client.pop(client, {}):
            self._forget(suspended)

    def answer(self, client: ClientId) -> None:
        """Answer the requests of a client now: its connection is about to be closed.

        Java's clients do not notice a closed connection while they wait for a response. They would
        wait for the whole timeout of a pull, which is 30 s.
        """
        for suspended in list(self._by_client.get(client, ())):
            if suspended.alive:  # a woken request may end another one
                self._forget(suspended)
                self._wake(suspended, True)

    def wake_queue(self, queue: ConsumeQueue) -> None:
        """Retry the requests of a queue because something other than an arrival has changed."""
        self._arrived(queue)

    def due(self) -> int:
        """The nearest deadline, or a time that never comes."""
        while self._deadlines and not self._deadlines[0][2].alive:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else 1 << 62

    def tick(self, now_ms: int) -> None:
        """Answer requests whose deadline has passed; the rest of very many in the next tick."""
        for _ in range(WAKES_MAX):
            if self.due() > now_ms:
                break
            suspended = heapq.heappop(self._deadlines)[2]
            self._forget(suspended)
            self._wake(suspended, True)

    def clock_stepped(self, step_ms: int) -> None:
        """Answer all requests in the next tick if the clock was set back.

        Their deadlines would be too far away; if it was set forward, they have passed anyway.
        Clients repeat a request that was answered early.
        """
        if step_ms < 0:
            self._deadlines = [(0, number, request) for _, number, request in self._deadlines]

    def _arrived(self, queue: ConsumeQueue) -> None:
        for waiting in self._by_queue.pop(queue, {}):
            if isinstance(waiting, SuspendedRequest):
                self._to_wake.append(waiting)
                continue
            if queue.deleted:  # there may be a new one of its name
                del waiting.queues[queue]
                waiting.resolved_from = ()
            else:
                waiting.unwatched[queue] = None
            self.wake_next(waiting)
            if waiting.waiting:
                self.watch(waiting)
        if self._to_wake and not self._waking_soon:
            self._waking_soon = True
            self._gather(self._wake_some)

    def _wake_some(self) -> None:
        """Wake pulls, and the rest of very many in the next loop iterations."""
        try:
            for _ in range(min(len(self._to_wake), WAKES_MAX)):
                suspended = self._to_wake.popleft()
                if suspended.alive:
                    self._forget(suspended)
                    self._wake(suspended, False)
        finally:
            self._waking_soon = bool(self._to_wake)
            if self._waking_soon:
                self._call_soon(self._wake_some)

    def _leave(self, queue: ConsumeQueue, member: SuspendedRequest | WaitQueue) -> None:
        waiting = self._by_queue.get(queue)
        if waiting is not None and waiting.pop(member, 0) is None and not waiting:
            del self._by_queue[queue]

    def _forget(self, suspended: SuspendedRequest) -> None:
        suspended.alive = False
        self._alive -= 1
        queue = suspended.suspend.queue
        if isinstance(queue, WaitQueue):
            del queue.waiting[suspended]
            self.in_wait_queues -= 1
        else:
            assert isinstance(queue, ConsumeQueue)
            self._leave(queue, suspended)
        of_client = self._by_client.get(suspended.client)
        if of_client is not None and of_client.pop(suspended, 0) is None and not of_client:
            del self._by_client[suspended.client]
