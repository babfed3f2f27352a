"""Committed offsets: kept in memory and stored at the brokers or in a file.

An offset is that of the next message to consume. Clustering consumers store their offsets at the
brokers; broadcast consumers in memory or in a file of RocketMQ's format. Changed offsets are stored
every second, when a queue is released and when the consumer closes. (Java's clients do it every
five seconds and also with each pull; `pull_loop` says why ours do not.)
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from penstock.client.client_session import Session
from penstock.errors import BadSetting, BodyError, PenstockError, Refused
from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ResetOffsetBody
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_nonnegative

log = logging.getLogger(__name__)

PERSIST_MS = 1_000
PERSIST_ALL_MS = 60_000
"""Interval of storing unchanged offsets again: a crashed broker may have lost them."""
CALL_MS = 5_000
FILE_BYTES_MAX = 16 * 1024 * 1024


class OffsetStore(Protocol):
    """Stores the committed offsets of a consumer."""

    async def load(self) -> None:
        """Load stored offsets, before the first queue is assigned."""

    async def read(self, queue: MessageQueue, *, exact: bool = False) -> int | None:
        """The stored offset; None if there is none. Raises PenstockError.

        If nothing is stored and the queue still has its first message, brokers return 0 unless
        `exact` is set.
        """

    def get(self, queue: MessageQueue) -> int | None:
        """The offset in memory."""

    def update(self, queue: MessageQueue, offset: int, *, only_up: bool = True) -> None:
        """Set the offset in memory; ignored for a frozen queue."""

    def freeze(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset and ignore updates until the queue is forgotten."""

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Store an offset now; raises PenstockError."""

    async def persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store changed offsets, of these queues or of all; failures are logged and retried."""

    def forget(self, queue: MessageQueue) -> None:
        """Remove a queue from memory."""

    def snapshot(self, topic: str | None = None) -> dict[MessageQueue, int]:
        """The offsets in memory, of one topic or of all."""


class OffsetTable:
    """Offsets in memory and those that are stored."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._stored: dict[MessageQueue, int] = {}
        self._frozen: set[MessageQueue] = set()

    def get(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    def update(self, queue: MessageQueue, offset: int, *, only_up: bool = True) -> None:
        if queue in self._frozen:
            return
        if not only_up or offset > self._offsets.get(queue, -1):
            self._offsets[queue] = offset

    def freeze(self, queue: MessageQueue, offset: int) -> None:
        self._offsets[queue] = offset
        self._frozen.add(queue)

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self._stored.pop(queue, None)
        self._frozen.discard(queue)

    def snapshot(self, topic: str | None = None) -> dict[MessageQueue, int]:
        return {q: n for q, n in self._offsets.items() if topic is None or q.topic == topic}

    def _unsaved(self, queues: Iterable[MessageQueue] | None) -> list[MessageQueue]:
        chosen = list(self._offsets) if queues is None else queues
        return [
            queue
            for queue in chosen
            if queue in self._offsets and self._stored.get(queue) != self._offsets[queue]
        ]


class RemoteBrokerOffsetStore(OffsetTable):
    """Offsets of a clustering consumer, stored at the broker of each queue."""

    def __init__(self, session: Session, group: str) -> None:
        super().__init__()
        self._session = session
        self._group = group
        self._all_stored_ms = session.clock.now_ms()
        self._commit_locks: dict[MessageQueue, asyncio.Lock] = {}
        # By topic and broker name.
        self._first_commits: dict[tuple[str, str], asyncio.Lock] = {}
        self._committed: set[tuple[str, str]] = set()
        self._failing: dict[str, str] = {}  # broker name → last logged failure

    def freeze(self, queue: MessageQueue, offset: int) -> None:
        super().freeze(queue, offset)
        self._stored.pop(queue, None)  # a commit in flight may store another offset

    async def load(self) -> None:
        """Nothing to do: offsets are queried queue by queue."""

    async def read(self, queue: MessageQueue, *, exact: bool = False) -> int | None:
        offset = await stored_offset(
            self._session, self._group, queue, exact=exact, timeout_ms=CALL_MS
        )
        if offset is None:
            return None
        self.update(queue, offset, only_up=False)
        self._stored[queue] = offset
        return offset

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        # One at a time: Apache's brokers may handle two commits in reverse order.
        async with self._commit_locks.setdefault(queue, asyncio.Lock()):
            table = (queue.topic, queue.broker_name)
            if table in self._committed:
                await self._commit(queue, offset)
                return
            # Of a group's first commits in a topic, they keep only one if they handle several at
            # once: each creates the topic's table.
            async with self._first_commits.setdefault(table, asyncio.Lock()):
                await self._commit(queue, offset)
                self._committed.add(table)

    async def _commit(self, queue: MessageQueue, offset: int) -> None:
        fields = {**_fields(self._group, queue), "commitOffset": str(offset)}
        peer = await peer_of_queue(self._session, queue)
        await self._session.call(
            peer, RequestCode.UPDATE_CONSUMER_OFFSET, fields, timeout_ms=CALL_MS
        )
        self._stored[queue] = offset

    async def persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        if queues is None:
            now_ms = self._session.clock.now_ms()
            if now_ms - self._all_stored_ms >= PERSIST_ALL_MS:
                self._all_stored_ms = now_ms
                self._stored.clear()
        await asyncio.gather(*(self._persist(queue) for queue in self._unsaved(queues)))

    async def _persist(self, queue: MessageQueue) -> None:
        offset = self._offsets.get(queue)
        if offset is None:
            return
        try:
            await self.commit(queue, offset)
        except PenstockError as error:
            self._log_failure(queue, offset, str(error))
        else:
            if self._failing.pop(queue.broker_name, None) is not None:
                log.info("%s: broker %s stores offsets again", self._group, queue.broker_name)
        if queue not in self._offsets:  # forgotten meanwhile
            self._stored.pop(queue, None)

    def _log_failure(self, queue: MessageQueue, offset: int, problem: str) -> None:
        """Log a failure once per broker: a broker that is down has many queues."""
        if self._failing.get(queue.broker_name) != problem:
            self._failing[queue.broker_name] = problem
            log.warning(
                "%s: cannot store offsets at broker %s (offset %d of %s/%d and maybe others): %s",
                self._group,
                queue.broker_name,
                offset,
                queue.topic,
                queue.queue_id,
                problem,
            )


async def stored_offset(
    session: Session,
    group: str,
    queue: MessageQueue,
    *,
    exact: bool,
    timeout_ms: int | None = None,
) -> int | None:
    """The offset that the queue's broker has stored for a group; see `OffsetStore.read`."""
    peer = await peer_of_queue(session, queue)
    fields = _fields(group, queue)
    if exact:
        fields["setZeroIfNotFound"] = "false"
    answer = await session.call(
        peer,
        RequestCode.QUERY_CONSUMER_OFFSET,
        fields,
        timeout_ms=timeout_ms,
        good=(ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND),
    )
    return offset_of_response(answer.ext) if answer.code == ResponseCode.SUCCESS else None


