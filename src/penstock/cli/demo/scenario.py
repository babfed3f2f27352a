"""The scenario of the pipeline demo: registrations, a load spike, and three services.

Everything is derived from a seed. The events span a quarter of an hour but are sent within some
twenty seconds, so their times are simulated. The scenario also holds the expected output of the
pipeline: the number of users per minute, and the users who are stuck.
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
    RegistrationEvent,
    StepEvent,
    encode_event,
    event_time,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from penstock import Producer

MINUTES: Final = 16
SPIKE_MINUTE: Final = 3
SPIKE_FACTOR: Final = 20
LATE_S: Final = 120
"""How late events may be, in simulated time: a few seconds of real time."""
IN_FLIGHT_S: Final = LATE_S / 4
"""The largest difference between the times of messages in flight. Queues are read one after the
other, so a message may be in a later batch than a newer one; it must not be too late then."""
_IN_FLIGHT_MAX: Final = 5000
"""Below the limit of a producer."""
STUCK_AFTER_S: Final = 300
CAPACITY: Final = {"sms": 16, "push": 80, "coupon": 8}
"""The capacity of each service, as a multiple of the usual rate. The spike exceeds two of them, and
the coupons take minutes to catch up."""
SERVICE_S: Final = 1.5
CHANNELS: Final = ("web", "app", "partner")
_CHANNEL_WEIGHTS: Final = (5, 4, 1)
REJECTED: Final = 0.04
DUPLICATED: Final = 0.02
LOST_STEPS: Final = 0.0005
"""The share of steps that never happen."""
FAILED_ONCE: Final = 0.005
UNREADABLE: Final = 5

MinuteKey = tuple[int, str, str]
"""Minute of the scenario, channel, outcome."""


@dataclass(frozen=True, slots=True)
class ScenarioMessage:
    """A message, and when it is sent, in seconds from the start of the scenario."""

    at: float
    topic: str
    key: str
    body: bytes
    tag: str = ""


@dataclass(slots=True)
class Scenario:
    """All messages in the order in which they are sent, and the expected output."""

    started: datetime
    """The simulated start time, a full minute. The scenario ends before the current time."""
    messages: list[ScenarioMessage] = field(default_factory=list)
    counts: Counter[MinuteKey] = field(default_factory=Counter)
    stuck: dict[str, int] = field(default_factory=dict)
    """Users who miss a step after STUCK_AFTER_S, with the minute of their registration."""

    @property
    def counted_minutes(self) -> int:
        """The number of minutes that are complete when the last event has been read."""
        return (60 * MINUTES - EARLY_MS // 1000 - 1 - LATE_S) // 60

    @property
    def closed_minutes(self) -> int:
        """The number of minutes for which STUCK_AFTER_S has passed as well."""
        return self.counted_minutes - STUCK_AFTER_S // 60


def generate_scenario(seed: int, usual_per_minute: int) -> Scenario:
    """Generate the scenario: the usual number of registrations per minute, except for the spike."""
    rng = random.Random(seed)
    start = (time.time() // 60 - MINUTES - 1) * 60
    scenario = Scenario(event_time(start))
    services = [
        SimulatedService(name, usual_per_minute / 60 * CAPACITY[name]) for name in STEP_NAMES
    ]
    times = []
    for minute in range(MINUTES):
        number = usual_per_minute * (SPIKE_FACTOR if minute == SPIKE_MINUTE else 1)
        times += [60 * minute + 60 * rng.random() for _ in range(number)]
    # A registration in the last second advances the watermark to `counted_minutes`.
    for number, at in enumerate(sorted([*times, 60 * MINUTES - 0.5])):
        _register(scenario, rng, services, start, f"user-{number:06}", round(at, 3))
    for number in range(UNREADABLE):
        at = 60 * MINUTES * rng.random()
        scenario.messages.append(
            ScenarioMessage(at, STEPS, f"nobody-{number}", b'{"id": "nobody-%d", ' % number)
        )
    scenario.messages.sort(key=lambda message: message.at)
    return scenario


def _register(
    scenario: Scenario,
    rng: random.Random,
    services: Sequence["SimulatedService"],
    start: float,
    user: str,
    at: float,
) -> None:
    channel = rng.choices(CHANNELS, _CHANNEL_WEIGHTS)[0]
    outcome = "rejected" if rng.random() < REJECTED else ACCEPTED
    body = encode_event(RegistrationEvent(user, channel, outcome, event_time(start + at)))
    message = ScenarioMessage(at, REGISTRATIONS, user, body)
    scenario.messages.append(message)
    if rng.random() < DUPLICATED:
        scenario.messages.append(message)
    minute = int(at // 60)
    scenario.counts[minute, channel, outcome] += 1
    if outcome != ACCEPTED:
        return
    end = 60 * (minute + 1) + STUCK_AFTER_S
    is_stuck = False
    for service in services:
        steps = service.serve(rng, at)
        is_stuck |= not steps or steps[-1] >= end
        for number, done in enumerate(steps):
            step = StepEvent(user, service.name, event_time(start + done), number == len(steps) - 1)
            if done < 60 * MINUTES:  # later steps are outside the scenario
                scenario.messages.append(
                    ScenarioMessage(done, STEPS, user, encode_event(step), service.name)
                )
    if is_stuck:
        scenario.stuck[user] = minute


@dataclass(slots=True)
class SimulatedService:
    """Processes one user after the other, at a limited rate."""

    name: str
    per_second: float
    free_at: float = 0.0

    def serve(self, rng: random.Random, at: float) -> list[float]:
        """The times of the attempts for a user who arrives at `at`. The last attempt succeeds; an
        empty list means that the step never happens."""
        if rng.random() < LOST_STEPS:
            return []
        self.free_at = max(self.free_at, at) + 1 / self.per_second
        done = self.free_at + SERVICE_S * rng.lognormvariate(0, 0.5)
        tries = [done, done + 2 * SERVICE_S] if rng.random() < FAILED_ONCE else [done]
        return [round(each, 3) for each in tries]


def send_scenario(
    scenario: Scenario,
    producer: "Producer",
    *,
    seconds: float,
    progress: Callable[[int, int], None],
) -> float:
    """Send every message at its time, scaled to `seconds` in total; returns the real duration.

    Returns when all are acknowledged. On a slow machine it takes longer: delays are not made up.
    """
    from penstock import Message

    first = started = time.monotonic()
    pace = seconds / (60 * MINUTES)
    in_flight: list[Future[Any]] = []
    since = 0.0
    for number, send_progress in enumerate(scenario.messages):
        if send_progress.at > since + IN_FLIGHT_S or len(in_flight) >= _IN_FLIGHT_MAX:
            _await_all(in_flight)
            since = send_progress.at
            started = max(started, time.monotonic() - send_progress.at * pace)
        wait = started + send_progress.at * pace - time.monotonic()
        if wait > 0:
            progress(number, len(scenario.messages))
            time.sleep(max(wait, 0.01))
        message = Message(
            send_progress.topic, send_progress.body, send_progress.tag or None, [send_progress.key]
        )
        in_flight.append(producer.submit(message))
    _await_all(in_flight)
    progress(len(scenario.messages), len(scenario.messages))
    return time.monotonic() - first


def _await_all(in_flight: "list[Future[Any]]") -> None:
    for future in in_flight:
        future.result()
    in_flight.clear()
