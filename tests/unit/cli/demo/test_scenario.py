"""The scenario of the pipeline demo, its expected output, and the chart."""

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
from penstock.cli.demo.demo_report import ScenarioResult
from penstock.cli.demo.scenario import (
    LATE_S,
    MINUTES,
    SPIKE_FACTOR,
    SPIKE_MINUTE,
    STUCK_AFTER_S,
    UNREADABLE,
    Scenario,
    generate_scenario,
    send_scenario,
)
from penstock.spark.pipelines.registration.events import (
    REGISTRATIONS,
    STEP_NAMES,
    STEPS,
    RegistrationEvent,
    StepEvent,
)
from penstock.spark.pipelines.registration.plot import RegistrationStatistics, draw


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return generate_scenario(1, 50)


def test_the_same_seed_generates_the_same_scenario(scenario: Scenario) -> None:
    again = generate_scenario(1, 50)
    assert (again.counts, again.stuck) == (scenario.counts, scenario.stuck)
    assert [m.at for m in again.messages] == [m.at for m in scenario.messages]


def test_the_spike_has_twenty_times_as_many_registrations(scenario: Scenario) -> None:
    minutes: Counter[int] = Counter()
    for (minute, _, _), count in scenario.counts.items():
        minutes[minute] += count
    assert minutes[SPIKE_MINUTE] == 50 * SPIKE_FACTOR
    assert {minutes[m] for m in range(MINUTES - 1) if m != SPIKE_MINUTE} == {50}
    assert SPIKE_MINUTE < scenario.closed_minutes < scenario.counted_minutes < MINUTES


def test_the_expected_output_follows_from_the_messages(scenario: Scenario) -> None:
    users: dict[str, RegistrationEvent] = {}
    done: dict[str, dict[str, float]] = {}
    bad = 0
    for send_progress in scenario.messages:
        if send_progress.topic == REGISTRATIONS:
            registration = msgspec.json.decode(send_progress.body, type=RegistrationEvent)
            users[registration.id] = registration
            continue
        try:
            step = msgspec.json.decode(send_progress.body, type=StepEvent)
        except msgspec.DecodeError:
            bad += 1
            continue
        assert (send_progress.topic, send_progress.tag) == (STEPS, step.step)
        if step.ok:
            done.setdefault(step.id, {})[step.step] = (
                step.done_at - scenario.started
            ).total_seconds()
    assert bad == 5
    assert sum(scenario.counts.values()) == len(users) < len(scenario.messages)
    for user in users.values():
        minute = int((user.registered_at - scenario.started) / timedelta(minutes=1))
        if user.outcome != "ok" or minute >= scenario.closed_minutes:
            continue
        end = 60 * (minute + 1) + STUCK_AFTER_S
        in_time = {name for name, at in done.get(user.id, {}).items() if at < end}
        assert (in_time != set(STEP_NAMES)) == (user.id in scenario.stuck)


