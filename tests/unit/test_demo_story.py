"""The demo's story: what it promises about itself, how it is told, and its picture."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import Message
from penstock.cli.demo_report import Findings
from penstock.cli.demo_story import (
    MINUTES,
    SPIKE_FACTOR,
    SPIKE_MINUTE,
    STUCK_AFTER_S,
    Story,
    tell_story,
    write_story,
)
from penstock.spark.pipelines.registration_events import (
    REGISTRATIONS,
    STEP_NAMES,
    STEPS,
    Registration,
    Step,
)
from penstock.spark.pipelines.registration_picture import Figures, draw


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


def figures_of(story: Story) -> Figures:
    """What a pipeline that makes no mistake writes."""
    counts = {
        (story.began + timedelta(minutes=minute), channel, outcome): count
        for (minute, channel, outcome), count in story.counts.items()
        if minute < story.counted_minutes
    }
    row = {"users": 9, "done": 8, "failed": 0, "missing": 1}
    latencies = {
        (story.began + timedelta(minutes=minute), step): {
            **row,
            "p50_ms": 5,
            "p95_ms": 900,
            "p99_ms": None,
        }
        for minute in range(story.closed_minutes)
        for step in STEP_NAMES
    }
    return Figures(counts, latencies)


def test_findings_tell_right_from_wrong(story: Story) -> None:
    figures = figures_of(story)
    total = len(story.messages)
    stuck = {user for user, minute in story.stuck.items() if minute < story.closed_minutes}
    good = Findings(story, figures, total, total, Counter(stuck))
    assert good.good
    assert not Findings(story, figures, total + 1, total, Counter(stuck)).good
    assert (
        Findings(story, figures, total, total, Counter(["somebody"]) + Counter(stuck)).wrong_alerts
        == 1
    )
    counts = dict(figures.counts)
    counts[next(iter(counts))] += 1
    assert Findings(story, Figures(counts, {}), total, total, Counter(stuck)).wrong_minutes == 1
    fewer = {key: n for key, n in counts.items() if key[0] != story.began}
    assert Findings(story, Figures(fewer, {}), total, total, Counter(stuck)).wrong_minutes == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(story: Story, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"picture.{ending}"
    draw(figures_of(story), picture, title="A story")
    assert picture.stat().st_size > 10_000
