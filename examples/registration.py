"""Why a queue: the story of a registration, measured.

A registration has 50 ms of work of its own. Then it sends a text message, pushes a notification and
books a coupon: three services that take 50 ms each. Called one after another they make the user
wait 200 ms. With a queue between, the registration ends when the message is durable, and the
services take their messages at their own pace, also when twenty times as many come at once.

    python examples/registration.py                   starts a broker of its own
    python examples/registration.py localhost:9876    uses yours, Penstock's or RocketMQ's
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
"""What the registration does itself, and what each service takes."""
SERVICES = ("sms", "push", "coupon")
SERVICE_CALLS_MAX = 20
"""Calls that a service works on at a time: it can do 400 per second."""
SERVICE_LINE_MAX = 40
"""Calls that may wait for their turn; a service refuses the next one."""
WORKERS = 20
"""Requests that the web server handles at a time."""
REGISTRATIONS = 200
SPIKE_FACTOR = 20
USUAL_PER_S = 50
SPIKE_S = 1.0


class Service:
    """Somebody else's service behind a TCP port: 50 ms for each call, so many at a time."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(SERVICE_CALLS_MAX)
        self._waiting = 0
        self.done = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            if self._waiting >= SERVICE_LINE_MAX:
                writer.write(b"overloaded\n")
                continue
            self._waiting += 1
            async with self._turns:
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
    """The three services and how to call them."""

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
        """Raises where the service refuses."""
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


class Figures:
    """How registrations went."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.errors = 0
        self.seconds = 0.0

    async def measure(self, register: Register, user: str) -> None:
        began = time.monotonic()
        try:
            await register(user)
        except RuntimeError:
            self.errors += 1
        else:
            self.took.append(time.monotonic() - began)


async def steady(register: Register) -> Figures:
    """So many workers, each with the next registration as soon as it has done one."""
    figures = Figures()
    users = iter(range(REGISTRATIONS))

    async def work() -> None:
        for user in users:
            await figures.measure(register, str(user))

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    figures.seconds = time.monotonic() - began
    return figures


async def spike(register: Register) -> Figures:
    """Twenty times the usual rate for a second, whether or not the ones before have ended."""
    figures = Figures()
    count = int(SPIKE_FACTOR * USUAL_PER_S * SPIKE_S)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(figures.measure(register, str(number)))
            await asyncio.sleep(max(began + SPIKE_S * (number + 1) / count - time.monotonic(), 0))
    figures.seconds = time.monotonic() - began
    return figures


async def tell_story(nameservers: str) -> int:
    topic = f"UserRegistered-{os.getpid()}"
    async with (
        topic_of_our_own(nameservers, topic),
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
            peak = await spike(with_queue)
            sent = len(usual.took) + len(peak.took)
            drained_s = await drained(services, before, sent)
        results["with a queue"] = usual, peak
    show(results, drained_s)
    return peak.errors


@asynccontextmanager
async def topic_of_our_own(nameservers: str, topic: str) -> AsyncIterator[None]:
    """A topic that goes away again, and the groups of the services with it."""
    async with AsyncAdmin(nameservers) as admin:
        await admin.create_topic(topic, queues=4)
        yield
        for name in SERVICES:
            await admin.delete_group(f"{name}-{topic}")
        await admin.delete_topic(topic)


def consumer_of(name: str, services: Services, nameservers: str, topic: str) -> AsyncConsumer:
    """What takes messages to a service, no more at a time than it can work on."""
    consumer = AsyncConsumer(
        nameservers, group=f"{name}-{topic}", start_at="first", concurrency=SERVICE_CALLS_MAX
    )

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        await services.call(name, message.body.decode())

    return consumer


async def drained(services: Services, before: dict[str, int], wanted: int) -> float:
    """Seconds until every service has had every registration."""
    began = time.monotonic()
    while any(services.all[name].done - before[name] < wanted for name in SERVICES):
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def show(results: dict[str, tuple[Figures, Figures]], drained_s: float) -> None:
    table = Table(title="A registration and its three services")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    rates = [len(usual.took) / usual.seconds for usual, _ in results.values()]
    rows = {
        "a registration takes": [f"{mean(u.took) * 1000:.0f} ms" for u, _ in results.values()],
        f"registrations per second, {WORKERS} workers": [f"{rate:.0f}" for rate in rates],
        f"errors when {SPIKE_FACTOR} times as many come": [
            f"{p.errors} of {p.errors + len(p.took)}" for _, p in results.values()
        ],
        "the last of them waited": [f"{max(p.took) * 1000:.0f} ms" for _, p in results.values()],
    }
    for title, cells in rows.items():
        table.add_row(title, *cells)
    Console().print(table)
    print(
        f"{rates[1] / rates[0]:.1f} times the throughput; the services had caught up "
        f"{drained_s:.1f} s after the peak, at their own pace"
    )


@asynccontextmanager
async def broker_of_our_own() -> AsyncIterator[str]:
    """`penstock up` in a directory that goes away again."""
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
                raise RuntimeError("no broker could be started")
            yield f"127.0.0.1:{nameserver}"
        finally:
            process.terminate()
            await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def main() -> int:
    if len(sys.argv) > 1:
        return await tell_story(sys.argv[1])
    async with broker_of_our_own() as nameservers:
        return await tell_story(nameservers)


if __name__ == "__main__":
    sys.exit(1 if asyncio.run(main()) else 0)
