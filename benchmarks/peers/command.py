"""`python -m benchmarks peers`: what is run, and where the results go."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.peers import page, programs, tables
from benchmarks.peers.loads import LOADS
from benchmarks.peers.peer import Peer, all_peers
from benchmarks.peers.results import FILE, Results
from benchmarks.peers.rounds import Length, Rounds

STARTUPS = "start"


SHORT = {"rounds": 1, "seconds": 1.5, "warm": 1.0, "server_warm": 2.0, "backlog": 0.1}
"""The options of a run that shows whether everything works."""


def main(arguments: Sequence[str] = ()) -> None:
    given = _parser().parse_args(arguments)
    if given.short:
        vars(given).update(SHORT)
    if missing := programs.missing_tools():
        print(f"skipped: needs {' and '.join(missing)}")
        return
    peers = [peer for peer in all_peers() if peer.key in (given.peers or _keys())]
    results = Results(about=_about(given), peers=[_described(peer) for peer in peers])
    _run(given, peers, results)
    whole = not (given.short or given.only or given.peers)
    file = given.json or (FILE if whole else None)
    if file is None:
        print(page.text(results))
        return
    results.write(file)
    print(f"results: {file} ({results.about['minutes']} minutes)")
    if file == FILE:
        page.write(results)
        print("written: docs/benchmarks.md, its plots and the figures of README.md")


def _run(given: argparse.Namespace, peers: Sequence[Peer], results: Results) -> None:
    """Measure; a run that is interrupted keeps what it has measured."""
    loads = [load for load in LOADS if load.name in (given.only or tables.BY_NAME)]
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-peers-", dir=given.scratch) as scratch:
        rounds = Rounds(peers, _length(given), results, Path(scratch))
        try:
            rounds.run(loads, startups=not given.only or STARTUPS in given.only)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    results.about["minutes"] = round((time.monotonic() - began) / 60, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks peers",
        description="Measure Penstock and other brokers in one run. The results become "
        "docs/benchmarks.json and docs/benchmarks.md; with --only, --peers or --short they are "
        "printed.",
    )
    names = [STARTUPS, *(load.name for load in LOADS)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="LOAD", help=", ".join(names))
    parser.add_argument("--peers", nargs="+", choices=_keys(), help="only these peers")
    parser.add_argument("--short", action="store_true", help="everything once, in a few minutes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="what each round measures")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds of warming up a client")
    parser.add_argument(
        "--server-warm", type=float, default=8.0, help="seconds of warming up a server"
    )
    parser.add_argument(
        "--backlog", type=float, default=0.8, help="millions of messages to catch up with"
    )
    parser.add_argument("--limit", type=float, default=45.0, help="minutes for the whole run")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--scratch", type=Path, help="where the stores are: a directory on a disk")
    return parser


def _keys() -> list[str]:
    return [peer.key for peer in all_peers()]


def _length(given: argparse.Namespace) -> Length:
    return Length(
        rounds=given.rounds, seconds=given.seconds, warm_s=given.warm,
        server_warm_s=given.server_warm, backlog_share=given.backlog, limit_s=given.limit * 60,
    )  # fmt: skip


def _described(peer: Peer) -> dict[str, Any]:
    return {
        "key": peer.key, "name": peer.name, "version": peer.version, "protocol": peer.protocol,
        "flush": peer.flush, "sync_flush": peer.sync_flush, "settings": list(peer.settings),
    }  # fmt: skip


def _about(given: argparse.Namespace) -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "rounds": given.rounds,
        "seconds": given.seconds,
        "warm_s": given.warm,
        "backlog": int(given.backlog * 1e6),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / (1 << 30)),
        "processor": _processor(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "java": _first_line("java", "-version").split('"')[1],
        "go": _first_line("go", "env", "GOVERSION").removeprefix("go"),
        "rocketmq_client": programs.CLIENT_VERSION,
        "load_average": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout or done.stderr).splitlines()[0]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Let SIGTERM end the servers too, as Ctrl-C does."""
    raise KeyboardInterrupt
