"""CPU time and memory of processes, and the CPU time of the machine, from /proc."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LoadError(Exception):
    """A load program failed; the text is the end of what it printed."""


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far."""

    wall: float
    broker: float
    client: float
    steal: float
    busy: float

    def __sub__(self, before: Usage) -> Usage:
        return Usage(
            self.wall - before.wall,
            self.broker - before.broker,
            self.client - before.client,
            self.steal - before.steal,
            self.busy - before.busy,
        )


def usage(broker: int, client: int) -> Usage:
    """The CPU time of two processes and of the machine so far."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = machine_seconds()
    return Usage(
        time.monotonic(),
        cpu_seconds(broker),
        cpu_seconds(client),
        steal,
        user + nice + system + irq + softirq,
    )


def machine_seconds() -> tuple[float, ...]:
    """The first eight counters of /proc/stat."""
    with open("/proc/stat") as file:
        ticks = file.readline().split()[1:9]
    return tuple(int(one) / TICKS_PER_S for one in ticks)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory, and its private and file-backed parts."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    names = {"rss": "VmRSS", "anon": "RssAnon", "file": "RssFile"}
    return {name: round(kib[field] / 1024, 1) for name, field in names.items()}


def run_load(
    command: Sequence[str], environment: Mapping[str, str], broker: int, timeout_s: float
) -> dict[str, Any]:
    """Run a load program; its result, with the CPU time of its window."""
    errors: deque[str] = deque(maxlen=20)
    with _running(command, environment, timeout_s, errors) as process:
        assert process.stdout is not None
        marks: dict[str, Usage] = {}
        result: dict[str, Any] = {}
        for line in process.stdout:
            word = line.strip()
            if word in ("begin", "end"):
                marks[word] = usage(broker, process.pid)
            elif word.startswith("{"):
                result = json.loads(word)
                break
    if not result.get("messages") or len(marks) < 2:
        what = "no message was acknowledged" if result else "no result"
        raise LoadError(f"{what}; the client printed: {''.join(errors)[-1500:]}")
    used = marks["end"] - marks["begin"]
    return result | {
        "broker_cpu_s": round(used.broker, 2),
        "client_cpu_s": round(used.client, 2),
        "steal_s": round(used.steal, 2),
        "other_s": round(used.busy - used.broker - used.client, 2),
    }


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, errors: deque[str]
) -> Iterator[subprocess.Popen[str]]:
    """A child process that is killed at the end, or when its time is over."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    assert process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,))
    reader.start()
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        reader.join()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