def _fields(group: str, queue: MessageQueue) -> dict[str, str]:
    return {
        "consumerGroup": group,
        "topic": queue.topic,
        "queueId": str(queue.queue_id),
        "bname": queue.broker_name,
    }


async def peer_of_queue(session: Session, queue: MessageQueue) -> Peer:
    """The broker of a queue: its master, else a replica; queries the route if necessary."""
    if session.address_of(queue.broker_name) is None:
        await session.find_route(queue.topic)
    return session.broker(queue.broker_name)


def offset_of_response(ext: Mapping[str, str]) -> int:
    """The offset in a broker's response; raises Refused if there is none."""
    text = ext.get("offset", "")
    offset = parse_nonnegative(text)
    if offset is None:
        raise Refused(f"the response has the bad offset {text[:40]!r}")
    return offset


class LocalFileOffsetStore(OffsetTable):
    """Offsets of a broadcast consumer, in memory or in a file that Java's clients can read.

    A new file is written and renamed; the previous one is kept as `.bak` and is read if the file is
    missing or empty. Queues that are not assigned now keep their entries.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._path = None if path is None else Path(path)

    async def load(self) -> None:
        """Read the file if it exists; raises BadSetting if it cannot be read."""
        if self._path is not None:
            self._stored = self._read_file(self._path)

    async def read(self, queue: MessageQueue, *, exact: bool = False) -> int | None:
        offset = self._offsets.get(queue, self._stored.get(queue))
        if offset is not None:
            self.update(queue, offset)
        return offset

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        self.update(queue, offset, only_up=False)
        await self.persist([queue])

    async def persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        due = {queue: self._offsets[queue] for queue in self._unsaved(queues)}
        if not due:
            return
        if self._path is not None:
            try:
                self._write_file(self._path, {**self._stored, **due})
            except OSError as error:
                log.warning("cannot store offsets in %s: %s", self._path, error)
                return
        self._stored.update(due)

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)  # its entry in the file stays
        self._frozen.discard(queue)

    def _read_file(self, path: Path) -> dict[MessageQueue, int]:
        problem = ""
        for file in (path, _backup(path)):
            try:
                data = _read_limited(file)
                if data.strip():
                    if file != path:
                        log.warning("%s: using the .bak", problem or f"{path} is missing or empty")
                    table = fastjson.decode(data, ResetOffsetBody).offset_table
                    return {queue: offset for queue, offset in table.items() if offset >= 0}
            except (OSError, BodyError) as error:
                problem = problem or f"{file}: {error}"
        if problem:
            raise BadSetting(problem, hint="repair or remove the file; without it start_at applies")
        return {}

    def _write_file(self, path: Path, table: dict[MessageQueue, int]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".tmp")
        new.write_bytes(fastjson.encode_pretty(ResetOffsetBody(offset_table=table)))
        if path.exists():
            os.replace(path, _backup(path))
        os.replace(new, path)


def make_offset_store(
    session: Session, group: str, *, broadcast: bool, offsets_path: str | os.PathLike[str] | None
) -> OffsetStore:
    """The offset store of a consumer: local for broadcast, else at the brokers."""
    if broadcast:
        return LocalFileOffsetStore(offsets_path)
    return RemoteBrokerOffsetStore(session, group)


def _read_limited(path: Path) -> bytes:
    """The content of a file, empty if there is none; raises BodyError if it is too long."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise BodyError(f"the file has more than {FILE_BYTES_MAX} bytes")
    return data


def _backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")
