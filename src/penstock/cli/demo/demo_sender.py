"""The demo's producers: one connection per queue, which sends until the broker dies."""

import asyncio
import contextlib
from collections.abc import Callable

from penstock.cli.demo import demo_messages
from penstock.wire.codes import RequestCode
from penstock.wire.frame import BINARY, Request
from penstock.wire.output import encode

WINDOW = 64
"""Requests in flight on each connection."""
READ_BYTES = 64 * 1024


class DemoProducers:
    """Send the demo's messages; `acknowledged` counts the responses per queue."""

    def __init__(self, port: int, on_progress: Callable[[int], None]) -> None:
        self._port = port
        self._on_progress = on_progress
        self.acknowledged = [0] * demo_messages.QUEUES_TOTAL
        self.refused = ""

    async def run(self) -> None:
        """Send until the connections break."""
        await asyncio.gather(*(self._send(index) for index in range(demo_messages.QUEUES_TOTAL)))

    async def _send(self, index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = Request()
        number, left = index, b""
        with contextlib.suppress(ConnectionError):
            while True:
                window = range(
                    number, number + WINDOW * demo_messages.QUEUES_TOTAL, demo_messages.QUEUES_TOTAL
                )
                writer.write(b"".join([frame(each) for each in window]))
                number = window.stop
                waiting = WINDOW
                while waiting:
                    data = bytearray(left + await reader.read(READ_BYTES))
                    if len(data) == len(left):
                        return
                    waiting -= self._count(answer, data, index)
                    left = bytes(data[self._at :])
                self._on_progress(sum(self.acknowledged))
        writer.close()

    def _count(self, answer: Request, data: bytearray, index: int) -> int:
        """Count the responses in `data`; `_at` is where an incomplete one starts."""
        answer.bind(memoryview(data))
        at = count = 0
        while at < len(data):
            length = answer.read(at, len(data))
            if length == 0:
                break
            at += length
            if answer.code != 0:
                self.refused = self.refused or answer.remark() or str(answer.code)
                raise ConnectionError(self.refused)
            count += 1
        answer.release()
        self.acknowledged[index] += count
        self._at = at
        return count


def frame(number: int) -> bytes:
    """The request that sends message `number`."""
    topic, queue_id = demo_messages.queue_of(number)
    ext = {
        "a": "demo",
        "b": topic.decode(),
        "c": "TBW102",
        "d": str(demo_messages.QUEUES),
        "e": str(queue_id),
        "f": "0",
        "g": "0",
        "h": "0",
        "i": demo_messages.properties(number).decode(),
    }
    body = demo_messages.body(number)
    return encode(
        RequestCode.SEND_MESSAGE_V2, ext, body, opaque=number & 0x7FFFFFFF, encoding=BINARY
    )
