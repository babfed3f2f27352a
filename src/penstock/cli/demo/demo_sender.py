"""The demo's producers: one connection per lane, many requests under way, until the broker dies."""

import asyncio
import contextlib
from collections.abc import Callable

from penstock.cli.demo import load
from penstock.wire.codes import RequestCode
from penstock.wire.frame import BINARY, Request
from penstock.wire.output import encode

WINDOW = 64
"""Requests under way on each connection."""
READ_BYTES = 64 * 1024


class Producers:
    """Send the demo's messages; `acknowledged` counts the answers, lane by lane."""

    def __init__(self, port: int, told: Callable[[int], None]) -> None:
        self._port = port
        self._told = told
        self.acknowledged = [0] * load.LANES
        self.refused = ""

    async def run(self) -> None:
        """Send until the connections break."""
        await asyncio.gather(*(self._send(place) for place in range(load.LANES)))

    async def _send(self, place: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = Request()
        number, left = place, b""
        with contextlib.suppress(ConnectionError):
            while True:
                window = range(number, number + WINDOW * load.LANES, load.LANES)
                writer.write(b"".join([frame(each) for each in window]))
                number = window.stop
                waiting = WINDOW
                while waiting:
                    data = bytearray(left + await reader.read(READ_BYTES))
                    if len(data) == len(left):
                        return
                    waiting -= self._count(answer, data, place)
                    left = bytes(data[self._at :])
                self._told(sum(self.acknowledged))
        writer.close()

    def _count(self, answer: Request, data: bytearray, place: int) -> int:
        """Count the answers in `data`; `_at` is where an unfinished one begins."""
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
        self.acknowledged[place] += count
        self._at = at
        return count


def frame(number: int) -> bytes:
    """The request that sends a message."""
    topic, queue_id = load.lane(number)
    ext = {
        "a": "demo",
        "b": topic.decode(),
        "c": "TBW102",
        "d": str(load.QUEUES),
        "e": str(queue_id),
        "f": "0",
        "g": "0",
        "h": "0",
        "i": load.properties(number).decode(),
    }
    body = load.body(number)
    return encode(
        RequestCode.SEND_MESSAGE_V2, ext, body, opaque=number & 0x7FFFFFFF, encoding=BINARY
    )
