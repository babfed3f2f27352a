"""Timers and half messages in RocksDB: which stores of Apache's broker are refused.

The bytes are those that RocketMQ 5.4.0 and 5.5.1 write.
"""

import shutil
import struct
from pathlib import Path

import pytest

from penstock.errors import StoreRefused
from tests.unit.store.conftest import StoreFixture, put, record

HALF_TOPIC = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
TIMER_PUT = b"\x05\x01\x20sys_topic_scan_offset_checkpoint\x08" + bytes(8)
TRANS_PUT = b"\x05\x02\x0clastOffsetPy\x08" + bytes(8)
INDEX_PUT = b"\x01\x0clastOffsetPy\x08" + bytes(8)


@pytest.fixture
def database(stores: StoreFixture) -> Path:
    """The database as every Apache broker creates it, without records."""
    made = stores.root / "rocksdbstore"
    made.mkdir(parents=True)
    (made / "CURRENT").write_text("MANIFEST-000005\n")
    families = b"\xc8\x01\x01\xc9\x01\x05timer\xc8\x01\x02\xc9\x01\x05trans"
    (made / "MANIFEST-000005").write_bytes(families)
    (made / "000004.log").write_bytes(b"")
    return made


def table(family: bytes, records: bytes = b"") -> bytes:
    """A table file of a column family."""
    name = b"\x16\x04" + bytes([len(family)]) + b"name" + family
    return records + b"\x08\x10\x01column.family.id\x01" + name + bytes(900)


def assert_refused(stores: StoreFixture, what: str) -> None:
    with pytest.raises(StoreRefused, match=what) as caught:
        stores.open()
    assert "remove rocksdbstore/; docs/migration.md" in caught.value.remark()
    assert not (stores.root / "abort").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("000013.sst", table(b"timer")),
        ("000013.sst", table(b"timer", records=b"\x16\x04\x07namedefault" + bytes(50_000))),
        ("000013.sst", b"another format"),
        ("000013.sst", b""),
        ("000004.log", bytes(100_000) + TIMER_PUT),
    ],
    ids=["table", "long-table", "unknown-table", "empty-table", "log"],
)
def test_timers_in_rocksdb_are_refused(
    stores: StoreFixture, database: Path, name: str, content: bytes
) -> None:
    (database / name).write_bytes(content)
    assert_refused(stores, r"holds timers \(timerRocksDBEnable\) in a RocksDB database")
    shutil.rmtree(database)
    stores.open()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("CURRENT", b"MANIFEST-000005\n"),
        ("000013.sst", table(b"default")),
        ("000013.sst", table(b"trans")),
        ("000004.log", INDEX_PUT),
        ("000004.log", TRANS_PUT),
    ],
    ids=["empty", "index-table", "resolved-table", "index-log", "resolved-log"],
)
def test_a_database_without_timers_and_half_messages_is_accepted(
    stores: StoreFixture, database: Path, name: str, content: bytes
) -> None:
    (database / name).write_bytes(content)
    stores.open()


def test_half_messages_with_a_state_in_rocksdb_are_refused(
    stores: StoreFixture, database: Path
) -> None:
    store = stores.open()
    put(store, record(), record(topic=HALF_TOPIC))
    stores.close(store)
    assert_refused(stores, r"holds half messages \(transRocksDBEnable\) in a RocksDB database")
    (database / "000013.sst").write_bytes(table(b"timer"))
    assert_refused(stores, "holds timers .* and half messages ")
    shutil.rmtree(database)
    stores.open()


def test_a_database_of_deleted_half_messages_is_accepted(
    stores: StoreFixture, database: Path
) -> None:
    queue = stores.root / "consumequeue" / HALF_TOPIC / "0"
    queue.mkdir(parents=True)
    log = stores.root / "commitlog"
    log.mkdir()
    (log / f"{4096:020d}").write_bytes(bytes(4096))
    entries = queue / f"{0:020d}"
    entries.write_bytes(struct.pack(">qiq", 512, 256, 0) + bytes(140))
    stores.close(stores.open())
    entries.write_bytes(struct.pack(">qiq", 4096, 256, 0) + bytes(140))
    assert_refused(stores, "half messages")
