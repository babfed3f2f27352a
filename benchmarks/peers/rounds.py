"""Runs the loads on the peers in alternating rounds, and records results and failures."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kafka_server import CannotRunError
from benchmarks.peers.loads import BACKLOG_MESSAGES, BODY_BYTES, FILL_BATCH, WARM_MESSAGES, Load
from benchmarks.peers.measure import LoadError, memory_mib, run_load
from benchmarks.peers.peer import Peer
from benchmarks.peers.results import Results

LOAD_TOPIC, BACKLOG_TOPIC = "load", "backlog"
WARM_THREADS = 64
OVERHEAD_S = 150
"""What a run may take beside warming up and measuring: its start, and a backlog."""
IDLE_S = 2.0
PREPARATIONS = 2
"""How often a peer is started and warmed up until it is left out."""
FAILURES = (
    LoadError, CannotRunError, RuntimeError, OSError, ValueError, KeyError,
    subprocess.SubprocessError,
)  # fmt: skip


@dataclass(frozen=True)
class Length:
    """How long and how often each load runs."""

    rounds: int
    seconds: float
    warm_s: float
    server_warm_s: float
    backlog_share: float
    """The part of the whole backlog that is consumed."""
    limit_s: float
    """No load begins after this time."""

    @property
    def backlog(self) -> dict[str, int]:
        return {
            "warm_messages": int(WARM_MESSAGES * self.backlog_share),
            "messages": int(BACKLOG_MESSAGES * self.backlog_share),
        }


class Rounds:
    """The benchmark; everything that it starts ends with it."""

    def __init__(self, peers: Sequence[Peer], length: Length, results: Results, root: Path) -> None:
        self._peers = list(peers)
        self._length = length
        self._results = results
        self._root = root
        self._began = time.monotonic()

    def run(self, loads: Sequence[Load], *, startups: bool) -> None:
        try:
            if startups:
                self._measure_startups()
            for sync_flush in (False, True):
                chosen = [load for load in loads if load.sync_flush == sync_flush]
                if chosen:
                    self._phase(chosen, sync_flush)
        finally:
            for peer in self._peers:
                peer.stop()

    def _measure_startups(self) -> None:
        for number in range(self._length.rounds):
            for peer in self._rotated(number):
                with self._recorded(peer, "start", number):
                    took = peer.start(self._root)
                    time.sleep(IDLE_S)
                    entry = {"peer": peer.key, "round": number, "seconds": round(took, 3)}
                    self._results.startups.append(entry | memory_mib(peer.broker.pid))
                    print(f"start, round {number + 1}, {peer.label}: {took:.2f} s", flush=True)
                peer.stop()

    def _phase(self, loads: Sequence[Load], sync_flush: bool) -> None:
        """The loads that need the same flush mode, with servers of that mode."""
        backlog = any(load.backlog for load in loads)
        for peer in self._peers:
            for attempt in range(PREPARATIONS):
                with self._recorded(peer, "preparation", attempt):
                    self._prepare(peer, sync_flush=sync_flush, backlog=backlog)
                    break
                peer.stop()
        for load in loads:
            for number in range(self._length.rounds):
                for peer in self._rotated(number):
                    self._measure(peer, load, number)
        for peer in self._peers:
            with self._recorded(peer, "memory", 0):
                if peer.is_running() and not sync_flush:
                    entry = {"peer": peer.key, **memory_mib(peer.broker.pid)}
                    self._results.about.setdefault("memory_after", []).append(entry)
            peer.stop()

    def _rotated(self, number: int) -> list[Peer]:
        """Each round begins with another peer."""
        first = number % len(self._peers)
        return self._peers[first:] + self._peers[:first]

    def _prepare(self, peer: Peer, *, sync_flush: bool, backlog: bool) -> None:
        """Start, warm up and fill."""
        peer.start(self._root, sync_flush=sync_flush)
        peer.create_topic(LOAD_TOPIC, sync_flush=sync_flush)
        options = {
            "size": BODY_BYTES, "threads": WARM_THREADS, "batching": "none", "warm": 0,
            "seconds": self._length.server_warm_s,
        }  # fmt: skip
        peer.run("sync", LOAD_TOPIC, options)
        if backlog:
            peer.create_topic(BACKLOG_TOPIC)
            count = sum(self._length.backlog.values()) + FILL_BATCH
            fill = {"size": BODY_BYTES, "messages": count, "batch": FILL_BATCH}
            peer.run("fill", BACKLOG_TOPIC, fill)
        print(f"{peer.label} is ready", flush=True)
        peer.suspend()

    def _measure(self, peer: Peer, load: Load, number: int) -> None:
        if peer.protocol not in load.batching:
            return
        if time.monotonic() > self._began + self._length.limit_s:
            self._fail(peer, load.name, number, "the time of the whole run was over")
            return
        with self._recorded(peer, load.name, number):
            if not peer.is_running():
                raise LoadError("the broker does not run")
            peer.resume()
            try:
                result = self._run(peer, load, number)
            finally:
                peer.suspend()
            entry = {"load": load.name, "peer": peer.key, "round": number, **result}
            self._results.runs.append(entry)
            print(f"{load.name}, round {number + 1}, {peer.label}: {_brief(result)}", flush=True)

    def _run(self, peer: Peer, load: Load, number: int) -> dict[str, Any]:
        topic = BACKLOG_TOPIC if load.backlog else LOAD_TOPIC
        if load.rate:
            topic = f"{load.name}-{number}"
            peer.create_topic(topic)
        options: dict[str, Any] = {
            "size": BODY_BYTES, "warm": self._length.warm_s, "seconds": self._length.seconds,
            "group": f"{load.name}-{number}", **load.options,
        }  # fmt: skip
        if load.backlog:
            options |= self._length.backlog
        os.sync()  # what others wrote must not be flushed in this window
        command, environment = peer.command(load.kind, topic, options)
        timeout_s = self._length.seconds + self._length.warm_s + OVERHEAD_S
        result = run_load(command, environment, peer.broker.pid, timeout_s)
        return result | memory_mib(peer.broker.pid)

    @contextmanager
    def _recorded(self, peer: Peer, what: str, number: int) -> Iterator[None]:
        """Record a failure and go on."""
        try:
            yield
        except FAILURES as error:
            self._fail(peer, what, number, str(error) or type(error).__name__)

    def _fail(self, peer: Peer, what: str, number: int, error: str) -> None:
        entry = {"peer": peer.key, "load": what, "round": number, "error": summary(error)}
        self._results.failures.append(entry)
        print(f"{what}, round {number + 1}, {peer.label}: FAILED: {error[-2000:]}", flush=True)


def summary(error: str) -> str:
    """The line of an error that says most, without paths of this machine."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"Exception|Error", line)]
    line = (named or lines or ["unknown"])[0 if named else -1]
    return re.sub(r"(?:/[\w.+@-]+){2,}/?", "…", line)[:300]


def _brief(result: Mapping[str, Any]) -> str:
    rate = result["messages"] / result["seconds"]
    cost = result["broker_cpu_s"] * 1e6 / result["messages"]
    latency = (
        f", p50 {result['p50_us']} µs, p99 {result['p99_us']} µs" if "p50_us" in result else ""
    )
    lost = f", {result['failed']} failed" if result["failed"] else ""
    return f"{rate:,.0f}/s, {cost:.1f} µs of broker CPU{latency}{lost}"
