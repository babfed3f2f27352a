"""The line on stderr that shows the progress of a benchmark on a terminal."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable

from penstock.cli.bench.bench_report import ms_text
from penstock.cli.bench.measurement import MS_NS, Measurement
from penstock.cli.bench.schedule import SECOND_NS
from penstock.plurals import count_text

EVERY_S = 0.5
_CLEAR = "\r\x1b[K"


def progress_text(
    measured: Measurement, now_ns: int, in_flight: int | None, rate: float | None
) -> str:
    """The progress of a run at this time; `rate` is that of the last interval."""
    window = measured.window
    if now_ns < window.begin_ns:
        left_s = (window.begin_ns - now_ns) / SECOND_NS
        return f"warm-up, {left_s:.0f} s left"
    done_s = min((now_ns - window.begin_ns) / SECOND_NS, window.seconds)
    words = [f"{done_s:.0f}/{window.seconds:.0f} s"]
    if rate is not None:
        words.append(f"{rate:,.0f} messages/s")
    latency = measured.latency
    if latency.count:
        for name, percent in (("p50", 50.0), ("p99", 99.0)):
            value = latency.percentile(percent)
            words.append(f"{name} {ms_text(None if value is None else value / MS_NS)}")
        words.append(f"max {ms_text(latency.max / MS_NS)}")
    if in_flight is not None:
        words.append(f"{in_flight:,} in flight")
    errors = measured.errors.total()
    if errors:
        words.append(count_text(errors, "error"))
    return "  ".join(words)


@contextlib.asynccontextmanager
async def live_line(
    measured: Measurement, in_flight: Callable[[], int] | None = None
) -> AsyncIterator[None]:
    """Show the progress until the end; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    task = asyncio.ensure_future(_show(measured, in_flight))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print(_CLEAR, end="", file=sys.stderr, flush=True)


async def _show(measured: Measurement, in_flight: Callable[[], int] | None) -> None:
    before: tuple[int, int] | None = None
    while True:
        now_ns, messages = time.monotonic_ns(), measured.messages
        rate = None
        if before is not None and now_ns > before[0]:
            rate = (messages - before[1]) * SECOND_NS / (now_ns - before[0])
        before = now_ns, messages
        waiting = None if in_flight is None else in_flight()
        text = progress_text(measured, now_ns, waiting, rate)
        print(_CLEAR + text, end="", file=sys.stderr, flush=True)
        await asyncio.sleep(EVERY_S)
