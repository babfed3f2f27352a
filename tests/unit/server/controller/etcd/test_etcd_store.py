"""States of broker sets in etcd: compare-and-swap, also when answers are lost."""

from __future__ import annotations

import asyncio
import base64
import itertools
from typing import Any, cast

import msgspec
import pytest

from penstock.controller.broker_set import BrokerSet
from penstock.errors import EtcdError, StoreDamaged
from penstock.server.controller.etcd import etcd_store
from penstock.server.controller.etcd.etcd_client import EtcdClient
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_store import WRITERS_MAX, EtcdStore, with_write
from penstock.server.controller.etcd.view import View
from penstock.testing.virtual_clock import VirtualClock

from .etcd_model import EtcdModel

KEYS = Keys("/p/")
NAME = "broker/ä 1"
STATE = BrokerSet("c", NAME, {}, 1)
TXN = "/v3/kv/txn"
NUMBERS = itertools.count(1)


def store_of(etcd: EtcdModel, clock: VirtualClock | None = None) -> EtcdStore:
    own = next(NUMBERS)
    view = View(KEYS, own)
    return EtcdStore(cast(EtcdClient, etcd), KEYS, view, clock or VirtualClock(), own=own)


def with_epoch(state: BrokerSet, epoch: int) -> BrokerSet:
    return msgspec.structs.replace(state, master_epoch=epoch)


def test_a_state_is_written_if_it_has_not_changed() -> None:
    async def main() -> None:
        store = store_of(EtcdModel())
        assert await store.read(NAME) == (None, 0)
        assert await store.replace(NAME, STATE, 0)
        assert not await store.replace(NAME, STATE, 0)
        state, version = await store.read(NAME)
        assert state is not None
        assert (state.name, version) == (NAME, 2)
        assert store.last_seen(NAME) == state
        assert await store.replace(NAME, with_epoch(state, 1), version)
        assert not await store.replace(NAME, with_epoch(state, 1), version)
        assert list(await store.names()) == [NAME]

    asyncio.run(main())


def test_a_write_whose_answer_was_lost_took_effect_once() -> None:
    async def main() -> None:
        etcd = EtcdModel()
        store = store_of(etcd)
        etcd.lose_answer(TXN)
        assert await store.replace(NAME, STATE, 0)
        state, version = await store.read(NAME)
        assert state is not None
        assert len(state.writes) == 1
        etcd.lose_answer(TXN)
        assert await store.replace(NAME, with_epoch(state, 1), version)
        assert etcd.revision == version + 1

    asyncio.run(main())


def test_a_lost_answer_is_found_below_the_writes_of_others() -> None:
    """Another controller has built on our write before we ask again."""

    async def main() -> None:
        etcd = EtcdModel()
        store, other = store_of(etcd), store_of(etcd)
        key = KEYS.broker_set(NAME)

        def other_writes(called: str) -> bool:
            if called != TXN:
                return False
            for number in range(1_000):
                found = msgspec.json.decode(_value(etcd, key), type=BrokerSet)
                writes = with_write(found.writes, f"other{number % 9}-{number}")
                changed = msgspec.structs.replace(found, master_epoch=9, writes=writes)
                etcd.put(key, changed.encode())
            return True

        etcd.repeat.append(other_writes)
        assert await store.replace(NAME, STATE, 0)
        state, _ = await other.read(NAME)
        assert state is not None
        assert state.master_epoch == 9

    asyncio.run(main())


def test_a_write_that_lost_the_race_has_no_effect() -> None:
    async def main() -> None:
        etcd = EtcdModel()
        store, key = store_of(etcd), KEYS.broker_set(NAME)
        assert await store.replace(NAME, STATE, 0)
        state, version = await store.read(NAME)
        assert state is not None
        etcd.before.append(lambda: etcd.put(key, with_epoch(state, 5).encode()) and None)
        etcd.lose_answer(TXN)
        assert not await store.replace(NAME, with_epoch(state, 1), version)

    asyncio.run(main())


def test_a_deletion_is_done_once() -> None:
    async def main() -> None:
        etcd = EtcdModel()
        store, key = store_of(etcd), KEYS.broker_set(NAME)
        assert await store.replace(NAME, STATE, 0)
        _, version = await store.read(NAME)
        etcd.put(key, STATE.encode())
        assert not await store.replace(NAME, None, version)
        _, version = await store.read(NAME)
        etcd.lose_answer(TXN)
        assert await store.replace(NAME, None, version)
        assert (await store.read(NAME)).state is None

    asyncio.run(main())


def test_the_writes_of_one_controller_do_not_overtake_each_other() -> None:
    """Otherwise the number of the later one would hide that the earlier one took effect."""

    async def main() -> None:
        etcd = EtcdModel()
        store = store_of(etcd)
        etcd.lose_answer(TXN)
        results = await asyncio.gather(*(store.replace(NAME, STATE, 0) for _ in range(5)))
        assert results == [True, False, False, False, False]
        assert store._replacing == {}

    asyncio.run(main())


def test_the_state_has_the_last_write_of_each_controller() -> None:
    writes: tuple[str, ...] = ()
    for writer in range(WRITERS_MAX + 3):
        for number in (1, 2):
            writes = with_write(writes, f"{writer:x}-{number}")
    assert writes == tuple(f"{writer:x}-2" for writer in range(3, WRITERS_MAX + 3))


def test_a_state_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "VALUE_BYTES_MAX", 10)

    async def main() -> None:
        with pytest.raises(EtcdError, match="the limit is 10"):
            await store_of(EtcdModel()).replace(NAME, STATE, 0)

    asyncio.run(main())


def test_reads_that_are_not_urgent_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "READS_MAX", 4)

    async def main() -> None:
        etcd, clock = EtcdModel(), VirtualClock()
        store = store_of(etcd, clock)
        for number in range(3):
            await store.replace(f"b{number}", with_epoch(STATE, number), 0)
        etcd.calls.clear()
        names = [f"b{number}" for number in range(6)]
        reads = [asyncio.ensure_future(store.read_many(names)) for _ in range(2)]
        await clock.elapse(20)
        for found in await asyncio.gather(*reads):
            states = {name: one.state for name, one in found.items()}
            assert [states[f"b{n}"] is not None for n in range(6)] == [True] * 3 + [False] * 3
        assert etcd.calls == [TXN] * 2

    asyncio.run(main())


def test_failed_and_damaged_reads_are_errors_of_their_callers() -> None:
    async def main() -> None:
        etcd, clock = EtcdModel(), VirtualClock()
        store = store_of(etcd, clock)
        etcd.put(KEYS.broker_set("damaged"), b"{")
        for error in (StoreDamaged, EtcdError):
            reading = asyncio.ensure_future(store.read_many(["damaged"]))
            await clock.elapse(20)
            with pytest.raises(error):
                await reading
            etcd.down = True

    asyncio.run(main())


def test_names_are_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "PAGE_KEYS", 2)

    async def main() -> None:
        store = store_of(EtcdModel())
        names = [f"b{number}" for number in range(5)]
        for name in names:
            await store.replace(name, STATE, 0)
        assert list(await store.names()) == names

    asyncio.run(main())


def _value(etcd: EtcdModel, key: bytes) -> bytes:
    found: dict[str, Any] = etcd.keys[key]
    return base64.b64decode(found["value"])
