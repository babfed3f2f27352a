"""Runs a pipelined load against all brokers of a topic: sends, or pulls of what is stored."""

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli.bench.bench_report import Workload
from penstock.cli.bench.generator_cpu import GeneratorCpu
from penstock.cli.bench.live_line import live_line
from penstock.cli.bench.measurement import Measurement
from penstock.cli.bench.pipelined.frame_templates import HEADERS, pull_templates, send_templates
from penstock.cli.bench.pipelined.pipelined_load import PipelinedLoad
from penstock.cli.bench.pipelined.pull_window import PullWindow
from penstock.cli.bench.pipelined.send_window import NEVER_NS, SendWindow
from penstock.cli.bench.schedule import SECOND_NS, Window
from penstock.cli.bench.wake_timer import WakeTimer
from penstock.cli.remote import ClusterOptions
from penstock.errors import NoQueue
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import TopicStatsTable
from penstock.wire.codes import MASTER_ID, RequestCode

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin

WAKE_NS_MIN = 200_000
"""At high rates several requests are sent at each wake-up; each keeps its intended time."""

QueueId = tuple[str, int]
"""Broker name and queue id."""
Spans = Mapping[QueueId, tuple[int, int]]
"""The first offset of each queue and the one behind its last."""


@dataclass(frozen=True, slots=True)
class PipelinedRun:
    """What a run has measured."""

    measured: Measurement
    cpu_percent: float
    drained: bool = False


async def run_sends(
    cluster: ClusterOptions, work: Workload, stop: asyncio.Event, *, count: int | None = None
) -> PipelinedRun:
    """Send for the time of the workload, or this number of messages.

    `work.pipeline` requests are in flight on each of `work.producers` connections to each broker.
    """
    load = PipelinedLoad(cluster)
    try:
        windows = await _connect_senders(load, cluster, work)
        start_ns = time.monotonic_ns()
        measured = Window.after(start_ns, work.warmup_s, work.duration_s)
        load.set_window(measured)
        cpu = GeneratorCpu(measured)
        _share_count(windows, count, work.batch)
        _share_rate(windows, work, start_ns)
        for window in windows:
            window.stop_ns = measured.end_ns if count is None else NEVER_NS

        def over() -> bool:
            sent = all(window.left == 0 for window in windows)
            return sent or stop.is_set() or time.monotonic_ns() >= windows[0].stop_ns

        async with live_line(load.measured, load.in_flight), _timer(load, windows, work):
            load.push()
            await load.until(over)
            cpu_percent = cpu.percent()
            for window in windows:
                window.stop_ns = 0
            await load.until(lambda: load.in_flight() == 0)
        return PipelinedRun(load.measured, cpu_percent)
    finally:
        load.close()


async def run_pulls(cluster: ClusterOptions, work: Workload, stop: asyncio.Event) -> PipelinedRun:
    """Pull all messages that are stored now, until the end or the end of the time.

    `work.pipeline` pulls are in flight on each of `work.consumers` connections to each broker, but
    at most one from each queue.
    """
    load = PipelinedLoad(cluster)
    try:
        windows = await _connect_pullers(load, cluster, work)
        measured = Window.after(time.monotonic_ns(), 0.0, work.duration_s)
        load.set_window(measured)
        cpu = GeneratorCpu(measured)
        for window in windows:
            window.stop_ns = measured.end_ns

        def drained() -> bool:
            return all(window.open == 0 for window in windows)

        async with live_line(load.measured, load.in_flight):
            load.push()
            await load.until(
                lambda: drained() or stop.is_set() or time.monotonic_ns() >= measured.end_ns
            )
        idle_s = max(time.monotonic_ns() - load.measured.last_ns, 0) / SECOND_NS
        return PipelinedRun(load.measured, cpu.percent(idle_s if drained() else 0.0), drained())
    finally:
        load.close()


# --- connections


