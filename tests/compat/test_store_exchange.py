"""One store passed back and forth between our engine and a real Apache broker.

Ours writes, Apache serves it; Apache appends and is killed, ours recovers it and appends; Apache
serves all of it and stops cleanly; ours opens that. Each side must see every message of the other,
and queries by key *through Apache* must find messages in index files that we wrote.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from penstock.config import StoreConfig
from penstock.store.get import FOUND
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import ConfigFile, TopicTable
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.compression import decompress
from penstock.wire.output import Output
from penstock.wire.record import RECORD, Record, StoredRecord
from tests.depth import rounds

from . import apache, clients, maven
from .conftest import Sessions

pytestmark = [pytest.mark.compat, pytest.mark.slow]

# The first release reads what we wrote and is killed; the second reads all of it and stops.
ROUNDS = [(maven.V5_4, maven.V5_5), (maven.V5_5, maven.V5_4)][: rounds(ci=1, proof=2)]

OURS = ("ours-a", "ours-b", "ours-c")
THEIRS = {"theirs-a": 900, "theirs-b": 600}
QUEUES = 4
GROUP = "exchange"
SIZES = StoreConfig(
    segment_bytes=apache.SMALL_STORE["mappedFileSizeCommitLog"],
    queue_file_entries=apache.SMALL_STORE["mappedFileSizeConsumeQueue"] // 20,
    index_slots=apache.SMALL_STORE["maxHashSlotNum"],
    index_entries=apache.SMALL_STORE["maxIndexNum"],
)

Place = tuple[str, int, int]
Content = tuple[str, str, int, int]  # keys, tags, body CRC, body length


class Writer:
    """Puts messages through our engine and remembers them."""

    def __init__(self, store: MessageStore, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.seed = seed
        self.written: dict[Place, Content] = {}
        self.record = Record()
        self.record.store_host = self.record.born_host = bytes((127, 0, 0, 1, 0, 0, 42, 159))

    def write(self, count: int) -> None:
        for number in range(count):
            topic = self.rng.choice(OURS)
            if self.rng.random() < 0.1:
                self._batch(topic, number)
            else:
                self._single(topic, number)
            self.store.publish()

    def _single(self, topic: str, number: int) -> None:
        body, keys, tags, properties = self._message(number, 0)
        self.record.fill(topic.encode(), body, properties)
        self._put(topic, [(body, keys, tags)], batch=False)

    def _batch(self, topic: str, number: int) -> None:
        inner, messages = b"", []
        for place in range(self.rng.randint(2, 6)):
            body, keys, tags, properties = self._message(number, place + 1)
            total = 22 + len(body) + len(properties)
            inner += total.to_bytes(4, "big") + bytes(12) + len(body).to_bytes(4, "big") + body
            inner += len(properties).to_bytes(2, "big") + properties
            messages.append((body, keys, tags))
        self.record.fill(topic.encode(), inner)
        self._put(topic, messages, batch=True)

    def _message(self, number: int, place: int) -> tuple[bytes, str, str, bytes]:
        keys = f"key-{self.seed}-{number}-{place} all-{self.seed}"
        tags = self.rng.choice(("red", "green", "Straße"))
        body = self.rng.randbytes(self.rng.choice((1, 100, 2000)))
        unique = f"{self.seed:08X}{number:016X}{place:08X}"
        text = f"KEYS\x01{keys}\x02TAGS\x01{tags}\x02UNIQ_KEY\x01{unique}\x02"
        return body, keys, tags, text.encode()

    def _put(self, topic: str, messages: list[tuple[bytes, str, str]], *, batch: bool) -> None:
        self.record.queue_id = self.rng.randrange(QUEUES)
        now_ms = int(time.time() * 1000)
        put = self.store.put_batch if batch else self.store.put
        assert put(self.record, now_ms) == PUT_OK, self.store.refusal
        first = self.store.writer.queue_offset
        for place, (body, keys, tags) in enumerate(messages):
            content = (keys, tags, zlib.crc32(body) & 0x7FFFFFFF, len(body))
            self.written[topic, self.record.queue_id, first + place] = content


def open_ours(root: Path) -> MessageStore:
    return MessageStore(root, SIZES, now_ms=int(time.time() * 1000))


def make_topics(root: Path) -> None:
    """What a broker keeps of its topics, so that Apache knows ours."""
    table = TopicTable()
    for topic in OURS:
        config = TopicConfig(topic_name=topic, read_queue_nums=QUEUES, write_queue_nums=QUEUES)
        table.put(config, int(time.time() * 1000))
    store = open_ours(root)
    ConfigFile(store.disk, root / TopicTable.FILE).persist(table.snapshot())
    store.close()


def read_all(store: MessageStore, topics: tuple[str, ...]) -> dict[Place, Content]:
    """Every message of these topics, read by queue offset through our engine."""
    found: dict[Place, Content] = {}
    output = Output()
    stored = StoredRecord()
    for queue in store.queues.rows:
        topic = queue.topic.decode()
        offset = queue.min_offset
        while topic in topics and offset < queue.max_offset:
            status = store.reader.find(queue, offset, 32, 1 << 20, store.confirm_offset, True)
            assert status == FOUND
            assert store.reader.copy_to(output, True)
            data = bytearray(output.take())
            stored.bind(memoryview(data))
            at = 0
            while at < len(data):
                assert stored.read(at, len(data)) == RECORD
                assert stored.check(stored.physical_offset) == RECORD
                found[topic, stored.queue_id, stored.queue_offset] = content_of(data, stored)
                at += stored.size
            offset = store.reader.next_offset
    return found


def content_of(data: bytearray, stored: StoredRecord) -> Content:
    stored.scan()
    marks = stored.marks
    keys = data[marks.keys_at : marks.keys_at + marks.keys_length].decode()
    tags = data[marks.tags_at : marks.tags_at + marks.tags_length].decode()
    body = bytes(data[stored.body_at : stored.body_at + stored.body_length])
    body = decompress(body, stored.sys_flag, limit=1 << 24)
    return keys, tags, zlib.crc32(body) & 0x7FFFFFFF, len(body)


def as_ours(lines: list[dict[str, Any]]) -> dict[Place, Content]:
    """What a Java client acknowledged or read, in our shape."""
    return {
        (x["topic"], x["queue_id"], x["queue_offset"]): (
            x["keys"] or "", x["tags"] or "", x["body_crc"], x["body_length"],
        )
        for x in lines
    }  # fmt: skip


def progress(store: MessageStore, root: Path, topic: str) -> int:
    """How much of a topic the group has consumed that a Java client committed."""
    table = ConsumerOffsetTable()
    table.load(ConfigFile(store.disk, root / ConsumerOffsetTable.FILE))
    return sum(table.queues(topic, GROUP).values())


def check_files(root: Path) -> None:
    """`penstock store verify` finds no damage, whoever wrote the files."""
    command = [sys.executable, "-m", "penstock.cli.main", "store", "verify", str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("first_version", "second_version"), ROUNDS)
def test_a_store_goes_back_and_forth(
    sessions: Sessions, tmp_path: Path, first_version: str, second_version: str
) -> None:
    root = tmp_path / "store"
    make_topics(root)
    store = open_ours(root)
    first = Writer(store, 1)
    first.write(5000)
    assert len(store.log.segments.items) > 3
    assert store.index is not None
    assert len(store.index.files) > 3
    store.close()
    assert not (root / "abort").exists()
    check_files(root)

    with apache.NameServer(tmp_path / "namesrv", version=first_version) as names:
        java = sessions(first_version)
        with apache.Broker(
            tmp_path / "first", root, names.address, version=first_version
        ) as broker:
            assert as_ours(clients.consume_all(java, names.address, OURS)) == first.written
            keys = [c[0].split()[0] for p, c in first.written.items() if p[0] == "ours-b"][::40]
            hits = clients.query_keys(java, names.address, "ours-b", keys)
            assert sorted(hit["key"] for hit in hits) == sorted(keys)
            theirs = as_ours(clients.produce(java, names.address, THEIRS))
            assert len(theirs) == sum(THEIRS.values())
            broker.kill()
            assert (root / "abort").exists()

        store = open_ours(root)
        assert not store.report.clean
        everything = {**first.written, **theirs}
        assert read_all(store, (*OURS, *THEIRS)) == everything
        second = Writer(store, 2)
        second.write(1500)
        store.close()

        everything.update(second.written)
        java = sessions(second_version)
        with apache.Broker(
            tmp_path / "second", root, names.address, version=second_version
        ) as broker:
            topics = [*OURS, *THEIRS]
            read = clients.consume_all(java, names.address, topics, commit_as=GROUP)
            assert as_ours(read) == everything
            more = clients.query_keys(java, names.address, "ours-a", ["all-2"])
            expected = [p for p in second.written if p[0] == "ours-a"]
            assert 0 < len(more) <= min(len(expected), 64)
            broker.stop()

    assert not (root / "abort").exists()
    check_files(root)
    store = open_ours(root)
    assert store.report.clean
    assert read_all(store, (*OURS, *THEIRS)) == everything
    assert progress(store, root, "theirs-a") == THEIRS["theirs-a"]
    store.close()
