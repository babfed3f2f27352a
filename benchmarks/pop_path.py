"""CPU of the broker per POP, acknowledgement, change of the invisible time and heartbeat.

Request bytes go through the request loop of a real broker on a real store, as in `pull_path`: in
memory, one core, without the kernel's part. The group pops all queues of a topic with 8 queues.
128-byte bodies. In the same run the router's handlers (the rules) handle the same requests. Rounds
alternate between the two; the best of each is shown.
"""

import base64
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

import penstock
from benchmarks.pull_path import GROUP, NOW_MS, Bench
from penstock.broker.pop.checkpoints import PopCheckpoint
from penstock.server.request_loop import RequestLoop
from penstock.wire.codes import RequestCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import encode
from penstock.wire.receipt_handle import Receipt, RetryKind

TOPIC, QUEUES = "PopTopic", 8
MESSAGES = 32
"""Messages of a full POP."""
SUBSCRIPTIONS = 100
INVISIBLE_MS = 60_000
ROUNDS = 7
POPS = 200 if penstock.compiled() else 40
"""POPs of a round. The first queue has the messages of all of them."""
GOALS = {
    "POP of 32, binary": "≤ 30",
    "ack, binary": "≤ 5",
    "batch ack of 32, binary": "≤ 15",
    "heartbeat, unchanged": "≤ 50",
}


def _encode(code: int, ext: dict[str, str], body: bytes = b"", *, encoding: int = BINARY) -> bytes:
    """A request. A binary header has 16 bits for the code, and Java's clients cut off the rest."""
    if encoding == BINARY:
        code = int.from_bytes((code & 0xFFFF).to_bytes(2, "big"), "big", signed=True)
    return encode(code, ext, body, opaque=7, encoding=encoding, version=493)


