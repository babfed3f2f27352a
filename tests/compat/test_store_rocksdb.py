"""A store of an Apache broker that keeps the state of timers and half messages in RocksDB.

Ours refuses such a store and opens it after the steps of docs/migration.md. Then every message is
there exactly once, also a timer that Apache's broker had delivered before.
"""

from __future__ import annotations

import asyncio
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import Message, Producer, TransactionProducer
from penstock.errors import StoreRefused

from . import apache, maven, penstock
from .clients import mqadmin
from .conftest import Sessions
from .java_session import eventually
from .python_reading import read_bodies
from .test_store_exchange import open_ours

pytestmark = [pytest.mark.compat, pytest.mark.slow]

TOPIC = "T"
CONF: dict[str, Any] = {
    "brokerName": "rocksdb",
    "timerWheelEnable": True,
    "timerRocksDBEnable": True,
    "transRocksDBEnable": True,
    "transWriteOriginTransHalfEnable": False,
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 3000,
    # It stores the ends of transactions in batches, and checks again until then.
    "transactionOpBatchInterval": 100,
}


def send_timer(namesrv: str, body: str, delay_s: int) -> None:
    with Producer(namesrv, group="timers") as producer:
        producer.send(Message(TOPIC, body, delay=timedelta(seconds=delay_s)))


def prepare(namesrv: str, body: str) -> None:
    """A half message that its producer leaves open."""
    with TransactionProducer(namesrv, group="transactions") as producer:
        producer.prepare(Message(TOPIC, body))


def resolving(namesrv: str) -> TransactionProducer:
    """A producer that commits every open transaction when the broker asks."""
    return TransactionProducer(
        namesrv, group="transactions", topics=TOPIC, check=lambda message: True
    )


def await_bodies(namesrv: str, *expected: str) -> None:
    """Wait until the topic has these messages, each once."""
    wanted = sorted(expected)
    found: list[str] = []

    def seen() -> bool:
        found[:] = asyncio.run(read_bodies(namesrv, TOPIC))
        return len(found) >= len(wanted)

    eventually(seen, within_s=60)
    assert found == wanted


def test_timers_and_half_messages_in_rocksdb(tmp_path: Path, sessions: Sessions) -> None:
    java, store = sessions(maven.V5_5), tmp_path / "store"
    before = ("delivered before", "in RocksDB", "in a transaction", "in a new transaction")
    with apache.NameServer(tmp_path / "names", version=maven.V5_5) as names:
        namesrv = names.address
        broker = apache.Broker(tmp_path / "broker", store, namesrv, version=maven.V5_5, **CONF)
        with broker:
            send_timer(namesrv, "in RocksDB", 10)
            # Long enough that RocksDB has it and the position behind it, where the wheel begins.
            send_timer(namesrv, "delivered before", 3)
            await_bodies(namesrv, "delivered before")
            prepare(namesrv, "in a transaction")
            there = ("-b", broker.address)
            for key in ("timerStopEnqueue", "transWriteOriginTransHalfEnable"):
                setting = (*there, "-k", key, "-v", "true")
                assert "success" in mqadmin(java, namesrv, "updateBrokerConfig", *setting)
            assert "success" in mqadmin(java, namesrv, "switchTimerEngine", *there, "-e", "F")
            prepare(namesrv, "in a new transaction")
            with resolving(namesrv):
                await_bodies(namesrv, *before)
            send_timer(namesrv, "in the timer wheel", 10)
            broker.stop()
        with pytest.raises(StoreRefused, match=r"timers .* and half messages "):
            open_ours(store)
        shutil.rmtree(store / "rocksdbstore")
        conf = {"brokerName": broker.name, **apache.SMALL_STORE}
        with penstock.Broker(tmp_path / "ours", store, namesrv, **conf), resolving(namesrv):
            await_bodies(namesrv, *before, "in the timer wheel")
