"""The runner of `python -m benchmarks peers`."""

import os
import sys
from pathlib import Path

import pytest
from benchmarks.peers.loads import LOADS
from benchmarks.peers.measure import LoadError, machine_seconds, memory_mib, run_load
from benchmarks.peers.peer import NatsPeer
from benchmarks.peers.results import Results
from benchmarks.peers.rounds import Length, Rounds, summary

from tests.unit.benchmarks.peers_kit import FakePeer

GOOD = 'print(\'begin\\nend\\n{"messages": 5, "failed": 0, "seconds": 1.0}\')'
BAD = "import sys; sys.exit('no route')"
SYNC = next(load for load in LOADS if load.name == "sync-64")
RATE = next(load for load in LOADS if load.rate)
BATCHING = next(load for load in LOADS if load.name == "sync-64-batching")
SYNC_FLUSH = next(load for load in LOADS if load.sync_flush)
LENGTH = Length(
    rounds=2, seconds=0, warm_s=0, server_warm_s=0, backlog_share=1, limit_s=100
)  # fmt: skip


def run(script: str, timeout_s: float = 30.0) -> dict[str, object]:
    return run_load([sys.executable, "-S", "-c", script], os.environ, os.getpid(), timeout_s)


def test_a_load_has_the_cpu_time_between_begin_and_end() -> None:
    busy = "import time\nwhile time.process_time() < 0.2: pass\n"
    body = GOOD.replace("\\nend", "', flush=True)\n" + busy + "print('end")
    result = run(body)
    assert result["messages"] == 5
    assert isinstance(result["client_cpu_s"], float)
    assert 0.1 < result["client_cpu_s"] < 2
    assert {"broker_cpu_s", "steal_s", "other_s"} <= result.keys()


def test_the_error_of_a_load_program_is_reported() -> None:
    with pytest.raises(LoadError, match="no route"):
        run(BAD)


def test_a_load_program_that_hangs_is_killed() -> None:
    with pytest.raises(LoadError):
        run("import time; print('begin', flush=True); time.sleep(600)", timeout_s=0.3)


def test_a_run_without_messages_is_a_failure() -> None:
    with pytest.raises(LoadError, match="no message was acknowledged"):
        run(GOOD.replace('"messages": 5', '"messages": 0'))


def test_memory_and_machine_time_are_read() -> None:
    memory = memory_mib(os.getpid())
    assert 0 < memory["anon"] <= memory["rss"]
    assert len(machine_seconds()) == 8


@pytest.fixture
def no_disk_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sync", lambda: None)


@pytest.mark.usefixtures("no_disk_flush")
def test_peers_alternate_and_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    results = Results()
    good, bad = FakePeer("good", {"sync": GOOD}), FakePeer("bad", {"sync": BAD})
    bad.run = lambda *_: None  # type: ignore[method-assign]
    Rounds([good, bad], LENGTH, results, tmp_path).run([SYNC], startups=False)
    assert [(one["peer"], one["round"]) for one in results.runs] == [("good", 0), ("good", 1)]
    assert [(one["peer"], one["round"]) for one in results.failures] == [("bad", 0), ("bad", 1)]
    assert "no route" in results.failures[0]["error"]
    for peer in (good, bad):
        turn = ["resume", "suspend"]
        assert peer.calls == ["start", "topic load", "suspend", *turn, *turn, "stop", "stop"]


def no_start(*_: object, **__: object) -> float:
    raise OSError("no port")


@pytest.mark.usefixtures("no_disk_flush")
def test_a_peer_that_does_not_start_is_reported_for_each_load(tmp_path: Path) -> None:
    results = Results()
    good, bad = FakePeer("good", {"sync": GOOD}), FakePeer("bad", {})
    bad.start = no_start  # type: ignore[method-assign]
    Rounds([bad, good], LENGTH, results, tmp_path).run([SYNC], startups=True)
    assert len(results.startups) == len(results.runs) == 2
    assert {one["load"] for one in results.failures} == {"start", "preparation", "sync-64"}
    assert {one["peer"] for one in results.failures} == {"bad"}


@pytest.mark.usefixtures("no_disk_flush")
def test_a_peer_is_started_again_if_its_preparation_fails(tmp_path: Path) -> None:
    results = Results()
    peer = FakePeer("p", {"sync": GOOD})
    attempts = iter([OSError("no port"), None])

    def create(*_: object, **__: object) -> None:
        if error := next(attempts):
            raise error

    peer.create_topic = create  # type: ignore[method-assign]
    Rounds([peer], LENGTH, results, tmp_path).run([SYNC], startups=False)
    assert peer.calls[:4] == ["start", "stop", "start", "suspend"]
    assert len(results.runs) == 2
    assert [one["error"] for one in results.failures] == ["no port"]


@pytest.mark.usefixtures("no_disk_flush")
def test_loads_with_sync_flush_have_servers_of_their_own(tmp_path: Path) -> None:
    results = Results()
    peer = FakePeer("p", {"sync": GOOD, "rate": GOOD})
    Rounds([peer], LENGTH, results, tmp_path).run([SYNC_FLUSH, RATE], startups=False)
    assert peer.calls.count("start") == 2
    assert [one["load"] for one in results.runs] == [RATE.name] * 2 + [SYNC_FLUSH.name] * 2
    assert f"topic {RATE.name}-1" in peer.calls


@pytest.mark.usefixtures("no_disk_flush")
def test_a_load_that_a_peer_does_not_have_is_no_failure(tmp_path: Path) -> None:
    results = Results()
    peer = FakePeer("p", {"sync": GOOD})
    Rounds([peer], LENGTH, results, tmp_path).run([BATCHING], startups=False)
    assert results.runs == results.failures == []


def test_no_load_begins_after_the_limit(tmp_path: Path) -> None:
    results = Results()
    length = Length(
        rounds=1, seconds=0, warm_s=0, server_warm_s=0, backlog_share=1, limit_s=-1
    )  # fmt: skip
    peer = FakePeer("p", {"sync": GOOD})
    Rounds([peer], length, results, tmp_path).run([SYNC], startups=False)
    assert results.runs == []
    assert "time" in results.failures[0]["error"]


def test_a_peer_deletes_only_what_it_has_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").touch()
    peer = NatsPeer()
    peer.stop()
    monkeypatch.setattr(peer, "new_broker", no_start)
    with pytest.raises(OSError, match="no port"):
        peer.start(tmp_path)
    peer.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_summary_of_an_error_names_its_cause_and_no_path() -> None:
    trace = "sync failed:\na.b.SomeException: no route\n\tat A.java:3\n\t... 6 more\n"
    assert summary(trace) == "a.b.SomeException: no route"
    assert summary("it ended:\n/some/where/java: bad flag\n") == "…: bad flag"
    assert summary("") == "unknown"
