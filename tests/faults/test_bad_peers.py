"""Peers that misbehave: the broker's memory stays within its bound and others are served.

The bound: at rest about 30 MB, plus `memory_bytes_max` (set to 32 MiB here) for unfinished requests
and unsent answers, plus about 3 KB per connection, plus what the kernel's socket buffers hold.
"""

import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from penstock.wire.output import encode
from tests.depth import rounds
from tests.faults.healthy_client import read_frame, send_frame

MIB = 1024 * 1024
BOUND_MIB = 128
BUDGET = 32 * MIB


class Broker:
    """A broker in a separate process."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [
            sys.executable, "-m", "penstock.cli.main", "broker", "--port", str(self.port),
            "--data", str(folder / "store"),
        ]  # fmt: skip
        env = {
            **os.environ,
            "PENSTOCK_SERVER_MEMORY_BYTES_MAX": str(BUDGET),
            "PENSTOCK_BROKER_PROBE_PORT": "0",
        }
        self.log = folder / "log.txt"
        self._log = self.log.open("wb")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=env)
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.log.read_text()

    def own_mib(self) -> float:
        """Memory of the process that is not mapped from files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.stdout is not None
        assert self.process.wait(30) == 0
        self.process.stdout.close()
        self._log.close()
        text = self.log.read_text()
        assert "Traceback" not in text, text[-3000:]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    yield made
    made.stop()


@contextmanager
def healthy_client(broker: Broker, what: str) -> Iterator[None]:
    """Run a healthy client beside the misbehaving ones, and print its latencies."""
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.healthy_client", str(broker.port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    try:
        yield
    finally:
        printed, _ = client.communicate()
    assert client.returncode == 0, "the healthy client was not served"
    taken = sorted(json.loads(printed))
    print(
        f"{what}: own memory {broker.own_mib():.0f} MiB; "
        f"{len(taken)} sends of a healthy client took "
        f"{taken[len(taken) // 2]:.2f} ms in the middle, {taken[int(len(taken) * 0.99)]:.2f} p99"
    )
    assert broker.own_mib() < BOUND_MIB


def test_random_bytes_do_not_affect_other_clients(broker: Broker) -> None:
    choice = random.Random(1)
    with healthy_client(broker, "random bytes"):
        for _ in range(rounds(ci=100, proof=2000)):
            with broker.connect() as connection:
                data = choice.randbytes(choice.randrange(1, 2000))
                if choice.random() < 0.5:  # a valid start
                    data = send_frame(1)[: choice.randrange(4, 200)] + data
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except ConnectionError:
                    pass


def test_damaged_requests_do_not_affect_other_clients(broker: Broker) -> None:
    """Valid frames with some bytes changed: answered or closed, never a crash."""
    choice = random.Random(2)
    good = [
        send_frame(7),
        encode(11, {"consumerGroup": "g", "topic": "TopicT", "queueId": "0", "queueOffset": "0",
                    "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0",
                    "suspendTimeoutMillis": "0", "subVersion": "0", "subscription": "*"}),
        encode(34, {}, b'{"clientID":"c","consumerDataSet":[],"producerDataSet":[]}'),
        encode(17, {"topic": "x", "defaultTopic": "TBW102", "readQueueNums": "4",
                    "writeQueueNums": "4", "perm": "6", "topicFilterType": "SINGLE_TAG",
                    "order": "false"}),
        encode(28), encode(202, {"topic": "TopicT"}), encode(25, {}, b"brokerPermission=6"),
        encode(103, {"brokerName": "b"}, b"{}"), encode(41, {}, b'{"mqSet":[]}'),
    ]  # fmt: skip
    with healthy_client(broker, "damaged requests"):
        for _ in range(rounds(ci=150, proof=3000)):
            data = bytearray(choice.choice(good))
            for _ in range(choice.randrange(1, 6)):
                data[choice.randrange(8, len(data))] = choice.randrange(256)
            with broker.connect() as connection:
                try:
                    connection.sendall(bytes(data))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except ConnectionError:
                    pass


def test_unfinished_frames_with_huge_lengths_do_not_exhaust_memory(broker: Broker) -> None:
    """Unfinished frames take the memory of the bytes sent, not of their announced length."""
    with healthy_client(broker, "half frames"), ExitStack() as stack:
        for number in range(rounds(ci=100, proof=1000)):
            connection = stack.enter_context(broker.connect())
            if number % 3 == 0:
                connection.sendall(struct.pack(">ii", 16 * MIB - 4, 100))
            elif number % 3 == 1:
                connection.sendall(struct.pack(">ii", 0x7FFFFFFF, 100))
            else:
                connection.sendall(send_frame(1, bytes(500_000))[:300_000])


def test_clients_that_send_one_byte_at_a_time_do_not_exhaust_memory(broker: Broker) -> None:
    """Many connections that send a byte now and then."""
    frame = send_frame(1)
    with healthy_client(broker, "slow loris"), ExitStack() as stack:
        wires = [stack.enter_context(broker.connect()) for _ in range(rounds(ci=100, proof=1000))]
        for at in range(20):
            for wire in wires:
                wire.sendall(frame[at : at + 1])


def test_idle_connections_do_not_exhaust_memory(broker: Broker) -> None:
    count = rounds(ci=500, proof=5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 500)), hard))
    before = broker.own_mib()
    with healthy_client(broker, f"{count} idle connections"), ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(broker.connect())
        with broker.connect() as last:
            last.sendall(send_frame(3))
            assert read_frame(last).code == 0
        print(f"{(broker.own_mib() - before) * 1024 / count:.1f} KiB per connection")


def test_consumers_that_never_read_do_not_exhaust_memory(broker: Broker) -> None:
    """They request the same megabytes again and again and never read the responses."""
    with broker.connect() as connection:
        for number in range(40):
            connection.sendall(send_frame(number, bytes(100_000)))
            assert read_frame(connection).code == 0
    pull = encode(11, {
        "consumerGroup": "g", "topic": "TopicT", "queueId": "0", "queueOffset": "0",
        "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0",
        "subscription": "*", "subVersion": "0",
    })  # fmt: skip
    with healthy_client(broker, "consumers that never read"), ExitStack() as stack:
        for _ in range(rounds(ci=20, proof=200)):
            wire = stack.enter_context(broker.connect())
            wire.setblocking(False)
            with suppress(BlockingIOError):
                wire.send(pull * 2000)
        time.sleep(0.5)  # let the buffers fill up: no event reports that they are full
