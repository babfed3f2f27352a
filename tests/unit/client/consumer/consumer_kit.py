"""Records as brokers send them, and fakes of the parts of a consumer."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.client.client_options import ClientOptions
from penstock.client.consumer.process_queue import FlowLimits, ProcessQueue
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.errors import PenstockError
from penstock.testing.virtual_clock import VirtualClock
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.message import encode_host, encode_properties
from penstock.wire.record import OK, Record

QUEUE = MessageQueue("Orders", "broker-a", 3)
STORE_HOST = "127.0.0.1:10911"


def record(
    offset: int = 0, body: bytes = b"hello", *, topic: str = "Orders", flag: int = 0,
    sys_flag: int = 0, properties: Mapping[str, str | None] | None = None, reconsume_times: int = 0,
    born_host: str = "10.1.2.3:54321", store_host: str = STORE_HOST, text: bytes | None = None,
    queue_id: int = 3, store_ms: int = 1_700_000_000_002,
) -> bytes:  # fmt: skip
    """One stored message."""
    made = Record(16 * 1024 * 1024)
    if text is None:
        text = encode_properties(properties or {})
    made.fill(topic.encode(), body, text)
    made.queue_id = queue_id
    made.flag = flag
    made.sys_flag = sys_flag
    made.born_ms = 1_700_000_000_001
    made.born_host = encode_host(born_host)
    made.store_host = encode_host(store_host)
    made.reconsume_times = reconsume_times
    made.prepared_offset = 77
    assert made.prepare() == OK
    target = bytearray(made.size)
    made.put(memoryview(target), 0, offset, 1000 + offset, store_ms)
    return bytes(target)


def messages(*offsets: int, **fields: Any) -> list[ReceivedMessage]:
    """Messages at these offsets of QUEUE."""
    data = b"".join(record(offset, b"%d" % offset, **fields) for offset in offsets)
    return decode_records(data, "broker-a", topic="Orders")


def make_process_queue(offset: int = 0, *, ordered: bool = False, **limits: int) -> ProcessQueue:
    return ProcessQueue(QUEUE, offset, FlowLimits(**limits), ordered=ordered)


class PlainSession:
    """As much of a session as the parts of a consumer need."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.options = ClientOptions()
        self.client_id = "10.0.0.1@test"
        self.tasks: set[asyncio.Task[object]] = set()
        self.failures: list[BaseException] = []

    def spawn(self, work: Any) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    def with_namespace(self, name: str) -> str:
        return name

    def without_namespace(self, name: str) -> str:
        return name


class FakeSendBack:
    """Accepts messages that are sent back, or fails."""

    def __init__(self, failures: Iterable[PenstockError] = ()) -> None:
        self.taken: list[tuple[int, int]] = []
        self.failures = list(failures)

    async def __call__(self, message: ReceivedMessage, delay_level: int = 0) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append((message.queue_offset, delay_level))


async def until(done: Callable[[], bool]) -> None:
    """Run the loop until the condition is true."""
    while not done():
        await asyncio.sleep(0)
