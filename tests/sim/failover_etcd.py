"""A model of etcd and of its client, for the simulation of failover.

The model executes the messages that controllers send, one after another: keys with revisions,
transactions, leases, watches. Its client has the interface of `EtcdClient` and sends requests again
as that does, so a request may be executed twice, or long after its sender has given up.

* **Leases** expire in virtual time; also earlier, on command. A new leader prolongs all of them.
* The **stream** of a watch is late, ends, or stays open and reports nothing.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.controller.broker_set import BrokerSet, decode_broker_set
from penstock.errors import EtcdError, EtcdOutcomeUnknown, EtcdRefused
from penstock.server.controller.etcd.etcd_client import FAILED_PRECONDITION, NOT_FOUND
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_messages import (
    Event,
    Header,
    KeepAliveLine,
    KeyValue,
    LeaseAnswer,
    Message,
    PutAnswer,
    RangeAnswer,
    TxnAnswer,
    TxnPart,
    WatchAnswer,
    WatchLine,
)
from penstock.server.controller.etcd.http_connection import HttpError
from tests.sim.failover_world import Node, Reply, World
from tests.sim.node_loop import NodeLoop

T = TypeVar("T")

NAME = "set"
KEYS = Keys("/")
STATE_KEY = KEYS.broker_set(NAME)
EXPIRY_MS = 250
"""How often etcd looks for expired leases."""
CALL_MS = 10_000
ATTEMPT_MS = (1_000, 2_000, 4_000)
PAUSE_MS = 50
"""As in `etcd_client`."""
BLOCKED_MS = 100
"""How long a stream waits before the next attempt while the network is blocked."""
LATE_MS = 1_000
"""A report that is executed so long after it was sent is counted."""


@dataclass
class Lease:
    """A lease and the keys that vanish with it."""

    ttl_ms: int
    until_ms: int
    keys: set[bytes] = field(default_factory=set)


class Etcd(Node):
    """The cluster, as one node."""

    def __init__(
        self, world: World, changed: Callable[[BrokerSet | None], None], *, compares: bool
    ) -> None:
        """`changed` is called with each state of the broker set that is stored."""
        super().__init__("etcd")
        self.revision = 1
        self.keys: dict[bytes, KeyValue] = {}
        self.leases: dict[int, Lease] = {}
        self.streams: list[WatchStream] = []
        self.confirmed_ms = 0
        """When a lease was granted or renewed last."""
        self._history: list[tuple[int, bytes]] = []
        self._compacted = 0
        self._leaderless = False
        self._changed = changed
        self._compares = compares
        self._world = world
        world.every(EXPIRY_MS, self._expire_leases, self)

    # --- what happens to it

    def expire(self, number: int) -> None:
        """A lease is over."""
        lease = self.leases.pop(number)
        self._world.events["lease of a controller expired"] += 1
        self._world.note(f"etcd: a lease expires with {len(lease.keys)} keys")
        self._delete(sorted(lease.keys))

    def lose_leader(self, duration_ms: int) -> None:
        """Nothing is executed until there is a leader again; it prolongs all leases."""
        if self._leaderless:
            return
        self._leaderless = True
        self._world.at(duration_ms, self.elect_leader, self)

    def elect_leader(self) -> None:
        if self._leaderless:
            self._leaderless = False
            for lease in self.leases.values():
                lease.until_ms = self._world.now_ms + lease.ttl_ms

    def compact(self) -> None:
        """Old changes can't be watched any more."""
        self._compacted = self.revision
        self._history.clear()

    def _expire_leases(self) -> None:
        if not self._leaderless:
            now_ms = self._world.now_ms
            for number in [one for one, lease in self.leases.items() if lease.until_ms <= now_ms]:
                self.expire(number)

    # --- requests

    def serve(self, path: str, message: Message, sent_ms: int, reply: Reply) -> None:
        """Execute a request; the answer may be an EtcdRefused."""
        if self._leaderless:
            return
        try:
            answer = self._execute(path, message)
        except EtcdRefused as error:
            reply(error)
            return
        if _reports(path, message) and self._world.now_ms - sent_ms >= LATE_MS:
            self._world.events["report written late"] += 1
        reply(answer)

    def _execute(self, path: str, message: Message) -> Any:
        if path == "/v3/kv/range":
            return self._range(message)
        if path == "/v3/kv/txn":
            return self._txn(message)
        if path == "/v3/kv/put":
            self._write([message], [])
            return PutAnswer(Header(self.revision))
        number = int(message["ID"])
        if path == "/v3/lease/grant":
            if number in self.leases:
                raise EtcdRefused("lease already exists", grpc_code=FAILED_PRECONDITION)
            self.leases[number] = Lease(int(message["TTL"]) * 1_000, 0)
        else:
            assert path == "/v3/lease/keepalive"
        lease = self.leases.get(number)
        if lease is None:
            return KeepAliveLine(LeaseAnswer(number, 0))
        self.confirmed_ms = self._world.now_ms
        lease.until_ms = self._world.now_ms + lease.ttl_ms
        answer = LeaseAnswer(number, lease.ttl_ms // 1_000)
        return answer if path == "/v3/lease/grant" else KeepAliveLine(answer)

    def _range(self, message: Message) -> RangeAnswer:
        found = [self.keys[key] for key in self._named(message)]
        return RangeAnswer(Header(self.revision), found)

    def _named(self, message: Message) -> list[bytes]:
        low = _bytes(message["key"])
        if "range_end" not in message:
            return [low] if low in self.keys else []
        high = _bytes(message["range_end"])
        return sorted(key for key in self.keys if low <= key < high)

    def _txn(self, message: Message) -> TxnAnswer:
        succeeded = all(map(self._holds, message.get("compare", ())))
        parts, puts, deleted = [], [], []
        for step in message.get("success" if succeeded else "failure", ()):
            ((kind, request),) = step.items()
            if kind == "request_range":
                parts.append(TxnPart(self._range(request)))
            elif kind == "request_put":
                puts.append(request)
            else:
                deleted += self._named(request)
        if "compare" in message and "range_end" in message["compare"][0]:
            what = "reports forgotten" if succeeded else "report written meanwhile"
            self._world.events[what] += 1
        self._write(puts, deleted)
        return TxnAnswer(Header(self.revision), succeeded, parts)

    def _holds(self, condition: Message) -> bool:
        wanted = int(condition["mod_revision"])
        found = [self.keys[key].mod_revision for key in self._named(condition)]
        if condition["result"] == "LESS":
            return all(revision < wanted for revision in found)
        return not self._compares or (found or [0]) == [wanted]

    # --- changes

    def _write(self, puts: list[Message], deleted: list[bytes]) -> None:
        for request in puts:
            if int(request["lease"]) and int(request["lease"]) not in self.leases:
                raise EtcdRefused("requested lease not found", grpc_code=NOT_FOUND)
        if not puts and not deleted:
            return
        self.revision += 1
        happened = [self._remove(key) for key in deleted]
        happened += [self._put(request) for request in puts]
        self._report(happened)
        for event in happened:
            if event.kv.key == STATE_KEY:
                state = None if event.type == "DELETE" else decode_broker_set(event.kv.value)
                self._changed(state)

    def _delete(self, keys: list[bytes]) -> None:
        if keys:
            self._write([], keys)

    def _put(self, request: Message) -> Event:
        key, lease = _bytes(request["key"]), int(request["lease"])
        before = self.keys.get(key)
        if before is not None and before.lease in self.leases:
            self.leases[before.lease].keys.discard(key)
        if lease:
            self.leases[lease].keys.add(key)
        created = self.revision if before is None else before.create_revision
        kv = KeyValue(key, _bytes(request["value"]), created, self.revision, lease)
        self.keys[key] = kv
        return Event("PUT", kv)

    def _remove(self, key: bytes) -> Event:
        before = self.keys.pop(key)
        if before.lease in self.leases:
            self.leases[before.lease].keys.discard(key)
        return Event("DELETE", KeyValue(key, mod_revision=self.revision))

    def _report(self, happened: list[Event]) -> None:
        line = _line(WatchAnswer(Header(self.revision), events=happened))
        self._history.append((self.revision, line))
        for stream in self.streams:
            stream.push(line)

    # --- watches

    def watch(self, stream: WatchStream, start: int, reply: Reply) -> None:
        """Report all changes from a revision on."""
        if self._leaderless:
            return
        stream.push(_line(WatchAnswer(Header(self.revision), created=True)))
        if start <= self._compacted:
            self._world.events["watch compacted"] += 1
            answer = WatchAnswer(canceled=True, compact_revision=self._compacted)
            stream.push(_line(answer))
        else:
            for revision, line in self._history:
                if revision >= start:
                    stream.push(line)
            self.streams.append(stream)
        reply(True)


class WatchStream:
    """The stream of a watch, from etcd to a controller. Lines arrive in order."""

    def __init__(self, etcd: Etcd, loop: NodeLoop) -> None:
        self._etcd = etcd
        self._loop = loop
        self._world = loop.world
        self.node = loop.node
        self._life = self.node.life
        self._buffer: list[bytes] = []
        self._moving = False
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held_until_ms = 0

    def push(self, line: bytes) -> None:
        """etcd writes a line."""
        if self.node.life != self._life:
            return
        self._buffer.append(line)
        if not self._moving:
            self._move(self._world.delay_ms(self._etcd, self.node))

    def hold(self, duration_ms: int) -> None:
        """Let nothing arrive for a while."""
        self._held_until_ms = self._world.now_ms + duration_ms

    def cut(self, *, silent: bool) -> None:
        """The connection is lost; with `silent` the controller is not told."""
        self._world.events["watch interrupted"] += 1
        self.close()
        if not silent:
            self._loop.enter(lambda: self._lines.put_nowait(None))

    def close(self) -> None:
        """Nothing arrives any more."""
        self._buffer.clear()
        if self in self._etcd.streams:
            self._etcd.streams.remove(self)

    def _move(self, delay_ms: int) -> None:
        self._moving = True
        self._world.at(
            max(delay_ms, self._held_until_ms - self._world.now_ms), self._arrive, self.node
        )

    def _arrive(self) -> None:
        self._moving = False
        if not self._buffer:
            return
        if self._world.blocked(self._etcd, self.node) or self._world.now_ms < self._held_until_ms:
            self._move(BLOCKED_MS)
            return
        count = self._world.rng.randint(1, len(self._buffer)) if len(self._buffer) > 1 else 1
        lines, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._buffer:
            self._move(self._world.rng.choice((1, 30, 300)))

        def take() -> None:
            for line in lines:
                self._lines.put_nowait(line)

        self._loop.enter(take)

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            line = await self._lines.get()
            if line is None:
                raise EtcdError("the connection is lost")
            yield line


class SimulatedEtcdClient:
    """Has the interface of `EtcdClient`."""

    def __init__(self, etcd: Etcd, loop: NodeLoop) -> None:
        self._etcd = etcd
        self._loop = loop
        self._world = loop.world
        self.call_ms = CALL_MS

    async def call(self, path: str, message: Message, kind: type[T]) -> T:
        """The answer to a request. Raises EtcdRefused or EtcdOutcomeUnknown."""
        deadline_ms, pause_ms, attempt = self._world.now_ms + self.call_ms, PAUSE_MS, 0
        while True:
            wait_ms = ATTEMPT_MS[min(attempt, len(ATTEMPT_MS) - 1)]
            wait_ms = min(wait_ms, deadline_ms - self._world.now_ms)
            if wait_ms <= 0:
                raise EtcdOutcomeUnknown(f"no answer of etcd to {path}")
            serve = partial(self._etcd.serve, path, message, self._world.now_ms)
            answer = await self._ask(serve, wait_ms)
            if isinstance(answer, EtcdRefused):
                raise answer
            if answer is not None:
                assert isinstance(answer, kind)
                return answer
            attempt += 1
            await self._sleep(pause_ms)
            pause_ms *= 2

    async def exchange(self, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        """The same with encoded messages."""
        answer = await self.call(path, msgspec.json.decode(body), msgspec.Struct)
        return read(msgspec.json.encode(answer))

    @asynccontextmanager
    async def stream(self, path: str, message: Message) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a watch. Raises EtcdError, also while the lines are read."""
        stream = WatchStream(self._etcd, self._loop)
        start = int(message["create_request"]["start_revision"])
        try:
            if not await self._ask(
                lambda reply: self._etcd.watch(stream, start, reply), ATTEMPT_MS[-1]
            ):
                raise EtcdError("no answer to a watch")
            yield stream.lines()
        except HttpError as error:
            raise EtcdError(str(error)) from None
        finally:
            stream.close()

    def leave(self) -> None:
        """A watch that reports nothing was noticed; here is only one member."""
        self._world.events["silent watch noticed"] += 1

    async def _ask(self, serve: Callable[[Reply], None], wait_ms: int) -> Any:
        answered = self._loop.create_future()

        def done(answer: Any) -> None:
            if not answered.done():
                self._loop.enter(lambda: answered.set_result(answer))

        self._world.call(self._loop.node, self._etcd, serve, done, wait_ms)
        return await answered

    async def _sleep(self, ms: int) -> None:
        woken = self._loop.create_future()

        def wake() -> None:
            if not woken.done():
                self._loop.enter(lambda: woken.set_result(None))

        self._world.at(ms, wake, self._loop.node)
        await woken


def _reports(path: str, message: Message) -> bool:
    """Whether a request writes or deletes reports; it has no condition then."""
    if path != "/v3/kv/txn" or "compare" in message:
        return False
    return "request_range" not in message["success"][0]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _line(answer: WatchAnswer) -> bytes:
    return msgspec.json.encode(WatchLine(answer))
