"""A small store for inspection, and functions that damage it."""

from pathlib import Path

from penstock.config import StoreConfig
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.store.tools.inspection import SizeHints, StoreFiles
from penstock.store.tools.problem import DAMAGE, Problem
from penstock.store.tools.verify import Verification
from penstock.store.tools.verify_log import Totals
from penstock.wire.compression import Compression, compress, with_compression
from penstock.wire.record import Record

START_MS = 1_700_000_000_000
SEGMENT_BYTES = 16 * 1024
CONFIG = StoreConfig(
    segment_bytes=SEGMENT_BYTES, queue_file_entries=50, index_slots=50, index_entries=400
)
COUNT = 240
COMPRESSED = 7  # the number of the message whose body is compressed
INDEX_ENTRIES_AT = 40 + 4 * CONFIG.index_slots


def body(number: int) -> bytes:
    return b"message %d " % number + b"x" * (number * 7 % 90)


def fill(store: MessageStore, count: int = COUNT) -> list[tuple[int, int]]:
    """Put messages into two queues of `orders` and one of `sms`; returns (offset, size) of each."""
    placed = []
    record = Record()
    for number in range(count):
        topic, record.queue_id = ((b"orders", 0), (b"orders", 1), (b"sms", 3))[number % 3]
        text = b"TAGS\x01t%d\x02KEYS\x01k%d shared\x02UNIQ_KEY\x01ID%030d" % (
            number % 4, number, number,
        )  # fmt: skip
        record.sys_flag = 0
        data = body(number)
        if number == COMPRESSED:
            data = compress(data, Compression.ZLIB)
            record.sys_flag = with_compression(0, Compression.ZLIB)
        record.fill(topic, data, text)
        assert store.put(record, START_MS + number * 40) == PUT_OK, store.refusal
        placed.append((store.writer.offset, record.size))
    store.publish()
    return placed


def make_store(root: Path, count: int = COUNT) -> list[tuple[int, int]]:
    """A store that was closed cleanly."""
    store = MessageStore(root, CONFIG, now_ms=START_MS)
    placed = fill(store, count)
    store.close()
    return placed


def verify(root: Path, hints: SizeHints | None = None) -> tuple[list[Problem], Totals]:
    verification = Verification(StoreFiles(root, hints))
    return list(verification.run()), verification.totals


def damage_kinds(root: Path) -> set[str]:
    problems, totals = verify(root)
    assert totals.damage == sum(p.count for p in problems if p.severity == DAMAGE)
    return {problem.kind for problem in problems if problem.severity == DAMAGE}


def log_place(root: Path, offset: int) -> tuple[Path, int]:
    """The file and position of a log offset."""
    start = offset - offset % SEGMENT_BYTES
    return root / "commitlog" / f"{start:020d}", offset - start


def write_at(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def flip_log(root: Path, offset: int, mask: int = 0x40) -> None:
    flip(*log_place(root, offset), mask)


def contents(root: Path) -> dict[str, bytes]:
    """All files except the lock file: closing it would release this process's lock."""
    paths = [p for p in root.rglob("*") if p.is_file() and p.name != "lock"]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths}
