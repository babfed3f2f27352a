"""CPU per message from request bytes to response bytes: parse, append, queue entry, response.

128-byte body, one handler, one core. A handler in plain Python does the same work in the same run.
Rounds alternate; the best of each is shown. "all threads" adds the CPU time of the thread pool,
which faults pages in, and of the flusher.
"""

import mmap
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import penstock
from benchmarks.plain import PlainHandler
from benchmarks.send_stubs import EmptyService, NoRedirects, WritableTopics
from penstock.broker.send import SendHandler
from penstock.config import StoreConfig
from penstock.rpc.router import Router
from penstock.server.request_loop import RequestLoop
from penstock.store.store import MessageStore
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import encode

MESSAGES = 400_000 if penstock.compiled() else 8_000
PLAIN_MESSAGES = 40_000
ROUNDS = 3
NOW_MS = 1_700_000_000_000
HOST = bytes((127, 0, 0, 1, 0, 0, 42, 159))
EXTRA = b"MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02CLUSTER\x01DefaultCluster\x02"


class Case(NamedTuple):
    title: str
    encoding: int
    per_read: int
    has_index: bool
    target_us: float


CASES = (
    Case("binary header, 16 per read", BINARY, 16, False, 1.2),
    Case("same, with index entries (unique id, tag)", BINARY, 16, True, 2.0),
    Case("binary header, 1 per read", BINARY, 1, False, 2.5),
    Case("JSON header, 16 per read", JSON, 16, False, 3.0),
    Case("JSON header, 1 per read", JSON, 1, False, 3.0),
)


def frames(count: int, encoding: int) -> bytes:
    return b"".join(
        encode(
            310,
            {
                "a": "bench", "b": "BenchTopic", "c": "TBW102", "d": "4", "e": str(i % 4),
                "f": "0", "g": str(NOW_MS), "h": "0",
                "i": f"UNIQ_KEY\x017F0000010000{i * 77:020X}\x02WAIT\x01true\x02TAGS\x01TagA\x02",
                "j": "0", "k": "false", "l": "0", "m": "false", "n": "broker-a",
            },
            b"x" * 128, opaque=i, encoding=encoding,
        )
        for i in range(count)
    )  # fmt: skip


def measure_penstock(case: Case, folder: Path) -> tuple[float, float, int]:
    """µs of the serving thread, µs of all threads, blocks allocated per 100,000 messages."""
    store = MessageStore(folder, StoreConfig(index_enabled=case.has_index), now_ms=NOW_MS)
    for queue_id in range(4):
        store.make_queue(b"BenchTopic", queue_id)
    send = SendHandler(store.writer, WritableTopics(store), NoRedirects(), HOST)
    send.configure(EXTRA, store.config.body_bytes_max, trace_on=True)
    request_loop = RequestLoop(EmptyService(), Router([send.rows()]).in_place)
    pristine = frames(case.per_read, case.encoding)
    buffer = bytearray(pristine)
    request_loop.bind(memoryview(buffer), HOST)
    restore = case.encoding == JSON  # a JSON header is unescaped in place
    output = request_loop.output

    def run(messages: int) -> None:
        length = len(pristine)
        for _ in range(messages // case.per_read):
            if restore:
                buffer[:] = pristine
            request_loop.serve(0, length, NOW_MS)
            output.length = 0

    run(2_000)
    store.publish()
    thread, process = time.thread_time(), time.process_time()
    run(MESSAGES)
    per_message = 1e6 / MESSAGES
    thread_us = (time.thread_time() - thread) * per_message
    process_us = (time.process_time() - process) * per_message
    store.publish()
    blocks = sys.getallocatedblocks()
    run(100_000 if penstock.compiled() else 2_000)
    grown = sys.getallocatedblocks() - blocks
    store.close()
    return thread_us, process_us, grown


def measure_plain(folder: Path) -> float:
    """µs per message of the plain handler, binary header, 16 per read."""
    data = frames(16, BINARY)
    maps = []
    for name, size in (("log", 64 << 20), *((f"q{i}", 1 << 20) for i in range(4))):
        path = folder / name
        with path.open("wb+") as file:
            file.truncate(size)
            maps.append(mmap.mmap(file.fileno(), size))
    handler = PlainHandler(maps[0], maps[1:], HOST)
    handler.serve(data, HOST, NOW_MS)
    started = time.thread_time()
    for _ in range(PLAIN_MESSAGES // 16):
        handler.serve(data, HOST, NOW_MS)
    return (time.thread_time() - started) / PLAIN_MESSAGES * 1e6


def main() -> None:
    table = Table(title="send path: CPU per message (128 B body)")
    for column in ("case", "µs", "target", "all threads µs", "plain CPython µs", "ratio",
                   "blocks per 100k"):  # fmt: skip
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in CASES:
        best, plain_best = (1e9, 1e9, 0), 1e9
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
                best = min(best, measure_penstock(case, Path(folder) / "store"))
                plain_best = min(plain_best, measure_plain(Path(folder)))
        thread_us, process_us, grown = best
        if penstock.compiled():
            assert grown < 1000, f"100,000 sends allocated {grown} blocks"
        table.add_row(
            case.title, f"{thread_us:.2f}", f"≤ {case.target_us}", f"{process_us:.2f}",
            f"{plain_best:.2f}", f"{plain_best / thread_us:.1f}x", str(grown),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
