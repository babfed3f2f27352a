"""Compresses bodies in a thread, in the order of their sends; the event loop does not wait.

Bodies are handed over in groups, because a change of threads takes as long as compressing a few
kilobytes. Messages behind them of the same topic wait here too, so that none is overtaken.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.client.producer.send_codec import PendingSend

if TYPE_CHECKING:
    from penstock.client.producer.outgoing import Packer

GROUP_BYTES: Final = 1024 * 1024
"""How much is compressed at a time; it takes about 20 ms."""


class QueueOwner(Protocol):
    """What the queue needs of its sender."""

    packer: "Packer | None"

    def compressed(self, pending: PendingSend, body: bytes, sys_flag: int) -> None:
        """The body can be sent, with these compression flags."""

    def dropped(self, pending: PendingSend) -> None:
        """The client was closed before the body was compressed."""


class CompressionQueue:
    """Pending sends, in order, of which some have to be compressed."""

    def __init__(
        self, owner: QueueOwner, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._owner = owner
        self._spawn = spawn
        self._waiting: deque[PendingSend] = deque()
        self._topics: Counter[str] = Counter()
        self._running = False

    def holds(self, topic: str) -> bool:
        """Whether sends of this topic wait here."""
        return self._topics[topic] > 0

    def add(self, pending: PendingSend) -> None:
        """Pass it to `owner.compressed` after those before it."""
        self._waiting.append(pending)
        self._topics[pending.topic] += 1
        if not self._running:
            self._running = True
            self._spawn(self._run())

    async def _run(self) -> None:
        packer = self._owner.packer
        assert packer is not None
        group: deque[PendingSend] = deque()
        try:
            while self._waiting:
                group = self._take_group()
                bodies = [pending.body for pending in group if pending.uncompressed]
                packed = iter(await asyncio.to_thread(_compress_all, packer, bodies))
                while group:
                    pending = group.popleft()
                    self._remove(pending)
                    body, flag = next(packed) if pending.uncompressed else (pending.body, 0)
                    self._owner.compressed(pending, body, flag)
        finally:
            self._running = False
            for pending in (*group, *self._waiting):  # only if the client was closed
                self._remove(pending)
                self._owner.dropped(pending)
            self._waiting.clear()

    def _take_group(self) -> deque[PendingSend]:
        group = deque([self._waiting.popleft()])
        size = len(group[0].body)
        while self._waiting and size + len(self._waiting[0].body) <= GROUP_BYTES:
            size += len(self._waiting[0].body)
            group.append(self._waiting.popleft())
        return group

    def _remove(self, pending: PendingSend) -> None:
        self._topics[pending.topic] -= 1
        if not self._topics[pending.topic]:
            del self._topics[pending.topic]


def _compress_all(packer: "Packer", bodies: list[bytes]) -> list[tuple[bytes, int]]:
    return [packer.compressed(body) for body in bodies]