class Sent:
    """A producer that acknowledges immediately."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def submit(self, message: Message) -> Future[Any]:
        self.messages.append(message)
        future: Future[Any] = Future()
        future.set_result(None)
        return future


@pytest.mark.slow
def test_all_messages_are_sent_in_order_and_progress_is_reported(scenario: Scenario) -> None:
    sent, steps = Sent(), []
    send_scenario(scenario, sent, seconds=0.2, progress=lambda done, of: steps.append((done, of)))  # type: ignore[arg-type]
    assert [m.content for m in sent.messages] == [m.body for m in scenario.messages]
    assert steps[-1] == (len(scenario.messages), len(scenario.messages))
    assert steps == sorted(steps)


class Slow(Sent):
    """A producer that acknowledges a message only when its result is awaited."""

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


@pytest.mark.slow
def test_messages_in_flight_are_close_in_time(scenario: Scenario) -> None:
    """Queues are read one after the other: otherwise old events would be too late."""
    slow = Slow()
    times = [send_progress.at for send_progress in scenario.messages]
    worst = 0.0

    def submit(message: Message, really: Any = slow.submit) -> Future[Any]:
        nonlocal worst
        number = len(slow.messages)
        waiting = [times[n] for n in range(number) if n not in slow.acknowledged]
        worst = max(worst, times[number] - min(waiting, default=times[number]))
        return really(message)  # type: ignore[no-any-return]

    slow.submit = submit  # type: ignore[method-assign]
    send_scenario(scenario, slow, seconds=0.01, progress=lambda done, of: None)  # type: ignore[arg-type]
    assert len(slow.acknowledged) == len(scenario.messages)
    assert worst <= LATE_S / 4


def figures_of(scenario: Scenario) -> RegistrationStatistics:
    """The output of a correct pipeline."""
    counts = {
        (scenario.started + timedelta(minutes=minute), channel, outcome): count
        for (minute, channel, outcome), count in scenario.counts.items()
        if minute < scenario.counted_minutes
    }
    latencies = {}
    for minute in range(scenario.closed_minutes):
        users = accepted_of(scenario, minute)
        row = {"users": users, "done": users - 1, "failed": 0, "missing": 1}
        for step in STEP_NAMES:
            key = (scenario.started + timedelta(minutes=minute), step)
            latencies[key] = {**row, "p50_ms": 5, "p95_ms": 900, "p99_ms": None}
    return RegistrationStatistics(counts, latencies)


def accepted_of(scenario: Scenario, minute: int) -> int:
    return sum(n for key, n in scenario.counts.items() if (key[0], key[2]) == (minute, "ok"))


def correct_result(scenario: Scenario) -> ScenarioResult:
    total = len(scenario.messages)
    stuck = {user for user, minute in scenario.stuck.items() if minute < scenario.closed_minutes}
    return ScenarioResult(scenario, figures_of(scenario), total, total, Counter(stuck), UNREADABLE)


def test_wrong_output_is_detected(scenario: Scenario) -> None:
    good = correct_result(scenario)
    assert good.good
    assert not replace(good, lake_rows=good.lake_rows + 1).good
    assert not replace(good, unreadable=UNREADABLE - 1).good
    assert replace(good, alerts=Counter(["somebody"]) + good.alerts).wrong_alerts == 1
    counts = dict(good.statistics.counts)
    counts[next(iter(counts))] += 1
    wrong = replace(good, statistics=replace(good.statistics, counts=counts))
    assert (wrong.wrong_minutes, wrong.good) == (1, False)
    fewer = {key: n for key, n in counts.items() if key[0] != scenario.started}
    assert replace(good, statistics=replace(good.statistics, counts=fewer)).wrong_minutes == 1


def test_wrong_latencies_are_detected(scenario: Scenario) -> None:
    good = correct_result(scenario)
    rows = dict(good.statistics.latencies)
    key = (scenario.started, "push")
    more = {**rows, key: {**rows[key], "users": rows[key]["users"] + 1}}
    wrong = replace(good, statistics=replace(good.statistics, latencies=more))
    assert (wrong.wrong_minutes, wrong.good) == (1, False)
    del rows[key]
    assert replace(good, statistics=replace(good.statistics, latencies=rows)).wrong_minutes == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.slow
def test_the_chart_is_drawn(scenario: Scenario, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"picture.{ending}"
    draw(figures_of(scenario), picture, title="A scenario")
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_legend_tells_the_percentiles_of_a_step_apart(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw(figures_of(scenario), tmp_path / "picture.png", title="A scenario")
    legend = figures[0].axes[1].get_legend()
    assert legend is not None
    lines = [line for line in legend.get_lines() if line.get_label().startswith("push,")]
    assert len(lines) == 3
    assert len({line.get_marker() for line in lines}) == 3
    assert len({line.get_linestyle() for line in lines}) == 3


@pytest.mark.parametrize("name", ["picture.xyz", "picture", "nowhere/picture.png"])
def test_an_invalid_chart_path_is_refused(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(demo, ["pipeline", "--picture", str(tmp_path / name)])
    assert (result.exit_code, "--picture" in result.output) == (2, True)
