"""The loads: what each asks of a peer, and how its client puts messages into requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.peer import KAFKA, NATS, ROCKETMQ

BODY_BYTES = 128
WARM_MESSAGES = 200_000
BACKLOG_MESSAGES = 1_000_000
FILL_BATCH = 100
RATES = (1_000, 5_000, 10_000)

SINGLE = "1 message per request"
_SINGLE_EACH = {
    ROCKETMQ: SINGLE,
    KAFKA: f"{SINGLE} (`batch.size=0`)",
    NATS: SINGLE,
}


@dataclass(frozen=True)
class Load:
    """A load. Peers whose protocol is not in `batching` are not measured with it."""

    name: str
    title: str
    kind: str
    options: Mapping[str, Any]
    batching: Mapping[str, str]
    note: str = ""
    sync_flush: bool = False
    backlog: bool = False
    rate: int = 0


def _sync(threads: int, *, sync_flush: bool = False) -> Load:
    noun = "thread" if threads == 1 else "threads"
    suffix = "-flush" if sync_flush else ""
    return Load(
        f"sync-{threads}{suffix}",
        f"{threads} {noun}, synchronous sends" + (", sync flush" if sync_flush else ""),
        "sync",
        {"threads": threads, "batching": "none"},
        _SINGLE_EACH,
        sync_flush=sync_flush,
    )


def _pull(count: int, listener: int) -> Load:
    """`listener` is how many messages RocketMQ's consumer hands over at a time."""
    return Load(
        f"consume-{count}",
        f"Catching up, pulls of {count:,}",
        "consume",
        {"pull": count, "listener": listener},
        {
            ROCKETMQ: f"at most {count:,} messages per pull, {listener} per call of the listener",
            KAFKA: f"fetches by size (1 MiB per partition); `max.poll.records={count}`",
            NATS: f"{count:,} messages per pull",
        },
        backlog=True,
    )


def _rate(rate: int) -> Load:
    return Load(
        f"rate-{rate}",
        f"End to end at {rate:,} messages/s",
        "rate",
        {"rate": rate},
        {ROCKETMQ: SINGLE, KAFKA: "what waits (`linger.ms=0`)", NATS: SINGLE},
        rate=rate,
    )


LOADS = (
    _sync(64),
    _sync(16),
    _sync(1),
    Load(
        "sync-64-batching",
        "64 threads, synchronous sends, the client may batch",
        "sync",
        {"threads": 64, "batching": "client"},
        {KAFKA: "what waits (`linger.ms=0`)"},
    ),
    Load(
        "pipelined",
        "1,000 messages in flight, not batched",
        "pipelined",
        {"in_flight": 1_000},
        _SINGLE_EACH,
    ),
    Load(
        "batched",
        "6,400 messages in flight, batched",
        "batched",
        {"threads": 64, "batch": 100, "in_flight": 6_400},
        {
            ROCKETMQ: "batches of 100, 64 threads",
            KAFKA: "batches of up to 16 KiB, about 100 messages (`linger.ms=5`)",
        },
        note="NATS is not measured here: its Go client sends no batches.",
    ),
    _pull(32, listener=1),
    _pull(1_024, listener=32),
    *map(_rate, RATES),
    _sync(64, sync_flush=True),
)
