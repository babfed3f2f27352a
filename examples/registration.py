"""Measures a user registration with and without a message queue.

A registration takes 50 ms. Then it sends a text message, a push notification and a coupon, by
calling three services that take 50 ms each. If it calls them one after another, the user waits for
200 ms. With a message queue the registration ends when the message is acknowledged, and the
services consume the messages at their own pace, even when twenty times as many users register.

    python examples/registration.py                   starts its own broker
    python examples/registration.py localhost:9876    uses a running cluster
"""

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import mean

from rich.console import Console
from rich.table import Table

from penstock import AsyncAdmin, AsyncConsumer, AsyncProducer, Message, ReceivedMessage

WORK_S = 0.05
"""The duration of the registration itself, and of each service call."""
SERVICES = ("sms", "push", "coupon")
SERVICE_CALLS_MAX = 20
"""Concurrent calls of a service: it can process 400 per second."""
SERVICE_WAITING_MAX = 40
"""Calls that may wait; a service refuses further ones."""
WORKERS = 20
"""Concurrent requests of the web server."""
REGISTRATIONS = 200
SPIKE_FACTOR = 20
USUAL_PER_S = 50
SPIKE_S = 1.0


class Service:
    """A service behind a TCP port: 50 ms per call, with limited concurrency."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SERVICE_CALLS_MAX)
        self._waiting = 0
        self.done = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            if self._waiting >= SERVICE_WAITING_MAX:
                writer.write(b"overloaded\n")
                continue
            self._waiting += 1
            async with self._slots:
                self._waiting -= 1
                await asyncio.sleep(WORK_S)
            self.done += 1
            writer.write(b"ok\n")
        writer.close()


def _serve(
    tasks: asyncio.TaskGroup,
    service: Service,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    tasks.create_task(service.serve(reader, writer))


class Services:
    """The three services, and a client for them."""

    def __init__(self) -> None:
        self.all = {name: Service() for name in SERVICES}
        self._ports: dict[str, int] = {}
        self._idle: dict[str, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Services"]:
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            for name, service in self.all.items():
                server = await asyncio.start_server(partial(_serve, tasks, service), "127.0.0.1", 0)
                await stack.enter_async_context(server)
                self._ports[name] = server.sockets[0].getsockname()[1]
                self._idle[name] = []
            yield self
            for connections in self._idle.values():
                for _, writer in connections:
                    writer.close()

    async def call(self, name: str, user: str) -> None:
        """Call a service; raises RuntimeError if it refuses."""
        if self._idle[name]:
            reader, writer = self._idle[name].pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[name])
        writer.write(f"{user}\n".encode())
        answer = await reader.readline()
        self._idle[name].append((reader, writer))
        if answer != b"ok\n":
            raise RuntimeError(f"{name}: {answer.decode().strip()}")


Register = Callable[[str], Awaitable[None]]


class Measurement:
    """The duration and outcome of registrations."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self.errors = 0
        self.seconds = 0.0

    async def measure(self, register: Register, user: str) -> None:
        started = time.monotonic()
        try:
            await register(user)
        except RuntimeError:
            self.errors += 1
        else:
            self.durations.append(time.monotonic() - started)


async def steady(register: Register) -> Measurement:
    """Register REGISTRATIONS users with WORKERS concurrent workers."""
    measurement = Measurement()
    users = iter(range(REGISTRATIONS))

    async def work() -> None:
        for user in users:
            await measurement.measure(register, str(user))

    started = time.monotonic()
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    measurement.seconds = time.monotonic() - started
    return measurement


async def spike(register: Register) -> Measurement:
    """Register users at SPIKE_FACTOR times the usual rate, without waiting for earlier ones."""
    measurement = Measurement()
    count = int(SPIKE_FACTOR * USUAL_PER_S * SPIKE_S)
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(measurement.measure(register, str(number)))
            await asyncio.sleep(max(started + SPIKE_S * (number + 1) / count - time.monotonic(), 0))
    measurement.seconds = time.monotonic() - started
    return measurement