async def _connect_senders(
    load: PipelinedLoad, cluster: ClusterOptions, work: Workload
) -> list[SendWindow]:
    async with cluster.admin() as admin:
        topic = admin.session.with_namespace(work.topic)
        queues = await _writable_queues(admin, work)
    assert work.pipeline is not None
    body = os.urandom(work.size)
    windows = []
    for address, ids in queues.items():
        for _ in range(work.producers):
            templates = send_templates(
                topic,
                ids,
                body=body,
                batch=work.batch,
                tags=work.tags,
                encoding=HEADERS[work.header],
            )
            window = SendWindow(templates, work.pipeline, load.recorder, work.size)
            windows.append(window)
            await load.connect(address, window)
    return windows


async def _connect_pullers(
    load: PipelinedLoad, cluster: ClusterOptions, work: Workload
) -> list[PullWindow]:
    async with cluster.admin() as admin:
        topic = admin.session.with_namespace(work.topic)
        group = admin.session.with_namespace(work.group or "")
        spans = await _spans(admin, work)
    assert work.pipeline is not None
    assert work.pull_size is not None
    windows = []
    for address, found in spans.items():
        ids = sorted(found)
        for number in range(min(work.consumers, len(ids))):
            own = ids[number :: work.consumers]
            templates = pull_templates(
                group,
                topic,
                own,
                count_max=work.pull_size,
                tags=work.tags,
                encoding=HEADERS[work.header],
            )
            window = PullWindow(
                templates,
                work.pipeline,
                load.recorder,
                [found[queue] for queue in own],
                verify=work.verify,
            )
            windows.append(window)
            await load.connect(address, window)
    return windows


async def _writable_queues(admin: "AsyncAdmin", work: Workload) -> dict[str, list[QueueId]]:
    """The writable queues of the topic, by the address of the master."""
    if work.broker is not None:
        return {address: sorted(found) for address, found in (await _spans(admin, work)).items()}
    route = await admin.route(work.topic)
    queues: dict[str, list[QueueId]] = defaultdict(list)
    for queue in route.write_queues:
        address = route.addresses[queue.broker_name][MASTER_ID]
        queues[address].append((queue.broker_name, queue.queue_id))
    if not queues:
        raise NoQueue(f"topic {work.topic!r} has no writable queue")
    return queues


async def _spans(admin: "AsyncAdmin", work: Workload) -> dict[str, Spans]:
    """The queues of the topic, by the address of the master."""
    addresses = [work.broker]
    if work.broker is None:
        route = await admin.route(work.topic)
        addresses = [route.addresses[name].get(MASTER_ID) for name in route.brokers]
    fields = {"topic": admin.session.with_namespace(work.topic)}
    found: dict[str, Spans] = {}
    for address in addresses:
        if address is not None:
            answer = await admin.ask(address, RequestCode.GET_TOPIC_STATS_INFO, fields)
            table = fastjson.decode(answer.body, TopicStatsTable).offset_table
            found[address] = {
                (queue.broker_name, queue.queue_id): (ends.min_offset, ends.max_offset)
                for queue, ends in table.items()
            }
    return found


# --- sending


def _share_count(windows: Sequence[SendWindow], count: int | None, batch: int) -> None:
    """Give each connection its share of the requests."""
    if count is not None:
        requests = -(-count // batch)
        for number, window in enumerate(windows):
            window.left = (requests - number + len(windows) - 1) // len(windows)


def _share_rate(windows: Sequence[SendWindow], work: Workload, start_ns: int) -> None:
    """Give each connection its part of the schedule."""
    if work.rate is not None:
        interval_ns = SECOND_NS * work.batch / work.rate
        for number, window in enumerate(windows):
            window.schedule(start_ns + number * interval_ns, interval_ns * len(windows))


@contextlib.asynccontextmanager
async def _timer(
    load: PipelinedLoad, windows: Sequence[SendWindow], work: Workload
) -> AsyncIterator[None]:
    """In an open loop: send requests when they are due."""
    if work.rate is None:
        yield
        return
    task = asyncio.ensure_future(_send_when_due(load, windows))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _send_when_due(load: PipelinedLoad, windows: Sequence[SendWindow]) -> None:
    timer = WakeTimer()
    try:
        while True:
            load.push()
            due_ns = min(window.due_ns() for window in windows)
            if due_ns == NEVER_NS:  # every slot is taken: responses make space
                due_ns = 0
            await timer.until(max(due_ns, time.monotonic_ns() + WAKE_NS_MIN))
    finally:
        timer.close()
