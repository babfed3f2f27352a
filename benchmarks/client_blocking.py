"""One round of calm blocking sends, beside the same exchange over a bare socket; prints one JSON
line, as tests/compat/java's CalmSends does.

python -m benchmarks.client_blocking NAMESERVERS BROKER TOPIC SENDS BODY_BYTES REQUEST

One thread sends one message at a time to a broker that is otherwise idle. Blocks of `Producer.send`
alternate with blocks of bare exchanges: REQUEST, a send request in hexadecimal, is written to a
blocking socket of the same broker, and the response is read. The overhead of the client is the
difference of both, in wall-clock time (median of the blocks' medians) and in CPU time of the
process (user and system).
"""

import gc
import json
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable

from penstock import Message, Producer
from penstock.wire.frame import BINARY
from penstock.wire.output import encode

BLOCKS = 20
WARM_BLOCKS = 10
_SEND_MESSAGE_V2 = 310


def send_request(topic: str, body_bytes: int) -> bytes:
    """A send request with the fields of `Producer.send`'s."""
    fields = {
        "a": "penstock-load",
        "b": topic,
        "c": "TBW102",
        "d": "8",
        "e": "0",
        "f": "0",
        "g": str(time.time_ns() // 1_000_000),
        "h": "0",
        "i": f"UNIQ_KEY\x01{'0' * 32}\x02WAIT\x01true\x02",
        "n": "broker-a",
    }
    body = b"x" * body_bytes
    return encode(_SEND_MESSAGE_V2, fields, body, opaque=1, flag=0, encoding=BINARY)


class BareClient:
    """Sends one request over a blocking socket, again and again."""

    def __init__(self, broker: str, request: bytes) -> None:
        host, _, port = broker.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request

    def exchange(self) -> None:
        """The request and its response, of which only the length is looked at."""
        self._socket.sendall(self._request)
        response = self._socket.recv(65536)
        while len(response) < 4 or len(response) < 4 + int.from_bytes(response[:4], "big"):
            piece = self._socket.recv(65536)
            if not piece:
                raise ConnectionError("the broker closed the connection")
            response += piece


class Series:
    """Measurements of one kind of exchange."""

    def __init__(self, exchange: Callable[[], object]) -> None:
        self._exchange = exchange
        self._medians_us: list[float] = []
        self._user_s = self._cpu_s = 0.0
        self._count = 0

    def measure(self, count: int, *, counts: bool) -> None:
        now, exchange = time.perf_counter_ns, self._exchange
        times_ns = [0] * count
        before = resource.getrusage(resource.RUSAGE_SELF)
        for number in range(count):
            began = now()
            exchange()
            times_ns[number] = now() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        if counts:
            user_s = after.ru_utime - before.ru_utime
            self._user_s += user_s
            self._cpu_s += user_s + after.ru_stime - before.ru_stime
            self._count += count
            self._medians_us.append(statistics.median(times_ns) / 1_000)

    def result(self) -> dict[str, float]:
        return {
            "wall_us": statistics.median(self._medians_us),
            "wall_us_min": min(self._medians_us),
            "cpu_us": self._cpu_s * 1e6 / self._count,
            "user_us": self._user_s * 1e6 / self._count,
        }


def main() -> None:
    names, broker, topic, sends, size, request = sys.argv[1:7]
    body = b"x" * int(size)
    count = max(int(sends) // BLOCKS, 1)
    bare = Series(BareClient(broker, bytes.fromhex(request)).exchange)
    with Producer(names, group="penstock-load") as producer:
        client = Series(lambda: producer.send(Message(topic, body)))
        gc.freeze()
        for block in range(WARM_BLOCKS + BLOCKS):
            client.measure(count, counts=block >= WARM_BLOCKS)
            bare.measure(count, counts=block >= WARM_BLOCKS)
    result = {"sends": BLOCKS * count, "client": client.result(), "bare": bare.result()}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