async def compare(nameservers: str) -> int:
    topic = f"UserRegistered-{os.getpid()}"
    async with (
        temporary_topic(nameservers, topic),
        Services().running() as services,
        AsyncProducer(nameservers, group="registration") as producer,
    ):

        async def one_after_another(user: str) -> None:
            await asyncio.sleep(WORK_S)
            for name in SERVICES:
                await services.call(name, user)

        async def with_queue(user: str) -> None:
            await asyncio.sleep(WORK_S)
            await producer.send(Message(topic, user, keys=[user]))

        results = {
            "one after another": (await steady(one_after_another), await spike(one_after_another))
        }
        before = {name: service.done for name, service in services.all.items()}
        async with AsyncExitStack() as stack:
            for name in SERVICES:
                await stack.enter_async_context(consumer_of(name, services, nameservers, topic))
            usual = await steady(with_queue)
            spiked = await spike(with_queue)
            sent = len(usual.durations) + len(spiked.durations)
            drained_s = await drained(services, before, sent)
        results["with a queue"] = usual, spiked
    show(results, drained_s)
    return spiked.errors


@asynccontextmanager
async def temporary_topic(nameservers: str, topic: str) -> AsyncIterator[None]:
    """Create a topic; afterwards delete it and the groups of the services."""
    async with AsyncAdmin(nameservers) as admin:
        await admin.create_topic(topic, queues=4)
        yield
        for name in SERVICES:
            await admin.delete_group(f"{name}-{topic}")
        await admin.delete_topic(topic)


def consumer_of(name: str, services: Services, nameservers: str, topic: str) -> AsyncConsumer:
    """A consumer that calls a service, with no more concurrent calls than the service accepts."""
    consumer = AsyncConsumer(
        nameservers, group=f"{name}-{topic}", start_at="first", concurrency=SERVICE_CALLS_MAX
    )

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        await services.call(name, message.body.decode())

    return consumer


async def drained(services: Services, before: dict[str, int], wanted: int) -> float:
    """Wait until every service has processed all registrations; returns the seconds."""
    started = time.monotonic()
    while any(services.all[name].done - before[name] < wanted for name in SERVICES):
        await asyncio.sleep(0.01)
    return time.monotonic() - started


def show(results: dict[str, tuple[Measurement, Measurement]], drained_s: float) -> None:
    table = Table(title="A registration with three services")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    rates = [len(usual.durations) / usual.seconds for usual, _ in results.values()]
    rows = {
        "mean duration of a registration": [
            f"{mean(u.durations) * 1000:.0f} ms" for u, _ in results.values()
        ],
        f"registrations per second with {WORKERS} workers": [f"{rate:.0f}" for rate in rates],
        f"errors at {SPIKE_FACTOR} times the usual rate": [
            f"{p.errors} of {p.errors + len(p.durations)}" for _, p in results.values()
        ],
        "longest duration at that rate": [
            f"{max(p.durations) * 1000:.0f} ms" for _, p in results.values()
        ],
    }
    for title, cells in rows.items():
        table.add_row(title, *cells)
    Console().print(table)
    print(
        f"With a queue the throughput is {rates[1] / rates[0]:.1f} times as high. The services had "
        f"processed all messages {drained_s:.1f} s after the spike."
    )


@asynccontextmanager
async def local_broker() -> AsyncIterator[str]:
    """Run `penstock up` with a temporary data directory."""
    nameserver, broker = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.cli.main", "up", "--data", folder, "--no-console",
            "--nameserver-port", str(nameserver), "--broker-port", str(broker),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
            if not line.startswith(b"penstock is up"):
                raise RuntimeError("the broker did not start")
            yield f"127.0.0.1:{nameserver}"
        finally:
            process.terminate()
            await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def main() -> int:
    if len(sys.argv) > 1:
        return await compare(sys.argv[1])
    async with local_broker() as nameservers:
        return await compare(nameservers)


if __name__ == "__main__":
    sys.exit(1 if asyncio.run(main()) else 0)
