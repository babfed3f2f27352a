"""The three benchmarks: send, consume, end to end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.cli.bench.bench_objects import bench_group, bench_topic
from penstock.cli.bench.bench_report import BenchReport, DeliveryCounts, Workload
from penstock.cli.bench.generator_cpu import GeneratorCpu
from penstock.cli.bench.live_line import live_line
from penstock.cli.bench.loads import ClosedLoop, Requests, run_open
from penstock.cli.bench.measurement import Measurement
from penstock.cli.bench.receiving import PRIMING_BODY, ArrivalReceiver, StampedReceiver, consumers
from penstock.cli.bench.schedule import SECOND_NS, Schedule, Window
from penstock.cli.bench.stamped_body import StampedBodies
from penstock.cli.remote import ClusterOptions

if TYPE_CHECKING:
    from penstock.client.producer.async_producer import AsyncProducer

IN_FLIGHT_MAX = 1_000_000
"""Limit of each producer: an open loop must not wait, but also not fill the memory."""
FILL_CONCURRENCY = 500
IDLE_S = 1.0
"""A topic from which nothing has arrived for this long is drained."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A benchmark and what is created for it."""

    workload: Workload
    create_topic: bool = False
    queues: int | None = None
    create_group: bool = False
    start_at: Literal["last", "first"] = "last"
    fill: int = 0
    drain_s: float = 10.0


