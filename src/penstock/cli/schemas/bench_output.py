"""JSON of `penstock bench`."""

from typing import Annotated

import msgspec

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class Latencies(JsonValue):
    """Percentiles in milliseconds. Without a message all of them are null."""

    p50: float | None
    p90: float | None
    p99: float | None
    p99_9: Annotated[float | None, doc("the 99.9th percentile")] = msgspec.field(name="p99.9")
    max: float | None
    min: float | None
    mean: float | None


class BenchGenerator(JsonValue):
    """The process that measured."""

    cpu_percent: Annotated[float, doc("of one processor")]
    behind_ms: Annotated[
        Latencies | None,
        doc("how much later than intended requests were sent; null without `--rate`"),
    ]
    limited: Annotated[bool, doc("whether it may have limited the result")]


class BenchResult(JsonValue):
    """The options of a benchmark and what it measured."""

    mode: Annotated[str, doc("`send`, `consume` or `e2e`")]
    loop: Annotated[str, doc("`open`, `closed`, or `none` for consumers alone")]
    topic: str
    group: Annotated[str | None, doc("null for `send`")]
    target_rate: Annotated[float | None, doc("messages per second; null without `--rate`")]
    concurrency: Annotated[int | None, doc("null with `--rate` and with `--pipeline`")]
    pipeline: Annotated[int | None, doc("requests in flight on each connection; null without it")]
    header: Annotated[str | None, doc("`binary` or `json`; null without `--pipeline`")]
    pull_size: Annotated[int | None, doc("`consume --pipeline`: most messages of a pull")]
    size: Annotated[int, doc("bytes of a body")]
    batch: Annotated[int, doc("messages per request")]
    producers: int
    consumers: int
    tags: str | None
    warmup_seconds: float
    duration_seconds: Annotated[float, doc("the requested time")]
    seconds: Annotated[float, doc("the time that was measured")]
    messages: int
    bytes: int
    messages_per_second: Annotated[float | None, doc("null without a message")]
    bytes_per_second: Annotated[float | None, doc("null without a message")]
    latency_ms: Annotated[
        Latencies,
        doc("until the acknowledgement; `e2e`: until the arrival; `consume`: age on arrival"),
    ]
    send_latency_ms: Annotated[Latencies | None, doc("`e2e`: until the acknowledgement; else null")]
    errors: Annotated[dict[str, int], doc("number of messages that failed, by kind of error")]
    statuses: Annotated[dict[str, int], doc("number of messages by status, if it is not `SEND_OK`")]
    received: Annotated[int | None, doc("`e2e`: messages that arrived, with the warm-up")]
    lost: Annotated[int | None, doc("`e2e`: acknowledged messages that did not arrive in time")]
    duplicates: Annotated[int | None, doc("`e2e`: messages that arrived again")]
    generator: BenchGenerator
    drained: Annotated[bool, doc("`consume`: there were no more messages before the time was over")]
    interrupted: Annotated[bool, doc("whether Ctrl-C ended the measurement")]
    warnings: list[str]


OUTPUTS = {
    "bench send": JsonOutput(BenchResult),
    "bench consume": JsonOutput(BenchResult),
    "bench e2e": JsonOutput(BenchResult),
}
