"""The story that the demo tells: registrations, a spike, and three services at their own pace.

All of it follows from a seed. A quarter of an hour passes in the events while the demo takes some
twenty seconds, so their times are those of the story. What the pipeline must find is known here as
well: how many users each minute has, and who is stuck.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.registration.event_tables import EARLY_MS
from penstock.spark.pipelines.registration.events import (
    ACCEPTED,
    REGISTRATIONS,
    STEP_NAMES,
    STEPS,
    Registration,
    Step,
    body_of,
    moment,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from penstock import Producer

MINUTES: Final = 16
SPIKE_MINUTE: Final = 3
SPIKE_FACTOR: Final = 20
LATE_S: Final = 120
"""Some seconds of real time, which messages under way may differ by."""
UNDER_WAY_S: Final = LATE_S / 4
"""What is not acknowledged yet is no further apart. Queues are read one after the other, and what
is in the next batch only because of that must not be too late."""
_UNDER_WAY_MAX: Final = 5000
"""Fewer messages than a producer lets wait."""
STUCK_AFTER_S: Final = 300
CAPACITY: Final = {"sms": 16, "push": 80, "coupon": 8}
"""How many times the usual rate each service can do: the spike is too much for two of them, and
takes the coupons minutes to work off."""
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
    services = [Service(name, usual_per_minute / 60 * CAPACITY[name]) for name in STEP_NAMES]
    moments = []
    for minute in range(MINUTES):
        number = usual_per_minute * (SPIKE_FACTOR if minute == SPIKE_MINUTE else 1)
        moments += [60 * minute + 60 * chance.random() for _ in range(number)]
    # Somebody registers in the last second, so that the watermark comes as far as is promised.
    for number, at in enumerate(sorted([*moments, 60 * MINUTES - 0.5])):
        _register(story, chance, services, start, f"user-{number:06}", round(at, 3))
    for number in range(UNREADABLE):
        at = 60 * MINUTES * chance.random()
        story.messages.append(Told(at, STEPS, f"nobody-{number}", b'{"id": "nobody-%d", ' % number))
    story.messages.sort(key=lambda message: message.at)
    return story


def _register(
    story: Story,
    chance: random.Random,
    services: Sequence["Service"],
    start: float,
    user: str,
    at: float,
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
    is_stuck = False
    for service in services:
        steps = service.serve(chance, at)
        is_stuck |= not steps or steps[-1] >= end
        for number, done in enumerate(steps):
            step = Step(user, service.name, moment(start + done), number == len(steps) - 1)
            if done < 60 * MINUTES:  # the story ends with its last minute
                story.messages.append(Told(done, STEPS, user, body_of(step), service.name))
    if is_stuck:
        story.stuck[user] = minute


@dataclass(slots=True)
class Service:
    """Takes one user after the other, as fast as it can."""

    name: str
    per_second: float
    free_at: float = 0.0

    def serve(self, chance: random.Random, at: float) -> list[float]:
        """When it tries for a user who comes at `at`: the last time it succeeds. Never, if none."""
        if chance.random() < FORGOTTEN:
            return []
        self.free_at = max(self.free_at, at) + 1 / self.per_second
        done = self.free_at + SERVICE_S * chance.lognormvariate(0, 0.5)
        tries = [done, done + 2 * SERVICE_S] if chance.random() < FAILED_FIRST else [done]
        return [round(each, 3) for each in tries]


def tell_story(
    story: Story, producer: "Producer", *, seconds: float, tell: Callable[[int, int], None]
) -> float:
    """Send every message at its time, the whole in `seconds`; how long it really took.

    Returns when all are acknowledged. A machine that is too slow takes longer: it does not hurry
    afterwards, and loses nothing.
    """
    from penstock import Message

    first = began = time.monotonic()
    pace = seconds / (60 * MINUTES)
    under_way: list[Future[Any]] = []
    since = 0.0
    for number, told in enumerate(story.messages):
        if told.at > since + UNDER_WAY_S or len(under_way) >= _UNDER_WAY_MAX:
            _await_all(under_way)
            since = told.at
            began = max(began, time.monotonic() - told.at * pace)
        wait = began + told.at * pace - time.monotonic()
        if wait > 0:
            tell(number, len(story.messages))
            time.sleep(max(wait, 0.01))
        message = Message(told.topic, told.body, told.tag or None, [told.key])
        under_way.append(producer.submit(message))
    _await_all(under_way)
    tell(len(story.messages), len(story.messages))
    return time.monotonic() - first


def _await_all(under_way: "list[Future[Any]]") -> None:
    for future in under_way:
        future.result()
    under_way.clear()
