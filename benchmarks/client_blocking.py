"""One round of calm blocking sends, beside the same frames on a bare socket; prints one JSON line.

python -m benchmarks.client_blocking NAMESERVERS BROKER TOPIC SENDS BODY_BYTES

One thread sends one message at a time to a broker that is otherwise idle. Blocks of `Producer.send`
alternate with blocks of bare exchanges: the same request, encoded before, is written to a blocking
socket of the same broker, and its response is read. The overhead of the client is the difference,
in wall-clock time (median of the blocks' medians) and in CPU time of this process.
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
_SEND_MESSAGE_V2 = 310
_QUEUES = 8


class BareClient:
    """Sends prepared requests over a blocking socket."""

    def __init__(self, broker: str, topic: str, body: bytes) -> None:
        host, _, port = broker.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._turn = 0
        self._frames = [self._frame(topic, queue, body) for queue in range(_QUEUES)]

    def close(self) -> None:
        self._socket.close()

    def exchange(self) -> None:
        """One request and its response, of which only the length is looked at."""
        self._turn = (self._turn + 1) % _QUEUES
        self._socket.sendall(self._frames[self._turn])
        response = self._socket.recv(65536)
        while len(response) < 4 or len(response) < 4 + int.from_bytes(response[:4], "big"):
            response += self._socket.recv(65536)

    def _frame(self, topic: str, queue: int, body: bytes) -> bytes:
        """A request with the fields of `Producer.send`'s."""
        fields = {
            "a": "penstock-load",
            "b": topic,
            "c": "TBW102",
            "d": "8",
            "e": str(queue),
            "f": "0",
            "g": str(time.time_ns() // 1_000_000),
            "h": "0",
            "i": f"UNIQ_KEY\x01{'0' * 32}\x02WAIT\x01true\x02",
            "n": "broker-a",
        }
        return encode(_SEND_MESSAGE_V2, fields, body, opaque=queue, flag=0, encoding=BINARY)


class Series:
    """Measurements of one kind of exchange."""

    def __init__(self, exchange: Callable[[], object]) -> None:
        self._exchange = exchange
        self._medians_us: list[float] = []
        self._user_s = self._cpu_s = 0.0
        self._count = 0

    def measure(self, count: int) -> None:
        now, exchange = time.perf_counter_ns, self._exchange
        times_ns = [0] * count
        before = resource.getrusage(resource.RUSAGE_SELF)
        for number in range(count):
            began = now()
            exchange()
            times_ns[number] = now() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
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
    names, broker, topic, sends, size = sys.argv[1:6]
    body = b"x" * int(size)
    block = max(int(sends) // BLOCKS, 1)
    bare = BareClient(broker, topic, body)
    with Producer(names, group="penstock-load") as producer:
        client = Series(lambda: producer.send(Message(topic, body)))
        socket_only = Series(bare.exchange)
        for series in (Series(lambda: producer.send(Message(topic, body))), Series(bare.exchange)):
            series.measure(10 * block)
        gc.freeze()
        for _ in range(BLOCKS):
            client.measure(block)
            socket_only.measure(block)
    bare.close()
    ours, base = client.result(), socket_only.result()
    print(
        json.dumps(
            {
                "sends": BLOCKS * block,
                "client": ours,
                "bare": base,
                "overhead": {name: ours[name] - base[name] for name in ours},
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
