"""The old part of the log is not mapped into the memory of the process."""

import time
from pathlib import Path

import pytest

from penstock.config import StoreConfig
from penstock.store.maintenance import UNMAP_BYTES
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from tests.unit.store.conftest import NOW_MS, record

BODY = bytes(range(256)) * 4096
HOT_BYTES = 2 * UNMAP_BYTES
SEGMENT_BYTES = 5 * UNMAP_BYTES // 2


def resident_bytes(folder: Path) -> int:
    """Pages of the files in a folder that are mapped into this process."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = str(folder) in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.slow
def test_pages_before_the_hot_part_are_unmapped(tmp_path: Path) -> None:
    config = StoreConfig(segment_bytes=SEGMENT_BYTES, hot_bytes=HOT_BYTES)
    store = MessageStore(tmp_path, config, now_ms=NOW_MS)
    offsets = []
    while store.log.end < 3 * SEGMENT_BYTES:
        assert store.put(record(BODY), NOW_MS) == PUT_OK
        offsets.append(store.writer.offset)
        store.publish()
    assert resident_bytes(tmp_path / "commitlog") >= store.log.end
    store.tick(NOW_MS + 1_000)
    deadline = time.monotonic() + 10
    limit = HOT_BYTES + 2 * UNMAP_BYTES
    while resident_bytes(tmp_path / "commitlog") > limit and time.monotonic() < deadline:
        time.sleep(0.01)
    assert HOT_BYTES <= resident_bytes(tmp_path / "commitlog") <= limit
    for offset in offsets:
        segment = store.log.segments.find(offset)
        assert segment is not None
        assert BODY in bytes(segment.slice(offset, len(BODY) + 200))
    store.close()
