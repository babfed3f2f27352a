"""The time of requests, from the read of a request until its response is written, by code.

Sends are counted by the request loop, without an object for each. They count as successful: refused
ones are among the others. All requests of one read have the same time, because their responses are
written together after the last of them.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from time import perf_counter_ns

from penstock.metrics import Histogram, HistogramFamily, LabelledHistogram, Registry
from penstock.server.pending_response import PendingResponse
from penstock.server.request_loop import (
    APPEND_BOUNDS_NS,
    RPC_BOUNDS_NS,
    SEND_CODES,
    RequestLoop,
)
from penstock.wire.codes import ResponseCode, request_name

BOUNDS_MS = tuple(bound // 1_000_000 for bound in RPC_BOUNDS_NS)
LABELS = ("protocol_type", "request_code", "response_code", "is_long_polling", "result")
_WIDTH = len(RPC_BOUNDS_NS) + 2


class RpcLatency:
    """Histograms by request code, response code and whether the request was suspended."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[int, int, bool], Histogram] = {}

    def observe_read(self, answered: Mapping[int, int], took_ns: int) -> None:
        """Count the responses of one read, as the request loop counts them."""
        for key, count in answered.items():
            self._observe((key >> 16, key & 0xFFFF, False), took_ns, count)

    def observe(self, pending: PendingResponse, response_code: int) -> None:
        """Count a response that was not written with its read."""
        took_ns = perf_counter_ns() - pending.began_ns
        self._observe((pending.code, response_code & 0xFFFF, pending.suspended), took_ns, 1)

    def observe_late(self, code: int, response_code: int, took_ns: int, count: int) -> None:
        """Count sends whose message was not safe in time."""
        self._observe((code, response_code, False), took_ns, count)

    def _observe(self, key: tuple[int, int, bool], took_ns: int, count: int) -> None:
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(BOUNDS_MS)
        histogram.observe(took_ns / 1e6, count)

    def histograms(self, loop: RequestLoop) -> Iterator[LabelledHistogram]:
        """All histograms, those of the request loop first."""
        times = loop.send_times
        others = dict(self._histograms)
        for number, code in enumerate(SEND_CODES):
            part = [int(times[number * _WIDTH + n]) for n in range(_WIDTH)]
            total = part.pop() / 1e6
            # Those that created their topic were answered later, like other requests.
            more = others.pop((code, ResponseCode.SUCCESS, False), None)
            if more is not None:
                part = [ours + theirs for ours, theirs in zip(part, more.counts, strict=True)]
                total += more.total
            if any(part):
                made = Histogram.of(BOUNDS_MS, part, total)
                yield _labels(code, ResponseCode.SUCCESS, False), made
        for key, histogram in others.items():
            yield _labels(*key), histogram


def add_rpc_metrics(registry: Registry, latency: RpcLatency, loop: RequestLoop) -> None:
    """Add the time of requests and of appends."""
    registry.add(
        HistogramFamily(
            "rocketmq_rpc_latency",
            "Time from the read of a request to its response, in ms.",
            lambda: latency.histograms(loop),
            LABELS,
        )
    )
    if loop.send is not None:
        bounds = tuple(bound / 1e9 for bound in APPEND_BOUNDS_NS)
        registry.add(
            HistogramFamily(
                "penstock_append_seconds",
                "Time to parse and store a send request; the average of the requests of one read.",
                lambda: [
                    (
                        (),
                        Histogram.of(
                            bounds,
                            [int(loop.append_times[n]) for n in range(len(bounds) + 1)],
                            int(loop.append_times[len(bounds) + 1]) / 1e9,
                        ),
                    )
                ],
            )
        )


@cache
def _labels(code: int, response_code: int, suspended: bool) -> tuple[str, ...]:
    try:
        answer = ResponseCode(response_code).name
    except ValueError:
        answer = str(response_code)
    return (
        "remoting",
        request_name(code).lower(),
        answer.lower(),
        "true" if suspended else "false",
        "success",
    )
