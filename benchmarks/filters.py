"""CPU per message of a pull: without filter, by tag, and by properties (SQL92).

Messages have a 128-byte body and 9 properties; a pull asks for 32 messages. The result is the best
round, per message that was checked, whether it was returned or not.
"""

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import penstock
from penstock.broker.broker import Broker
from penstock.broker.filter.filtered_read import EXAMINED_MAX
from penstock.config import LiveSettings, Settings, StoreConfig
from penstock.server.request_loop import RequestLoop
from penstock.store.get import SCAN_ENTRIES_MAX
from penstock.store.store import MessageStore
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import PULL_SUBSCRIPTION, RequestCode
from penstock.wire.frame import BINARY
from penstock.wire.message import encode_properties
from penstock.wire.output import encode

MESSAGES = 20_000 if penstock.compiled() else 4_000
ROUNDS = 5
PULLED = 32
NOW_MS = 1_700_000_000_000
ADDRESS = "127.0.0.1:10911"
BORN = bytes((127, 0, 0, 1, 0, 0, 42, 159))


class Case(NamedTuple):
    title: str
    kind: str
    expression: str
    step: int = PULLED
    """Messages that one pull checks."""


CASES = (
    Case("no filter, all returned", "TAG", "*"),
    Case("tag, all returned", "TAG", "TagA"),
    Case("tag, none returned", "TAG", "TagB", SCAN_ENTRIES_MAX),
    Case("n >= 0, all returned", "SQL92", "n >= 0"),
    Case("n < 0, none returned", "SQL92", "n < 0", EXAMINED_MAX),
    Case("three properties, none returned", "SQL92",
         "TAGS IN ('TagA', 'TagC') AND n BETWEEN 0 AND 2000000 AND region <> 'eu'", EXAMINED_MAX),
)  # fmt: skip


def fill(request_loop: RequestLoop) -> None:
    for number in range(MESSAGES):
        properties = {
            "UNIQ_KEY": f"7F0000010000{number:020X}", "KEYS": f"order-{number}", "TAGS": "TagA",
            "WAIT": "true", "n": str(number), "region": "eu",
        }  # fmt: skip
        ext = {
            "a": "bench", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": str(NOW_MS),
            "h": "0", "j": "0", "m": "false", "i": encode_properties(properties).decode(),
        }  # fmt: skip
        serve(request_loop, encode(RequestCode.SEND_MESSAGE_V2, ext, b"x" * 128, encoding=BINARY))


def serve(request_loop: RequestLoop, frame: bytes) -> int:
    """Serve a request; returns the size of the response."""
    request_loop.bind(memoryview(bytearray(frame)), BORN)
    request_loop.serve(0, len(frame), NOW_MS)
    if request_loop.deferred:
        request_loop.deferred.clear()
    length = request_loop.output.length
    request_loop.output.length = 0
    return length


def read_all(request_loop: RequestLoop, case: Case) -> float:
    """CPU seconds to pull all messages once."""
    frames = []
    for offset in range(0, MESSAGES, case.step):
        ext = {
            "consumerGroup": "G", "topic": "T", "queueId": "0", "queueOffset": str(offset),
            "maxMsgNums": str(PULLED), "sysFlag": str(PULL_SUBSCRIPTION), "commitOffset": "0",
            "suspendTimeoutMillis": "0", "subscription": case.expression, "subVersion": "0",
            "expressionType": case.kind,
        }  # fmt: skip
        frames.append(encode(RequestCode.PULL_MESSAGE, ext, encoding=BINARY))
    started = time.process_time()
    for frame in frames:
        serve(request_loop, frame)
    return time.process_time() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        live = LiveSettings(Settings(store=StoreConfig()))
        store = MessageStore(Path(root), live.current.store, now_ms=NOW_MS)
        broker = Broker(live, store, ADDRESS, ADDRESS, NOW_MS)
        request_loop = RequestLoop(broker, broker.router.in_place)
        request_loop.set_client(1, ADDRESS, BORN)
        topic = TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=1)
        broker.context.topics.put(topic, NOW_MS)
        fill(request_loop)
        store.notify()
        assert store.max_offset("T", 0) == MESSAGES
        table = Table("per checked message", "µs")
        best = {case: min(read_all(request_loop, case) for _ in range(ROUNDS)) for case in CASES}
        for case, seconds in best.items():
            table.add_row(case.title, f"{seconds / MESSAGES * 1e6:.2f}")
        Console().print(table)
        broker.close()
