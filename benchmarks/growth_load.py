"""For `benchmarks.growth`: brokers whose CPU is measured, and connections that load them.

A load is a list of blocks. One block is written at once and answered before the next one is
written, so the number of requests that the broker finds in a read does not depend on what else the
machine does. CPU times are those of the broker's process, with the threads and the kernel's part.
"""

import hashlib
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.compat import penstock

from penstock.wire.codes import PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode
from penstock.wire.frame import BINARY, Request
from penstock.wire.output import encode

PER_BLOCK = 32
BODY = b"x" * 128
DISTINCT = 16_384
"""Different messages at least: each has a unique id, and so its place in the index."""
SETTLE_S = 1.0
"""After a load, for what the broker does later: flushes, checkpoints."""
_LENGTH = struct.Struct(">i")


class Block(NamedTuple):
    """Requests that are written at once, and on which connection."""

    connection: int
    requests: int
    data: bytes


def unique_id(number: int) -> str:
    """An id without order: those of one producer are neighbours in the index, those of many are
    not."""
    return hashlib.md5(number.to_bytes(8, "big"), usedforsecurity=False).hexdigest().upper()


def send_request(topic: str, queue_id: int, opaque: int, *, body: bytes = BODY, queues: int = 1,
                 properties: str = "") -> bytes:  # fmt: skip
    ext = {
        "a": "g", "b": topic, "c": "TBW102", "d": str(queues), "e": str(queue_id), "f": "0",
        "g": "1", "h": "0", "i": f"UNIQ_KEY\x01{unique_id(opaque)}\x02{properties}", "j": "0",
        "m": "false",
    }  # fmt: skip
    return encode(310, ext, body, opaque=opaque, encoding=BINARY)


def send_blocks(
    targets: Sequence[tuple[str, int]], *, queues: int = 1, connections: int = 1,
    per_block: int = PER_BLOCK, body: bytes = BODY, distinct: int = DISTINCT,
) -> list[Block]:  # fmt: skip
    """Sends to each of these queues equally often, on all connections in turn."""
    count = max(len(targets), connections * per_block, distinct)
    count += -count % (connections * per_block)
    blocks = []
    for first in range(0, count, per_block):
        frames = []
        for number in range(first, first + per_block):
            topic, queue_id = targets[number % len(targets)]
            frames.append(send_request(topic, queue_id, number, body=body, queues=queues))
        connection = first // per_block % connections
        blocks.append(Block(connection, per_block, b"".join(frames)))
    return blocks


def pull_request(group: str, offset: int, *, suspend: bool = False) -> bytes:
    """A pull of a block from the first queue of the topic T."""
    fields = {
        "consumerGroup": group, "topic": "T", "queueId": 0, "queueOffset": offset,
        "maxMsgNums": PER_BLOCK, "sysFlag": PULL_SUBSCRIPTION | (PULL_SUSPEND if suspend else 0),
        "commitOffset": 0, "suspendTimeoutMillis": 15_000, "subscription": "*", "subVersion": 0,
        "expressionType": "TAG",
    }  # fmt: skip
    ext = {name: str(value) for name, value in fields.items()}
    return encode(RequestCode.PULL_MESSAGE, ext, opaque=7, encoding=BINARY)


class Connections:
    """Open connections to a broker."""

    def __init__(self, port: int, count: int = 1) -> None:
        self.sockets = [
            socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(count)
        ]
        for one in self.sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for one in self.sockets:
            one.close()

    def run(self, blocks: Iterable[Block], *, at_once: int = 1) -> int:
        """Write all blocks, some at once on different connections; returns the requests."""
        done, pending = 0, list[Block]()
        for block in blocks:
            self.sockets[block.connection].sendall(block.data)
            pending.append(block)
            if len(pending) == at_once:
                done += self._answered(pending)
        return done + self._answered(pending)

    def _answered(self, pending: list[Block]) -> int:
        done = sum(block.requests for block in pending)
        for block in pending:
            check_responses(self.read(block.connection, block.requests))
        pending.clear()
        return done

    def read(self, connection: int, responses: int) -> bytes:
        """This many whole responses."""
        data, at = self.sockets[connection].recv(1 << 18), 0
        while True:
            while responses and at + 4 <= len(data):
                end = at + 4 + _LENGTH.unpack_from(data, at)[0]
                if end > len(data):
                    break
                at, responses = end, responses - 1
            if not responses:
                return data
            more = self.sockets[connection].recv(1 << 18)
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more


def check_responses(data: bytes) -> None:
    """Raises if one of them is not a success."""
    at = 0
    while at < len(data):
        end = at + 4 + _LENGTH.unpack_from(data, at)[0]
        # Length, encoding and length of the header, code.
        if data[at + 8 : at + 10] != b"\0\0" or data[at + 4] != BINARY:
            answer = parsed(data[at:end])
            if answer.code != 0:
                raise RuntimeError(f"code {answer.code}: {answer.remark()}")
        at = end


def parsed(frame: bytes) -> Request:
    response = Request()
    response.bind(memoryview(bytearray(frame)))
    assert response.read(0, len(frame)) == len(frame)
    return response


def process_cpu_s(pid: int) -> float:
    """User and system time of a process so far, in nanosecond steps."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid of the C library


class MeasuredBroker(penstock.Broker):
    """A broker of its own process whose CPU time can be read."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None = None, names: str = ""
    ) -> None:
        values = {f"PENSTOCK_{key}": str(value) for key, value in (settings or {}).items()}
        super().__init__(folder, folder / "store", names, timeout=300, settings=values)

    def cpu_s(self) -> float:
        return process_cpu_s(self.pid)


def cpu_per_message(broker: MeasuredBroker, work: Callable[[], int]) -> float:
    """µs for each message that `work` reports, with what the broker does shortly afterwards."""
    began = broker.cpu_s()
    messages = work()
    time.sleep(SETTLE_S)
    return (broker.cpu_s() - began) / messages * 1e6
