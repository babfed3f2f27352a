"""CPU of the broker per pull, per wake-up of a suspended pull and per commit of an offset.

Request bytes go through the request loop of a real broker on a real store; responses end in an
output or at a connection that drops them. 128-byte bodies in memory, one core. In the same run, the
uncompiled rules handle the same requests, which they otherwise do only for unusual ones. Rounds
alternate between the cases; the best of each is shown. The kernel's part of a real connection is
missing.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import penstock
from penstock.broker.broker import Broker
from penstock.config import LiveSettings, Settings, StoreConfig
from penstock.rpc.answers import EncodedReply
from penstock.server.answer_executor import AnswerExecutor
from penstock.server.pending_response import PendingResponse, ResponseConnection
from penstock.server.request_loop import RequestLoop
from penstock.server.rpc_latency import RpcLatency
from penstock.store.store import MessageStore
from penstock.wire.codes import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.message import encode_properties
from penstock.wire.output import encode

NOW_MS = 1_700_000_000_000
HOST = bytes((127, 0, 0, 1, 0, 0, 42, 159))
TOPIC, GROUP, CLIENT = "BenchTopic", "BenchGroup", 1
FILLED = 8_192
"""Messages of queue 0."""
QUEUES = 100
"""Queues with a suspended pull each; the first of them is 1."""
ROUNDS = 5
GOALS = {"pull of 32, binary": "≤ 12", "wake-up": "≤ 8", "commit, binary": "≤ 3"}
REQUESTS = 5_000 if penstock.compiled() else 300


class DroppingConnection:
    """A connection that drops what is written to it."""

    client = CLIENT

    def __init__(self) -> None:
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1

    def close(self, why: str) -> None: ...

    def adjust_in_flight(self, change: int) -> None: ...

    def postpone(self, suspended: Any, last: bool) -> bool:
        return False


class StubServer:
    """What the answer executor needs of a server, without an event loop."""

    def __init__(self, store: MessageStore) -> None:
        self.connection = DroppingConnection()
        self.connections: Mapping[int, ResponseConnection] = {CLIENT: self.connection}
        self._store = store
        self._rpc_latency = RpcLatency()
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def send_flushed(self, pending: PendingResponse, reply: EncodedReply) -> None: ...

    def responded(self, pending: PendingResponse, response_code: int) -> None:
        self._rpc_latency.observe(pending, response_code)

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self._calls.append((call, arguments))

    def soon_from_thread(self, call: Callable[..., None], *arguments: Any) -> None: ...

    def later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None: ...

    def monotonic_ms(self) -> int:
        return NOW_MS

    def after_work(self) -> None:
        self._store.publish()

    def tick_at(self, ms: int) -> None: ...

    def run_calls(self) -> None:
        """The next loop iterations."""
        while self._calls:
            calls, self._calls = self._calls, []
            for call, arguments in calls:
                call(*arguments)


class Bench:
    """A broker and one consumer."""

    def __init__(self, root: Path) -> None:
        settings = LiveSettings(Settings(store=StoreConfig(index_enabled=False)))
        self.store = MessageStore(root, settings.current.store, now_ms=NOW_MS)
        address = "127.0.0.1:10911"
        self.broker = Broker(settings, self.store, address, address, NOW_MS)
        in_place = self.broker.router.in_place
        self.loop = RequestLoop(self.broker, in_place)
        send, pull = RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE
        by_rules = {send: in_place[send], pull: self.broker.pull.requests}
        self.rules = RequestLoop(self.broker, by_rules)
        self.buffer = bytearray(256 * 1024)
        for loop in (self.loop, self.rules):
            loop.bind(memoryview(self.buffer), HOST)
            loop.set_client(CLIENT, "127.0.0.1:5", HOST)
        self.server = StubServer(self.store)
        context = self.broker.context
        self.executor = AnswerExecutor(self.server, self._submit, long_polling=context.long_polling)
        context.topics.ensure(TOPIC, QUEUES + 1, 6, NOW_MS)
        context.groups.find(GROUP, NOW_MS)
        for _ in range(FILLED // 64):
            self.serve(self.loop, self.sends([0] * 64))

    @staticmethod
    def _submit(work: Callable[[], Any]) -> Future[Any]:
        raise RuntimeError("nothing is read in the thread pool")

    def serve(self, loop: RequestLoop, data: bytes) -> None:
        """One read."""
        self.buffer[: len(data)] = data
        self.serve_buffer(loop, len(data))

    def serve_buffer(self, loop: RequestLoop, length: int) -> None:
        """One read of this length, as `Server.after_read` finishes it."""
        assert loop.serve(0, length, NOW_MS) == length
        loop.output.length = 0
        if loop.answered:
            loop.answered = {}
        if loop.deferred:
            deferred, loop.deferred = loop.deferred, []
            for opaque, encoding, oneway, answer, code in deferred:
                pending = PendingResponse(self.server.connection, opaque, encoding, oneway, code)
                self.executor.execute(pending, answer)

    def sends(self, queue_ids: list[int], topic: str = TOPIC) -> bytes:
        text = encode_properties({"UNIQ_KEY": "7F00000100000000000000000000ABCD", "WAIT": "true"})
        ext = {
            "a": "bench", "b": topic, "c": "TBW102", "d": "4", "f": "0", "g": str(NOW_MS),
            "h": "0", "i": text.decode(), "j": "0", "k": "false", "m": "false",
        }  # fmt: skip
        return b"".join(
            encode(310, ext | {"e": str(queue_id)}, b"x" * 128, encoding=BINARY)
            for queue_id in queue_ids
        )

    def pull(self, queue_id: int, offset: int, count: int, flags: int, encoding: int) -> bytes:
        fields = {
            "consumerGroup": GROUP, "topic": TOPIC, "queueId": queue_id, "queueOffset": offset,
            "maxMsgNums": count, "sysFlag": flags | PULL_SUBSCRIPTION, "commitOffset": offset,
            "suspendTimeoutMillis": 15_000, "subscription": "*", "subVersion": NOW_MS,
            "expressionType": "TAG", "maxMsgBytes": 2_147_483_647, "requestSource": -1,
        }  # fmt: skip
        ext = {name: str(value) for name, value in fields.items()}
        return encode(RequestCode.PULL_MESSAGE, ext, opaque=7, encoding=encoding, version=493)

    def commit(self, encoding: int) -> bytes:
        ext = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": "0", "commitOffset": "4711"}
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        return encode(code, ext, opaque=7, encoding=encoding, version=493)

    # --- cases: µs per request

    def repeated(self, loop: RequestLoop, frame: bytes, requests: int) -> float:
        """The same request, one per read."""
        length = len(frame)
        self.buffer[:length] = frame
        restore = frame[4] == JSON  # a JSON header is unescaped in place
        began = time.thread_time()
        for _ in range(requests):
            if restore:
                self.buffer[:length] = frame
            self.serve_buffer(loop, length)
        return (time.thread_time() - began) / requests * 1e6

    def suspension(self, loop: RequestLoop) -> tuple[float, float]:
        """To suspend a pull, and to wake it by one message."""
        first = range(1, QUEUES + 1)
        suspending = waking = 0.0
        for _ in range(max(1, REQUESTS // QUEUES)):
            context = self.broker.context
            pulls = []
            for queue_id in first:
                end = self.store.max_offset(TOPIC, queue_id)
                flags = PULL_SUSPEND | PULL_COMMIT_OFFSET
                pulls.append(self.pull(queue_id, end, 32, flags, BINARY))
            began = time.thread_time()
            for pull in pulls:
                self.serve(loop, pull)
            suspending += time.thread_time() - began
            assert len(context.long_polling) == QUEUES
            self.serve(loop, self.sends(list(first)))
            began = time.thread_time()
            loop.arrivals = False
            self.store.notify()
            self.server.run_calls()
            waking += time.thread_time() - began
            assert len(context.long_polling) == 0
        done = max(1, REQUESTS // QUEUES) * QUEUES
        return suspending / done * 1e6, waking / done * 1e6


def cases(bench: Bench) -> dict[str, bytes]:
    """Requests that are repeated."""
    commits = PULL_COMMIT_OFFSET | PULL_SUSPEND
    return {
        "pull of 32, binary": bench.pull(0, 4096, 32, PULL_SUSPEND, BINARY),
        "pull of 32, JSON": bench.pull(0, 4096, 32, PULL_SUSPEND, JSON),
        "pull of 32 with a commit, binary": bench.pull(0, 4096, 32, commits, BINARY),
        "pull of 1, binary": bench.pull(0, 4096, 1, PULL_SUSPEND, BINARY),
        "pull of 1,024, binary": bench.pull(0, 4096, 1024, PULL_SUSPEND, BINARY),
        "commit, binary": bench.commit(BINARY),
        "commit, JSON": bench.commit(JSON),
    }


def main() -> None:
    table = Table(title="pull path: CPU of the broker (128 B bodies, in memory)")
    for column in ("case", "µs", "goal", "by the rules µs", "ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    best: dict[str, list[float]] = {}

    def measured(name: str, column: int, us: float) -> None:
        times = best.setdefault(name, [1e9, 1e9])
        times[column] = min(times[column], us)

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        bench = Bench(Path(folder))
        for _ in range(ROUNDS):
            for column, loop in enumerate((bench.loop, bench.rules)):
                for name, frame in cases(bench).items():
                    count = REQUESTS // 8 if "1,024" in name else REQUESTS
                    measured(name, column, bench.repeated(loop, frame, count))
                suspending, waking = bench.suspension(loop)
                measured("pull that is suspended", column, suspending)
                measured("wake-up", column, waking)
        bench.broker.close()
    for name, (us, rules_us) in best.items():
        goal, ratio = GOALS.get(name, ""), f"{rules_us / us:.1f}x"
        table.add_row(name, f"{us:.2f}", goal, f"{rules_us:.2f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
