"""The demo's story: what it promises about itself, how it is told, and its picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from penstock import Message
from penstock.cli.demo.demo_command import demo
from penstock.cli.demo.demo_report import Findings
from penstock.cli.demo.story import (
    LATE_S,
    MINUTES,
    SPIKE_FACTOR,
    SPIKE_MINUTE,
    STUCK_AFTER_S,
    UNREADABLE,
    Story,
    tell_story,
    write_story,
)
from penstock.spark.pipelines.registration.events import (
    REGISTRATIONS,
    STEP_NAMES,
    STEPS,
    Registration,
    Step,
)
from penstock.spark.pipelines.registration.plot import Figures, draw


@pytest.fixture(scope="module")
def story() -> Story:
    return write_story(1, 50)


def test_the_same_seed_tells_the_same_story(story: Story) -> None:
    again = write_story(1, 50)
    assert (again.counts, again.stuck) == (story.counts, story.stuck)
    assert [m.at for m in again.messages] == [m.at for m in story.messages]


def test_one_minute_has_twenty_times_as_many(story: Story) -> None:
    minutes: Counter[int] = Counter()
    for (minute, _, _), count in story.counts.items():
        minutes[minute] += count
    assert minutes[SPIKE_MINUTE] == 50 * SPIKE_FACTOR
    assert {minutes[m] for m in range(MINUTES - 1) if m != SPIKE_MINUTE} == {50}
    assert SPIKE_MINUTE < story.closed_minutes < story.counted_minutes < MINUTES


def test_what_must_be_found_follows_from_the_messages(story: Story) -> None:
    users: dict[str, Registration] = {}
    done: dict[str, dict[str, float]] = {}
    bad = 0
    for told in story.messages:
        if told.topic == REGISTRATIONS:
            registration = msgspec.json.decode(told.body, type=Registration)
            users[registration.id] = registration
            continue
        try:
            step = msgspec.json.decode(told.body, type=Step)
        except msgspec.DecodeError:
            bad += 1
            continue
        assert (told.topic, told.tag) == (STEPS, step.step)
        if step.ok:
            done.setdefault(step.id, {})[step.step] = (step.done_at - story.began).total_seconds()
    assert bad == 5
    assert sum(story.counts.values()) == len(users) < len(story.messages)
    for user in users.values():
        minute = int((user.registered_at - story.began) / timedelta(minutes=1))
        if user.outcome != "ok" or minute >= story.closed_minutes:
            continue
        end = 60 * (minute + 1) + STUCK_AFTER_S
        in_time = {name for name, at in done.get(user.id, {}).items() if at < end}
        assert (in_time != set(STEP_NAMES)) == (user.id in story.stuck)


class Sent:
    """A producer that acknowledges at once."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def submit(self, message: Message) -> Future[Any]:
        self.messages.append(message)
        future: Future[Any] = Future()
        future.set_result(None)
        return future


def test_telling_sends_all_in_order_and_says_how_far_it_is(story: Story) -> None:
    sent, steps = Sent(), []
    tell_story(story, sent, seconds=0.2, tell=lambda done, of: steps.append((done, of)))  # type: ignore[arg-type]
    assert [m.content for m in sent.messages] == [m.body for m in story.messages]
    assert steps[-1] == (len(story.messages), len(story.messages))
    assert steps == sorted(steps)


class Slow(Sent):
    """A producer that acknowledges a message when somebody waits for it, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledged: set[int] = set()

    def submit(self, message: Message) -> Future[Any]:
        number = len(self.messages)
        self.messages.append(message)
        return Acknowledgement(lambda: self.acknowledged.add(number))


class Acknowledgement(Future[Any]):
    def __init__(self, acknowledge: Callable[[], None]) -> None:
        super().__init__()
        self._acknowledge = acknowledge

    def result(self, timeout: float | None = None) -> None:
        self._acknowledge()


def test_what_is_under_way_is_less_apart_than_events_may_be_late(story: Story) -> None:
    """Queues are read one after the other: on a slow machine old events would come too late."""
    slow = Slow()
    times = [told.at for told in story.messages]
    worst = 0.0

    def submit(message: Message, really: Any = slow.submit) -> Future[Any]:
        nonlocal worst
        number = len(slow.messages)
        waiting = [times[n] for n in range(number) if n not in slow.acknowledged]
        worst = max(worst, times[number] - min(waiting, default=times[number]))
        return really(message)  # type: ignore[no-any-return]

    slow.submit = submit  # type: ignore[method-assign]
    tell_story(story, slow, seconds=0.01, tell=lambda done, of: None)  # type: ignore[arg-type]
    assert len(slow.acknowledged) == len(story.messages)
    assert worst <= LATE_S / 4


def figures_of(story: Story) -> Figures:
    """What a pipeline that makes no mistake writes."""
    counts = {
        (story.began + timedelta(minutes=minute), channel, outcome): count
        for (minute, channel, outcome), count in story.counts.items()
        if minute < story.counted_minutes
    }
    latencies = {}
    for minute in range(story.closed_minutes):
        users = accepted_of(story, minute)
        row = {"users": users, "done": users - 1, "failed": 0, "missing": 1}
        for step in STEP_NAMES:
            key = (story.began + timedelta(minutes=minute), step)
            latencies[key] = {**row, "p50_ms": 5, "p95_ms": 900, "p99_ms": None}
    return Figures(counts, latencies)


def accepted_of(story: Story, minute: int) -> int:
    return sum(n for key, n in story.counts.items() if (key[0], key[2]) == (minute, "ok"))


def good_findings(story: Story) -> Findings:
    total = len(story.messages)
    stuck = {user for user, minute in story.stuck.items() if minute < story.closed_minutes}
    return Findings(story, figures_of(story), total, total, Counter(stuck), UNREADABLE)


def test_findings_tell_right_from_wrong(story: Story) -> None:
    good = good_findings(story)
    assert good.good
    assert not replace(good, lake_rows=good.lake_rows + 1).good
    assert not replace(good, unreadable=UNREADABLE - 1).good
    assert replace(good, alerts=Counter(["somebody"]) + good.alerts).wrong_alerts == 1
    counts = dict(good.figures.counts)
    counts[next(iter(counts))] += 1
    wrong = replace(good, figures=replace(good.figures, counts=counts))
    assert (wrong.wrong_minutes, wrong.good) == (1, False)
    fewer = {key: n for key, n in counts.items() if key[0] != story.began}
    assert replace(good, figures=replace(good.figures, counts=fewer)).wrong_minutes == 1


def test_findings_see_wrong_latencies(story: Story) -> None:
    good = good_findings(story)
    rows = dict(good.figures.latencies)
    key = (story.began, "push")
    more = {**rows, key: {**rows[key], "users": rows[key]["users"] + 1}}
    wrong = replace(good, figures=replace(good.figures, latencies=more))
    assert (wrong.wrong_minutes, wrong.good) == (1, False)
    del rows[key]
    assert replace(good, figures=replace(good.figures, latencies=rows)).wrong_minutes == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(story: Story, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"picture.{ending}"
    draw(figures_of(story), picture, title="A story")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["picture.xyz", "picture", "nowhere/picture.png"])
def test_a_picture_that_can_not_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(demo, ["pipeline", "--picture", str(tmp_path / name)])
    assert (result.exit_code, "--picture" in result.output) == (2, True)
