"""The result of a benchmark: as JSON, as text, and what limits it."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.cli.bench.measurement import Measurement, Percentiles, elapsed_s
from penstock.cli.terminal import size_text
from penstock.plurals import count_text

BEHIND_MS_MAX = 10.0
"""A generator whose p99 is later than this is behind its schedule."""
CPU_PERCENT_MAX = 90.0
"""The generator is one thread: with a whole processor it can't do more."""
RATE_SHARE_MIN = 0.98
"""A lower share of the target rate is reported."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What was asked for."""

    mode: str
    """send, consume or e2e."""
    topic: str
    rate: float | None
    """Messages per second of an open loop; None in a closed one."""
    concurrency: int | None
    size: int
    batch: int
    producers: int
    consumers: int
    warmup_s: float
    duration_s: float
    tags: str | None = None
    group: str | None = None
    pipeline: int | None = None
    """Requests in flight on each connection of the compiled generator; None: the Python client."""
    header: str = "binary"
    broker: str | None = None
    """The address of the only broker; None: all brokers of the topic."""
    pull_size: int | None = None
    """Most messages of a pull of the compiled generator."""
    verify: bool = False

    @property
    def loop(self) -> str:
        """`open` or `closed`; consumers alone have no schedule."""
        if self.mode == "consume":
            return "none"
        return "closed" if self.rate is None else "open"


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """Of an end-to-end run: what became of the messages."""

    received: int
    lost: int
    """Acknowledged messages that did not arrive before the end of the wait."""
    duplicates: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A finished benchmark. `latency` and `behind` are in milliseconds."""

    workload: Workload
    messages: int
    byte_count: int
    seconds: float
    latency: Percentiles
    behind: Percentiles | None
    errors: dict[str, int]
    statuses: dict[str, int]
    cpu_percent: float
    interrupted: bool = False
    drained: bool = False
    """Consumers alone: there were no more messages before the end of the time."""
    send_latency: Percentiles | None = None
    delivery: DeliveryCounts | None = None

    @classmethod
    def of(
        cls,
        workload: Workload,
        measured: Measurement,
        *,
        cpu_percent: float,
        interrupted: bool,
        drained: bool = False,
        sending: Measurement | None = None,
        delivery: DeliveryCounts | None = None,
    ) -> "BenchReport":
        """The report of what was measured; `sending` is the producers' part of an e2e run."""
        sends = sending or measured
        return cls(
            workload=workload,
            messages=measured.messages,
            byte_count=measured.byte_count,
            seconds=elapsed_s(measured, drained=drained or interrupted),
            latency=Percentiles.of(measured.latency),
            behind=None if workload.rate is None else Percentiles.of(sends.behind),
            errors=dict(sends.errors.most_common()),
            statuses=dict(sends.statuses.most_common()),
            cpu_percent=round(cpu_percent, 1),
            interrupted=interrupted,
            drained=drained,
            send_latency=None if sending is None else Percentiles.of(sending.latency),
            delivery=delivery,
        )

    @property
    def per_second(self) -> float | None:
        """Messages per second; None if there were none."""
        return self.messages / self.seconds if self.seconds > 0 and self.messages else None

    @property
    def bytes_per_second(self) -> float | None:
        return self.byte_count / self.seconds if self.seconds > 0 and self.messages else None

    @property
    def generator_limited(self) -> bool:
        """Whether the generator, not the cluster, may have limited the result."""
        behind = None if self.behind is None else self.behind["p99"]
        return self.cpu_percent >= CPU_PERCENT_MAX or (
            behind is not None and behind > BEHIND_MS_MAX
        )

    def warnings(self) -> Iterator[str]:
        """What a reader has to know before using the figures."""
        if self.interrupted:
            yield "The run was interrupted; the figures cover the time until then."
        behind = None if self.behind is None else self.behind["p99"]
        if behind is not None and behind > BEHIND_MS_MAX:
            yield (
                f"The generator was behind its schedule (p99 {behind:,.1f} ms). The latency "
                "includes this delay. Lower --rate, or run several generators."
            )
        if self.cpu_percent >= CPU_PERCENT_MAX:
            yield (
                f"The generator used {self.cpu_percent:.0f} % of a processor. The cluster may be "
                "faster than this result. Run several generators."
            )
        rate = self.workload.rate
        if rate is not None and not self.interrupted:
            reached = self.per_second or 0.0
            if reached < rate * RATE_SHARE_MIN:
                yield (
                    f"The target rate was not reached: {reached:,.0f} of {rate:,.0f} messages/s. "
                    "Latencies grow with the length of such a run."
                )
        if self.delivery is not None and self.delivery.lost:
            lost = count_text(self.delivery.lost, "acknowledged message")
            yield f"{lost} did not arrive in time."
        if self.messages == 0:
            if self.workload.mode == "consume":
                yield "No message arrived. Check that the topic has messages for this group."
            else:
                yield "No message counted. Give a longer --duration, or look at the errors."

    def as_json(self) -> dict[str, object]:
        """The documented JSON form."""
        work, delivery = self.workload, self.delivery
        return {
            "mode": work.mode,
            "loop": work.loop,
            "topic": work.topic,
            "group": work.group,
            "target_rate": work.rate,
            "concurrency": work.concurrency,
            "pipeline": work.pipeline,
            "header": None if work.pipeline is None else work.header,
            "pull_size": work.pull_size,
            "size": work.size,
            "batch": work.batch,
            "producers": work.producers,
            "consumers": work.consumers,
            "tags": work.tags,
            "warmup_seconds": work.warmup_s,
            "duration_seconds": work.duration_s,
            "seconds": round(self.seconds, 4),
            "messages": self.messages,
            "bytes": self.byte_count,
            "messages_per_second": _rounded(self.per_second),
            "bytes_per_second": _rounded(self.bytes_per_second),
            "latency_ms": dict(self.latency.values),
            "send_latency_ms": None
            if self.send_latency is None
            else dict(self.send_latency.values),
            "errors": self.errors,
            "statuses": self.statuses,
            "received": None if delivery is None else delivery.received,
            "lost": None if delivery is None else delivery.lost,
            "duplicates": None if delivery is None else delivery.duplicates,
            "generator": {
                "cpu_percent": self.cpu_percent,
                "behind_ms": None if self.behind is None else dict(self.behind.values),
                "limited": self.generator_limited,
            },
            "drained": self.drained,
            "interrupted": self.interrupted,
            "warnings": list(self.warnings()),
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """The lines of the table for people."""
        rate = self.per_second
        work = self.workload
        yield "load", _load_text(work)
        yield "messages", f"{self.messages:,} in {self.seconds:,.2f} s"
        yield "rate", "-" if rate is None else f"{rate:,.1f} messages/s"
        volume = self.bytes_per_second
        yield "throughput", "-" if volume is None else f"{size_text(volume)}/s"
        if work.mode != "consume" or self.latency["max"] is not None:
            yield from _latency_rows(_latency_name(work), self.latency)
        if self.send_latency is not None:
            yield from _latency_rows("send latency", self.send_latency)
        if self.delivery is not None:
            delivery = self.delivery
            yield (
                "delivery",
                f"{delivery.received:,} received, {delivery.lost:,} lost, "
                f"{delivery.duplicates:,} duplicates",
            )
        if work.mode != "consume":
            yield "errors", _counts(self.errors)
            if self.statuses:
                yield "degraded", _counts(self.statuses)
        yield "generator", _generator_text(self)


def _latency_name(work: Workload) -> str:
    if work.mode == "e2e":
        return "end to end"
    return "age on arrival" if work.mode == "consume" else "latency"


def _load_text(work: Workload) -> str:
    pipelined = work.pipeline is not None
    if work.mode == "consume":
        how = f", pulls of up to {work.pull_size:,}" if pipelined else ""
        return f"{count_text(work.consumers, 'consumer')} of {work.topic}{how}"
    if work.rate is not None:
        how = f"open loop, {work.rate:,.0f} messages/s"
    elif pipelined:
        how = (
            f"closed loop, {count_text(work.producers, 'producer')} with "
            f"{count_text(work.pipeline or 0, 'request')} in flight each"
        )
    else:
        how = f"closed loop, {count_text(work.concurrency or 0, 'request')} at a time"
    batch = f", {work.batch} per request" if work.batch > 1 else ""
    return f"{how}, {work.size:,} B each{batch}, to {work.topic}"


def _latency_rows(name: str, latency: Percentiles) -> Iterator[tuple[str, str]]:
    shown = ("p50", "p90", "p99", "p99.9", "max")
    yield name, "  ".join(f"{key} {ms_text(latency[key])}" for key in shown)


def _generator_text(report: BenchReport) -> str:
    text = f"{report.cpu_percent:.0f} % of a processor"
    if report.behind is not None:
        text += (
            f", behind schedule p99 {ms_text(report.behind['p99'])}, "
            f"max {ms_text(report.behind['max'])}"
        )
    return text


def ms_text(value: float | None) -> str:
    """Milliseconds with three significant digits; a dash if unknown."""
    if value is None:
        return "-"
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in counts.items()) or "none"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
