"""The story that the demo tells: registrations, a spike, and three services at their own pace.

All of it follows from a seed. A quarter of an hour passes in the events while the demo takes some
twenty seconds, so their times are those of the story. What the pipeline must find is known here as
well: how many users each minute has, and who is stuck.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from penstock.spark.pipelines.registration_events import (
    ACCEPTED,
    REGISTRATIONS,
    STEP_NAMES,
    STEPS,
    Registration,
    Step,
    body_of,
    moment,
)
from penstock.spark.pipelines.registration_tables import EARLY_MS

if TYPE_CHECKING:
    from penstock import Producer

MINUTES: Final = 16
SPIKE_MINUTE: Final = 3
SPIKE_FACTOR: Final = 20
LATE_S: Final = 120
"""Some seconds of real time, which messages under way may differ by."""
STUCK_AFTER_S: Final = 300
PER_SECOND: Final = {"sms": 120.0, "push": 400.0, "coupon": 60.0}
"""What each service can do: the spike takes the coupons minutes to work off."""
SERVICE_S: Final = 1.5
CHANNELS: Final = ("web", "app", "partner")
_CHANNEL_WEIGHTS: Final = (5, 4, 1)
REJECTED: Final = 0.04
SENT_TWICE: Final = 0.02
FORGOTTEN: Final = 0.0005
"""How many steps never happen."""
FAILED_FIRST: Final = 0.005
UNREADABLE: Final = 5

MinuteKey = tuple[int, str, str]
"""Minute of the story, channel, outcome."""


@dataclass(frozen=True, slots=True)
class Told:
    """A message of the story and when it is sent, in seconds from its beginning."""

    at: float
    topic: str
    key: str
    body: bytes
    tag: str = ""


@dataclass(slots=True)
class Story:
    """Everything that happens, in the order in which it is sent."""

    began: datetime
    """The full minute at which the story's clock starts; it ends before the real one's now."""
    messages: list[Told] = field(default_factory=list)
    counts: Counter[MinuteKey] = field(default_factory=Counter)
    stuck: dict[str, int] = field(default_factory=dict)
    """Users who miss a step when their time is up, and the minute they registered in."""

    @property
    def counted_minutes(self) -> int:
        """So many minutes are over for certain when the last event has been seen."""
        return (60 * MINUTES - EARLY_MS // 1000 - 1 - LATE_S) // 60

    @property
    def closed_minutes(self) -> int:
        """So many are also past the time that users may wait."""
        return self.counted_minutes - STUCK_AFTER_S // 60


def write_story(seed: int, usual_per_minute: int) -> Story:
    """Make it up: minutes with the usual number of registrations, one with twenty times as many."""
    chance = random.Random(seed)
    start = (time.time() // 60 - MINUTES - 1) * 60
    story = Story(moment(start))
    free = dict.fromkeys(STEP_NAMES, 0.0)
    moments = []
    for minute in range(MINUTES):
        number = usual_per_minute * (SPIKE_FACTOR if minute == SPIKE_MINUTE else 1)
        moments += [60 * minute + 60 * chance.random() for _ in range(number)]
    # Somebody registers in the last second, so that the watermark comes as far as is promised.
    for number, at in enumerate(sorted([*moments, 60 * MINUTES - 0.5])):
        _register(story, chance, free, start, f"user-{number:06}", round(at, 3))
    for number in range(UNREADABLE):
        at = 60 * MINUTES * chance.random()
        story.messages.append(Told(at, STEPS, f"nobody-{number}", b'{"id": "nobody-%d", ' % number))
    story.messages.sort(key=lambda message: message.at)
    return story


def _register(
    story: Story, chance: random.Random, free: dict[str, float], start: float, user: str, at: float
) -> None:
    channel = chance.choices(CHANNELS, _CHANNEL_WEIGHTS)[0]
    outcome = "rejected" if chance.random() < REJECTED else ACCEPTED
    body = body_of(Registration(user, channel, outcome, moment(start + at)))
    message = Told(at, REGISTRATIONS, user, body)
    story.messages.append(message)
    if chance.random() < SENT_TWICE:
        story.messages.append(message)
    minute = int(at // 60)
    story.counts[minute, channel, outcome] += 1
    if outcome != ACCEPTED:
        return
    end = 60 * (minute + 1) + STUCK_AFTER_S
    done = [_serve(story, chance, free, start, user, name, at) for name in STEP_NAMES]
    if any(moment_done is None or moment_done >= end for moment_done in done):
        story.stuck[user] = minute


def _serve(
    story: Story, chance: random.Random, free: dict[str, float], start: float, user: str,
    name: str, at: float,
) -> float | None:  # fmt: skip
    """What a service does for a user: when it is done, or None if it never is."""
    if chance.random() < FORGOTTEN:
        return None
    free[name] = max(free[name], at) + 1 / PER_SECOND[name]
    done = round(free[name] + SERVICE_S * chance.lognormvariate(0, 0.5), 3)
    if chance.random() < FAILED_FIRST:
        story.messages.append(_step(user, name, done, start, ok=False))
        done = round(done + 2 * SERVICE_S, 3)
    if done < 60 * MINUTES:  # the story ends with its last minute
        story.messages.append(_step(user, name, done, start, ok=True))
    return done


def _step(user: str, name: str, done: float, start: float, *, ok: bool) -> Told:
    body = body_of(Step(user, name, moment(start + done), ok))
    return Told(done, STEPS, user, body, name)


def tell_story(
    story: Story, producer: "Producer", *, seconds: float, tell: Callable[[int, int], None]
) -> float:
    """Send every message at its time, the whole in `seconds`; how long it really took.

    Returns when all are acknowledged. A machine that is too slow falls behind, and loses nothing.
    """
    from penstock import Message

    began = time.monotonic()
    pace = seconds / (60 * MINUTES)
    futures = []
    for number, told in enumerate(story.messages):
        wait = began + told.at * pace - time.monotonic()
        if wait > 0:
            tell(number, len(story.messages))
            time.sleep(max(wait, 0.01))
        message = Message(told.topic, told.body, told.tag or None, [told.key])
        futures.append(producer.submit(message))
        if len(futures) >= 5000:  # fewer than the producer lets wait
            for future in futures:
                future.result()
            futures.clear()
    for future in futures:
        future.result()
    tell(len(story.messages), len(story.messages))
    return time.monotonic() - began