class PopBench(Bench):
    """A broker, and a group that pops a topic."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broker.context.topics.ensure(TOPIC, QUEUES, 6, NOW_MS)
        assert self.broker.master is not None
        self.checkpoints = self.broker.master.pop.revive_log.checkpoints
        for _ in range(POPS):
            self.serve(self.loop, self.sends([0] * MESSAGES, TOPIC))
        for _ in range(MESSAGES // QUEUES):
            self.serve(self.loop, self.sends(list(range(1, QUEUES)), TOPIC))

    # --- requests

    def pop(self, count: int, encoding: int) -> bytes:
        fields = {
            "consumerGroup": GROUP, "topic": TOPIC, "queueId": -1, "maxMsgNums": count,
            "invisibleTime": INVISIBLE_MS, "pollTime": 15_000, "bornTime": NOW_MS, "initMode": 0,
            "expType": "TAG", "exp": "*", "order": "false",
        }  # fmt: skip
        ext = {name: str(value) for name, value in fields.items()}
        return _encode(RequestCode.POP_MESSAGE, ext, encoding=encoding)

    def ack(self, checkpoint: PopCheckpoint, offset: int, encoding: int) -> bytes:
        ext = self._receipt_fields(checkpoint, offset)
        return _encode(RequestCode.ACK_MESSAGE, ext, encoding=encoding)

    def change(self, checkpoint: PopCheckpoint, offset: int) -> bytes:
        ext = self._receipt_fields(checkpoint, offset) | {"invisibleTime": str(INVISIBLE_MS)}
        return _encode(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)

    def _receipt_fields(self, checkpoint: PopCheckpoint, offset: int) -> dict[str, str]:
        key = checkpoint.key
        receipt = Receipt(
            key.start_offset, key.pop_ms, INVISIBLE_MS, checkpoint.revive_queue_id,
            RetryKind.NORMAL, "DefaultBroker", key.queue_id, offset,
        )  # fmt: skip
        return {
            "consumerGroup": GROUP, "topic": TOPIC, "queueId": str(key.queue_id),
            "offset": str(offset), "extraInfo": receipt.format(),
        }  # fmt: skip

    def batch_ack(self, checkpoint: PopCheckpoint) -> bytes:
        """As RocketMQ's Java clients write it."""
        key = checkpoint.key
        bits = base64.b64encode(((1 << MESSAGES) - 1).to_bytes(8, "little").rstrip(b"\0"))
        ack = {
            "b": bits.decode(), "c": GROUP, "it": INVISIBLE_MS, "pt": key.pop_ms,
            "q": key.queue_id, "r": "0", "rq": checkpoint.revive_queue_id,
            "so": key.start_offset, "t": TOPIC,
        }  # fmt: skip
        body = json.dumps({"acks": [ack], "brokerName": "B"}, separators=(",", ":")).encode()
        return _encode(RequestCode.BATCH_ACK_MESSAGE, {}, body)

    def heartbeat(self, version: int) -> bytes:
        """A consumer's heartbeat; its subscriptions have this version."""
        subscriptions = [
            {
                "classFilterMode": False, "codeSet": [], "expressionType": "TAG", "subString": "*",
                "subVersion": version, "tagsSet": [], "topic": f"SubscribedTopic_{number:03d}",
            }
            for number in range(SUBSCRIPTIONS)
        ]  # fmt: skip
        consumer = {
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "consumeType": "CONSUME_PASSIVELY",
            "groupName": GROUP, "messageModel": "CLUSTERING",
            "subscriptionDataSet": subscriptions, "unitMode": False,
        }  # fmt: skip
        data = {
            "clientID": "127.0.0.1@4711#1", "consumerDataSet": [consumer],
            "heartbeatFingerprint": 0, "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
            "withoutSub": False,
        }  # fmt: skip
        body = json.dumps(data, separators=(",", ":")).encode()
        return _encode(RequestCode.HEART_BEAT, {}, body)

    # --- measurements: µs per request

    def timed(self, loop: RequestLoop, frames: Iterable[bytes]) -> float:
        """Each frame in a read of its own."""
        frames = list(frames)
        began = time.thread_time()
        for frame in frames:
            self.serve(loop, frame)
        us = (time.thread_time() - began) / len(frames) * 1e6
        assert not loop.refusals, loop.refusals
        self.run_effects()
        return us

    def run_effects(self) -> None:
        """Take what the loop would execute."""
        self.broker.effects.take()
        self.store.notify()

    def begin(self, offsets: list[int]) -> None:
        """Nothing is in flight, and the group's offsets are these, by queue."""
        for checkpoint in list(self.checkpoints):
            self.checkpoints.close(checkpoint)
        for queue_id, offset in enumerate(offsets):
            self.broker.context.offsets.commit(GROUP, TOPIC, queue_id, offset, NOW_MS)

    def pops(self, loop: RequestLoop, count: int, encoding: int = BINARY) -> float:
        """POPs from the first queue: the others are consumed."""
        self.begin([0] + [MESSAGES // QUEUES] * (QUEUES - 1))
        us = self.timed(loop, [self.pop(count, encoding)] * POPS)
        in_flight = sum(checkpoint.in_flight_count() for checkpoint in self.checkpoints)
        assert in_flight == POPS * count, in_flight
        return us

    def pops_of_all_queues(self, loop: RequestLoop) -> float:
        """POPs that get some messages of each queue."""
        frame, took = self.pop(MESSAGES, BINARY), 0.0
        for _ in range(POPS):
            end = self.store.max_offset(TOPIC, 0)
            self.begin([end - MESSAGES // QUEUES] + [0] * (QUEUES - 1))
            took += self.timed(loop, [frame])
            assert len(self.checkpoints) == QUEUES
        return took / POPS

    def wake_ups(self, loop: RequestLoop) -> float:
        """Pops that wait, each woken by one message."""
        end = self.store.max_offset(TOPIC, 0)
        self.begin([end] + [MESSAGES // QUEUES] * (QUEUES - 1))
        pop, send, took = self.pop(MESSAGES, BINARY), self.sends([0], TOPIC), 0.0
        for _ in range(POPS):
            self.serve(loop, pop)
            assert len(self.broker.context.long_polling) == 1
            self.serve(loop, send)
            began = time.thread_time()
            self.store.notify()
            self.server.run_calls()
            took += time.thread_time() - began
            assert len(self.broker.context.long_polling) == 0
        return took / POPS * 1e6

    def acks(self, loop: RequestLoop, encoding: int) -> float:
        return self.timed(
            loop,
            [
                self.ack(checkpoint, offset, encoding)
                for checkpoint in list(self.checkpoints)
                for offset in checkpoint.open_offsets()
            ],
        )


def measure(bench: PopBench, loop: RequestLoop, round_number: int) -> dict[str, float]:
    """All cases, once."""
    us = {"POP of 32, binary": bench.pops(loop, MESSAGES)}
    us["ack, binary"] = bench.acks(loop, BINARY)
    us["POP of 32, JSON"] = bench.pops(loop, MESSAGES, JSON)
    us["ack, JSON"] = bench.acks(loop, JSON)
    bench.pops(loop, MESSAGES)
    us["batch ack of 32, binary"] = bench.timed(loop, map(bench.batch_ack, bench.checkpoints))
    assert not len(bench.checkpoints)
    us["POP of 1, binary"] = bench.pops(loop, 1)
    changes = [bench.change(one, one.key.start_offset) for one in bench.checkpoints]
    us["change of the invisible time"] = bench.timed(loop, changes)
    us["wake-up"] = bench.wake_ups(loop)
    us["POP of 32, from 8 queues"] = bench.pops_of_all_queues(loop)
    version = NOW_MS + 1_000 * round_number
    changed = [bench.heartbeat(version + number) for number in range(POPS)]
    us["heartbeat, changed"] = bench.timed(loop, changed)
    us["heartbeat, unchanged"] = bench.timed(loop, [changed[-1]] * POPS)
    return us


def main() -> None:
    table = Table(title="POP path: CPU of the broker (128 B bodies, in memory)")
    for column in ("case", "µs", "goal", "by the rules µs", "ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    best: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        bench = PopBench(Path(folder))
        for number in range(ROUNDS):
            for column, loop in enumerate((bench.loop, bench.rules)):
                for name, us in measure(bench, loop, 2 * number + column).items():
                    times = best.setdefault(name, [1e9, 1e9])
                    times[column] = min(times[column], us)
        bench.broker.close()
    for name, (us, rules_us) in best.items():
        ratio = f"{rules_us / us:.1f}x"
        table.add_row(name, f"{us:.2f}", GOALS.get(name, ""), f"{rules_us:.2f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