async def run_bench(cluster: ClusterOptions, plan: BenchPlan) -> BenchReport:
    """Run a benchmark; Ctrl-C ends it early, with the figures until then."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    runs = {"send": _send, "consume": _consume, "e2e": _end_to_end}
    work = plan.workload
    if work.broker is not None:
        return await runs[work.mode](cluster, plan, stop)
    async with (
        cluster.admin() as admin,
        bench_topic(admin, work.topic, create=plan.create_topic, queues=plan.queues),
        bench_group(admin, work.group or "", create=plan.create_group),
    ):
        return await runs[work.mode](cluster, plan, stop)


async def _send(cluster: ClusterOptions, plan: BenchPlan, stop: asyncio.Event) -> BenchReport:
    work = plan.workload
    if work.pipeline is not None:
        from penstock.cli.bench.pipelined.pipelined_runs import run_sends

        sends = await run_sends(cluster, work, stop)
        return BenchReport.of(
            work, sends.measured, cpu_percent=sends.cpu_percent, interrupted=stop.is_set()
        )
    async with _producers(cluster, work) as producers:
        window = _window(work)
        measured, cpu = Measurement(window), GeneratorCpu(window)
        requests = Requests(producers, work, measured)
        async with live_line(measured, lambda: requests.in_flight):
            await _drive(requests, work, window, stop)
            cpu_percent = cpu.percent()
            await requests.drain(cluster.timeout_ms / 1000 + 1)
    return BenchReport.of(work, measured, cpu_percent=cpu_percent, interrupted=stop.is_set())


async def _end_to_end(cluster: ClusterOptions, plan: BenchPlan, stop: asyncio.Event) -> BenchReport:
    work = plan.workload
    bodies = StampedBodies(work.size)
    receiver = StampedReceiver(bodies, Measurement(Window(0, 0)))
    async with (
        _producers(cluster, work) as producers,
        consumers(
            work.consumers,
            cluster.nameserver,
            work.topic,
            receiver,
            group=work.group,
            **cluster.keywords(),
        ),
    ):
        await _or_stopped(receiver.wait_for_subscription(producers[0], work.topic), stop)
        window = _window(work)
        measured, sending, cpu = Measurement(window), Measurement(window), GeneratorCpu(window)
        receiver.measured = measured
        requests = Requests(producers, work, sending, bodies)
        async with live_line(measured, lambda: requests.in_flight):
            await _drive(requests, work, window, stop)
            cpu_percent = cpu.percent()
            await requests.drain(cluster.timeout_ms / 1000 + 1)
            await receiver.wait_for(requests.acknowledged, plan.drain_s, stop)
    delivery = DeliveryCounts(
        received=receiver.seen.count,
        lost=receiver.seen.missing(requests.acknowledged),
        duplicates=receiver.seen.duplicates,
    )
    return BenchReport.of(
        work,
        measured,
        cpu_percent=cpu_percent,
        interrupted=stop.is_set(),
        sending=sending,
        delivery=delivery,
    )


async def _consume(cluster: ClusterOptions, plan: BenchPlan, stop: asyncio.Event) -> BenchReport:
    work = plan.workload
    if work.pipeline is not None:
        return await _catch_up(cluster, plan, stop)
    if plan.fill:
        async with _producers(cluster, work) as producers:
            filling = Requests(producers, work, Measurement(Window(0, 0)))
            await ClosedLoop(filling, FILL_CONCURRENCY, stop, count=plan.fill).run()
    from_last = plan.start_at == "last"
    receiver = ArrivalReceiver(lambda: Measurement(_window(work)), ages=from_last)
    async with consumers(
        work.consumers,
        cluster.nameserver,
        work.topic,
        receiver,
        group=work.group,
        start_at=plan.start_at,
        concurrency=work.concurrency,
        **cluster.keywords(),
    ):
        begins = from_last or await receiver.wait_for_first(work.duration_s, stop)
        measured, drained = receiver.start(), False
        cpu = GeneratorCpu(measured.window)
        if begins:
            async with live_line(measured):
                drained = await _until_end(measured, stop, ends=not from_last)
        cpu_percent = cpu.percent(idle_s=IDLE_S if drained else 0.0)
    return BenchReport.of(
        work, measured, cpu_percent=cpu_percent, interrupted=stop.is_set(), drained=drained
    )


async def _catch_up(cluster: ClusterOptions, plan: BenchPlan, stop: asyncio.Event) -> BenchReport:
    """Pull all stored messages with the compiled generator."""
    from penstock.cli.bench.pipelined.pipelined_runs import run_pulls, run_sends

    work = plan.workload
    if plan.fill:
        filling = replace(work, producers=1, pipeline=FILL_CONCURRENCY)
        await run_sends(cluster, filling, stop, count=plan.fill)
    pulls = await run_pulls(cluster, work, stop)
    return BenchReport.of(
        work,
        pulls.measured,
        cpu_percent=pulls.cpu_percent,
        interrupted=stop.is_set(),
        drained=pulls.drained,
    )


async def _until_end(measured: Measurement, stop: asyncio.Event, *, ends: bool) -> bool:
    """Wait for the end of the window. If the topic `ends`, also for its last message; True then."""
    while (now_ns := time.monotonic_ns()) < measured.window.end_ns and not stop.is_set():
        idle_s = (now_ns - measured.last_ns) / SECOND_NS
        if ends and measured.messages and idle_s > IDLE_S:
            return True
        await asyncio.sleep(0.02)
    return False


async def _drive(requests: Requests, work: Workload, window: Window, stop: asyncio.Event) -> None:
    if work.rate is not None:
        start_ns = time.monotonic_ns()
        schedule = Schedule.until(start_ns, window.end_ns, work.rate / work.batch)
        await run_open(requests, schedule, stop)
    else:
        assert work.concurrency is not None
        await ClosedLoop(requests, work.concurrency, stop, end_ns=window.end_ns).run()


async def _or_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Wait for the work; an interruption ends it."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if tasks[0] not in done:
        raise KeyboardInterrupt
    tasks[0].result()


@contextlib.asynccontextmanager
async def _producers(
    cluster: ClusterOptions, work: Workload
) -> "AsyncIterator[list[AsyncProducer]]":
    """The producers, connected to all brokers of the topic."""
    from penstock.client.messages import Message
    from penstock.client.producer.async_producer import AsyncProducer

    async with contextlib.AsyncExitStack() as running:
        made = []
        for _ in range(work.producers):
            producer = AsyncProducer(
                cluster.nameserver,
                group="penstock-bench",
                retries=0,
                compression=None,
                create_topics=False,
                in_flight_max=IN_FLIGHT_MAX,
                **cluster.keywords(),
            )
            made.append(await running.enter_async_context(producer))
        for producer in made:
            for queue in await producer.queues(work.topic):
                await producer.send(Message(work.topic, PRIMING_BODY, work.tags), queue=queue)
        yield made


def _window(work: Workload) -> Window:
    return Window.after(time.monotonic_ns(), work.warmup_s, work.duration_s)
