"""Virtual time and the network of the simulation of failover.

* A **node** is a process. Its timers end with it. While it is **paused** nothing happens at it, and
  what should have happened comes late.
* A **message** is lost, or arrives after a delay, sometimes after seconds. It may arrive when its
  sender has ended, or when its receiver has been started again.
* A **call** is a message and an answer. Its caller does not know what became of a call whose answer
  does not arrive in time.
* Messages from one node to another may be **blocked**, in one direction or both.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

Call = Callable[[], None]
Reply = Callable[[Any], None]
"""Takes the answer to a call."""


class Node:
    """A process, or a machine with one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = True
        self.life = 0
        """Counts the processes; timers of an earlier one have no effect."""
        self.paused_until_ms = 0
        self.distance_ms = 0
        """How long a message to or from it takes at least."""

    def end(self) -> None:
        """The process ends."""
        self.up = False
        self.life += 1
        self.paused_until_ms = 0


class World:
    """Time, chance and the network."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None) -> None:
        self.rng = rng = random.Random(seed)
        self.now_ms = 0
        self.events: Counter[str] = Counter()
        self.trace = trace
        self.error: BaseException | None = None
        """An error in a process that nobody has handled."""
        self.loss = rng.choice((0.0, 0.01, 0.05))
        self.slow = rng.choice((0.0, 0.01, 0.05, 0.2))
        """How probable it is that a message takes long."""
        self.connections = 0
        """Of brokers to controllers, so far."""
        self._queue: list[tuple[int, int, Call, Node | None, int]] = []
        self._count = 0
        self._blocked: dict[tuple[str, str], int] = {}

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now_ms:6} {text}")

    # --- time

    def at(self, delay_ms: int, call: Call, node: Node | None = None) -> None:
        """Call a function after a delay; with a node, if its process is still running."""
        self._count += 1
        life = 0 if node is None else node.life
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._count, call, node, life))

    def every(self, period_ms: int, call: Callable[[], bool | None], node: Node) -> None:
        """Call a function again and again while a process runs, until it returns False."""

        def again() -> None:
            if call() is not False:
                self.at(period_ms, again, node)

        self.at(self.rng.randint(0, period_ms), again, node)

    def run(self, duration_ms: int) -> None:
        """Let time pass."""
        until_ms, queue = self.now_ms + duration_ms, self._queue
        while queue and queue[0][0] <= until_ms:
            time_ms, count, call, node, life = heapq.heappop(queue)
            self.now_ms = time_ms
            if node is not None:
                if node.life != life:
                    continue
                if node.paused_until_ms > time_ms:
                    heapq.heappush(queue, (node.paused_until_ms, count, call, node, life))
                    continue
            call()
            if self.error is not None:
                raise self.error
        self.now_ms = until_ms

    # --- network

    def block(self, pairs: Iterable[tuple[str, str]], duration_ms: int) -> None:
        """Let no message pass from one node to another."""
        for pair in pairs:
            self._blocked[pair] = self.now_ms + duration_ms

    def heal(self) -> None:
        """The network works from now on."""
        self._blocked.clear()
        self.loss = self.slow = 0.0

    def blocked(self, source: Node, target: Node) -> bool:
        return self._blocked.get((source.name, target.name), 0) > self.now_ms

    def delay_ms(self, source: Node, target: Node, *, slow: float | None = None) -> int:
        rng, slow = self.rng, self.slow if slow is None else slow
        if slow and rng.random() < slow:
            return rng.randint(50, 6000)
        return rng.choice((1, 1, 2, 3, 8)) + source.distance_ms + target.distance_ms

    def send(self, source: Node, target: Node, arrive: Call, refused: Call | None = None) -> None:
        """Send a message. `refused`: nobody listens."""
        if self.blocked(source, target) or (self.loss and self.rng.random() < self.loss):
            return

        def deliver() -> None:
            if not target.up:
                if refused is not None:
                    refused()
            elif target.paused_until_ms > self.now_ms:
                self.at(target.paused_until_ms - self.now_ms, deliver)
            else:
                arrive()

        self.at(self.delay_ms(source, target), deliver)

    def call(
        self,
        source: Node,
        target: Node,
        serve: Callable[[Reply], None],
        done: Reply,
        timeout_ms: int,
    ) -> None:
        """Have the target serve a request; the answer, or None, goes to `done`."""
        waits, life = [True], source.life

        def finish(answer: Any) -> None:
            if waits and source.life == life:
                waits.clear()
                done(answer)

        def reply(answer: Any) -> None:
            self.send(target, source, lambda: finish(answer))

        self.send(source, target, lambda: serve(reply), lambda: finish(None))
        self.at(timeout_ms, lambda: finish(None), source)
