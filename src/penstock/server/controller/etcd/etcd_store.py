"""States of broker sets in etcd, one key each.

A change is one transaction: if the key still has the revision that was read, write it. If the
answer is lost, the same transaction is sent again. It has a number, and the state contains the last
number of each controller. So a transaction that finds another revision also finds whether its own
write took effect before, however many writes of others came after it: the number is in the state.
For that a controller has one write of a broker set under way at a time. Numbers of the WRITERS_MAX
controllers that wrote last are kept, more than begin to write while an answer is waited for.

Reads are linearizable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.clock import Clock, pause
from penstock.controller.broker_set import BrokerSet, decode_broker_set
from penstock.errors import EtcdError, StoreDamaged
from penstock.server.controller.broker_set_store import Versioned
from penstock.server.controller.etcd.etcd_client import EtcdClient
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_messages import (
    KeyValue,
    Message,
    RangeAnswer,
    TxnAnswer,
    delete,
    encode_text,
    get,
    mod_revision_is,
    prefix_request,
    put,
)
from penstock.server.controller.etcd.view import View

WRITERS_MAX: Final = 16
VALUE_BYTES_MAX: Final = 1024 * 1024
"""etcd refuses requests above 1.5 MiB."""
READS_MAX: Final = 100
"""Reads in one transaction; etcd allows 128."""
READ_WINDOW_MS: Final = 10
"""How long a read that is not urgent waits for others, to be sent with them."""
PAGE_KEYS: Final = 1_000


class EtcdStore:
    """A `BrokerSetStore`."""

    def __init__(
        self, client: EtcdClient, keys: Keys, view: View, clock: Clock, *, own: int
    ) -> None:
        """`own` is the number of this controller."""
        self._client = client
        self._keys = keys
        self._view = view
        self._clock = clock
        self._own = own
        self._writes = 0
        self._replacing: dict[str, asyncio.Lock] = {}
        """Broker sets that are being written."""
        self._waiting: dict[str, asyncio.Future[Versioned]] = {}

    async def names(self) -> Iterable[str]:
        found: list[str] = []
        request: Message = prefix_request(self._keys.sets)
        request |= {"keys_only": True, "limit": str(PAGE_KEYS)}
        while True:
            answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
            found += filter(None, (self._keys.set_of(kv.key) for kv in answer.kvs))
            if not answer.more or not answer.kvs:
                return found
            request["key"] = encode_text(answer.kvs[-1].key + b"\0")

    async def read(self, name: str) -> Versioned:
        key = self._keys.broker_set(name)
        request = {"key": encode_text(key)}
        answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        return self._versioned(answer)

    async def read_many(self, names: Iterable[str]) -> Mapping[str, Versioned]:
        wanted = list(dict.fromkeys(names))
        # Shielded, because a read may serve several callers.
        reads = [asyncio.shield(self._read_soon(name)) for name in wanted]
        return dict(zip(wanted, await asyncio.gather(*reads), strict=True))

    async def replace(self, name: str, state: BrokerSet | None, version: int) -> bool:
        lock = self._replacing.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                if state is None:
                    return await self._delete(name, version)
                return await self._put(name, state, version)
        finally:
            if not lock.locked() and self._replacing.get(name) is lock:
                del self._replacing[name]

    async def _put(self, name: str, state: BrokerSet, version: int) -> bool:
        key = self._keys.broker_set(name)
        self._writes += 1
        write = f"{self._own:x}-{self._writes}"
        written = msgspec.structs.replace(state, writes=with_write(state.writes, write))
        value = written.encode()
        if len(value) > VALUE_BYTES_MAX:
            raise EtcdError.over(f"the state of {name}", figure=len(value), limit=VALUE_BYTES_MAX)
        answer = await self._change(key, version, put(key, value))
        if answer.succeeded:
            revision = answer.header.revision
            self._view.learn(KeyValue(key, value, mod_revision=revision))
            return True
        found = self._versioned(answer.ranges()[0]).state
        return found is not None and write in found.writes

    def last_seen(self, name: str) -> BrokerSet | None:
        found = self._view.states.get(name)
        return None if found is None else found[1]

    def all_last_seen(self) -> Iterable[BrokerSet]:
        return [state for _, state in self._view.states.values()]

    async def _delete(self, name: str, version: int) -> bool:
        key = self._keys.broker_set(name)
        answer = await self._change(key, version, delete(key))
        if answer.succeeded:
            self._view.forget_state(name, answer.header.revision)
            return True
        # If it was deleted at all since, by this request or another, that is what was asked for.
        left = answer.ranges()[0].kvs
        return not left or left[0].create_revision > version

    async def _change(self, key: bytes, version: int, change: Message) -> TxnAnswer:
        message = {
            "compare": [mod_revision_is(key, version)],
            "success": [change],
            "failure": [get(key)],
        }
        return await self._client.call("/v3/kv/txn", message, TxnAnswer)

    def _versioned(self, answer: RangeAnswer) -> Versioned:
        if not answer.kvs:
            return Versioned(None, 0)
        kv = answer.kvs[0]
        self._view.learn(kv)
        return Versioned(decode_broker_set(kv.value), kv.mod_revision)

    # --- reads of many

    def _read_soon(self, name: str) -> asyncio.Future[Versioned]:
        """Read with the next batch."""
        found = self._waiting.get(name)
        if found is None:
            if not self._waiting:
                self._batching = asyncio.ensure_future(self._read_waiting())
            found = self._waiting[name] = asyncio.get_running_loop().create_future()
        return found

    async def _read_waiting(self) -> None:
        await pause(self._clock, READ_WINDOW_MS)
        waiting, self._waiting = self._waiting, {}
        names = list(waiting)
        for start in range(0, len(names), READS_MAX):
            await self._read_batch({n: waiting[n] for n in names[start : start + READS_MAX]})

    async def _read_batch(self, batch: Mapping[str, asyncio.Future[Versioned]]) -> None:
        message = {"success": [get(self._keys.broker_set(name)) for name in batch]}
        try:
            answer = await self._client.call("/v3/kv/txn", message, TxnAnswer)
            answers = answer.ranges()
            if len(answers) != len(batch):
                raise EtcdError("etcd did not answer all reads of a transaction")
        except EtcdError as error:
            for future in batch.values():
                if not future.done():
                    future.set_exception(error)
            return
        for future, found in zip(batch.values(), answers, strict=True):
            if not future.done():
                self._resolve(future, found)

    def _resolve(self, future: asyncio.Future[Versioned], found: RangeAnswer) -> None:
        try:
            future.set_result(self._versioned(found))
        except StoreDamaged as error:
            future.set_exception(error)


def with_write(writes: Sequence[str], write: str) -> tuple[str, ...]:
    """The last writes of all controllers after another one."""
    writer = write.partition("-")[0]
    others = [one for one in writes if one.partition("-")[0] != writer]
    return (*others, write)[-WRITERS_MAX:]
