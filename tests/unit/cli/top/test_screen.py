"""The screen as text, the keys, and what they change."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.cli.top.screen import ScreenState, age_text, number_text, screen
from penstock.cli.top.screen_snapshot import BrokerRow, GroupRow, ScreenSnapshot, TopicRow
from penstock.cli.top.terminal_keys import keys_of

MASTER = BrokerRow(
    cluster="c", name="broker-a", id=0, address="h:1", version="penstock 0.1.0", role="sync_master",
    in_per_second=1234.5, out_per_second=2.0, in_today=1, out_today=1, disk_used=0.42,
    log_bytes=1 << 20, memory_bytes=None, started_ms=1_000_000, behind_bytes=None, in_sync=None,
    problem=None,
)  # fmt: skip
SNAPSHOT = ScreenSnapshot(
    time_ms=1_000_000 + 3_700_000,
    nameservers=("n:1",),
    brokers=(MASTER, replace(MASTER, id=1, role="slave", behind_bytes=2048, in_sync=False)),
    topics=tuple(TopicRow(f"topic-{n:02}", float(n), 0.0, n, 1) for n in range(50)),
    groups=tuple(GroupRow(f"group-{n:02}", n, n * 10.0, None, 1) for n in range(50)),
    topic_count=50,
    group_seconds=0.0,
    notes=("broker-b 0 does not answer: refused",),
)


def lines(state: ScreenState, height: int | None, snapshot: ScreenSnapshot = SNAPSHOT) -> list[str]:
    console = Console(file=io.StringIO(), width=120, height=height or 100)
    with console.capture() as found:
        console.print(screen(snapshot, state, height))
    return [line.rstrip() for line in found.get().splitlines()]


@pytest.mark.parametrize("height", [20, 24, 40, 200])
def test_the_screen_fits(height: int) -> None:
    assert len(lines(ScreenState(), height)) <= height


def test_the_content() -> None:
    shown = "\n".join(lines(ScreenState(), 40))
    assert "in 1,234/s" in shown
    assert "1 h 1 m" in shown
    assert "42%" in shown
    assert "! broker-b 0 does not answer: refused" in shown
    assert "q quit" in shown
    slave = next(line for line in shown.splitlines() if " slave " in line)
    assert "2.0 KiB" in slave
    assert " no " in slave
    first = shown.index("topic-49")
    assert first < shown.index("topic-48")
    assert "topic-00" not in shown
    assert "group-49" in shown


def test_unknown_memory_is_a_dash_and_not_zero() -> None:
    row = next(line for line in lines(ScreenState(), None) if "sync_master" in line)
    assert "42%       -" in row


def test_without_a_height_everything_is_shown_and_there_are_no_keys() -> None:
    shown = "\n".join(lines(ScreenState(), None))
    assert "topic-00" in shown
    assert "q quit" not in shown


def test_single_views_sort_and_scroll() -> None:
    state = ScreenState()
    state.press("2")
    assert "Groups" not in "\n".join(lines(state, 20))
    for _ in range(3):
        state.press("s")  # by name
    assert lines(state, 20)[4].startswith("topic-00")
    state.press("pagedown")
    assert lines(state, 20)[4].startswith("topic-10")
    state.press("up")
    assert lines(state, 20)[4].startswith("topic-09")
    state.press("r")
    assert lines(state, 20)[4].startswith("topic-40")
    for _ in range(20):
        state.press("pagedown")
    assert lines(state, 20)[-3].startswith("topic-00")  # not beyond the end


def test_pause_and_quit() -> None:
    state = ScreenState()
    state.press("p")
    assert state.paused
    assert "paused" in lines(state, 20)[0]
    state.press("x")
    assert not state.quit
    state.press("q")
    assert state.quit


def test_an_empty_cluster() -> None:
    empty = replace(SNAPSHOT, brokers=(), topics=(), groups=(), notes=())
    assert lines(ScreenState(), 20, empty)[0].startswith("no brokers")


def test_keys() -> None:
    assert list(keys_of(b"q\x1b[A\x1b[6~s")) == ["q", "up", "pagedown", "s"]
    assert list(keys_of(b"")) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0 s"), (0.25, "0.2 s"), (59, "59 s"), (61, "1 m 1 s"), (90_000, "1 d 1 h")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


def test_numbers() -> None:
    assert [number_text(v) for v in (None, 0, 0.5, 12345.6)] == ["-", "0", "0.5", "12,346"]
