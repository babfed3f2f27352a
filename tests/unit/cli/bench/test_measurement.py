"""What counts, what a report says of it, and its warnings."""

import json
from dataclasses import replace

import pytest

from penstock.cli.bench.bench_report import BenchReport, DeliveryCounts, Workload, ms_text
from penstock.cli.bench.live_line import progress_text
from penstock.cli.bench.measurement import MS_NS, Measurement, elapsed_s
from penstock.cli.bench.schedule import SECOND_NS, Window
from penstock.cli.bench.stamped_body import HEAD_BYTES, SeenNumbers, StampedBodies
from tests import json_kit

WORK = Workload(
    mode="send", topic="t", rate=100.0, concurrency=None, size=10, batch=1, producers=1,
    consumers=0, warmup_s=1.0, duration_s=1.0,
)  # fmt: skip


def measured(latency_ms: float = 2.0, *, messages: int = 100, behind_ms: float = 0) -> Measurement:
    """One second of messages, sent at equal intervals after a warm-up of one second."""
    found = Measurement(Window(SECOND_NS, 2 * SECOND_NS))
    for number in range(messages):
        begin = SECOND_NS + number * SECOND_NS // messages
        found.sent(begin, begin + round(behind_ms * MS_NS))
        found.succeeded(begin, begin + round(latency_ms * MS_NS), 10)
    return found


def report(found: Measurement, work: Workload = WORK, cpu_percent: float = 20.0) -> BenchReport:
    return BenchReport.of(work, found, cpu_percent=cpu_percent, interrupted=False)


def test_only_messages_that_began_in_the_window_count() -> None:
    found = measured()
    found.succeeded(SECOND_NS - 1, SECOND_NS + 5, 10)
    found.succeeded(2 * SECOND_NS, 2 * SECOND_NS + 5, 10)
    found.failed(2 * SECOND_NS, "RequestTimeout")
    found.failed(SECOND_NS, "RequestTimeout")
    assert (found.messages, found.byte_count, dict(found.errors)) == (
        100, 1000, {"RequestTimeout": 1},
    )  # fmt: skip


def test_a_stall_is_in_the_latency_of_every_message_that_was_due_meanwhile() -> None:
    """The server answers nothing for half a second; each message counts from its intended time."""
    found = Measurement(Window(0, SECOND_NS))
    for number in range(100):
        intended = number * SECOND_NS // 100
        stalled_until = SECOND_NS // 2
        found.succeeded(intended, max(intended + MS_NS, stalled_until), 10)
    assert (found.latency.percentile(60) or 0) / MS_NS == pytest.approx(100, rel=0.01)
    assert (found.latency.percentile(90) or 0) / MS_NS == pytest.approx(400, rel=0.01)


def test_late_acknowledgements_lengthen_the_time_of_the_rate() -> None:
    found = measured(latency_ms=1010)
    assert elapsed_s(found) == pytest.approx(2.0)
    assert report(found).per_second == pytest.approx(50)


def test_a_drained_topic_ends_with_its_last_message() -> None:
    found = Measurement(Window(0, 10 * SECOND_NS))
    for number in range(1, 101):
        found.arrived(number * SECOND_NS // 100, None, 10)
    assert elapsed_s(found, drained=True) == pytest.approx(1.0)
    assert found.latency.count == 0


def test_a_report_without_trouble_has_no_warnings() -> None:
    found = report(measured())
    assert list(found.warnings()) == []
    assert not found.generator_limited
    shown = dict(found.rows())
    assert shown["rate"] == "100.0 messages/s"
    assert shown["errors"] == "none"
    assert "p99.9 2.00 ms" in shown["latency"]


@pytest.mark.parametrize(
    ("found", "work", "cpu_percent", "text"),
    [
        (measured(behind_ms=40), WORK, 20.0, "behind its schedule (p99 40"),
        (measured(), WORK, 99.0, "used 99 % of a processor"),
        (measured(messages=50), WORK, 20.0, "target rate was not reached: 50 of 100"),
        (measured(messages=0), replace(WORK, rate=None, concurrency=1), 20.0, "No message counted"),
    ],
)
def test_warnings(found: Measurement, work: Workload, cpu_percent: float, text: str) -> None:
    assert [line for line in report(found, work, cpu_percent).warnings() if text in line]


def test_json_of_an_end_to_end_run() -> None:
    work = replace(WORK, mode="e2e", consumers=1, group="g")
    found = BenchReport.of(
        work,
        measured(3.0),
        cpu_percent=5.0,
        interrupted=False,
        sending=measured(1.0),
        delivery=DeliveryCounts(received=99, lost=1, duplicates=2),
    )
    made = json_kit.check("bench e2e", json.dumps(found.as_json()))
    assert made["messages"] == 100
    assert made["latency_ms"]["p50"] == pytest.approx(3.0, rel=0.01)
    assert made["send_latency_ms"]["p50"] == pytest.approx(1.0, rel=0.01)
    assert (made["received"], made["lost"], made["duplicates"]) == (99, 1, 2)
    assert "1 acknowledged message did not arrive in time." in made["warnings"]


def test_unknown_values_are_unknown() -> None:
    made = json_kit.check("bench send", json.dumps(report(measured(messages=0)).as_json()))
    assert made["messages_per_second"] is None
    assert set(made["latency_ms"].values()) == {None}
    assert ms_text(None) == "-"


def test_the_progress_line() -> None:
    found = measured()
    assert progress_text(found, SECOND_NS // 2, 3, None) == "warm-up, 0 s left"
    text = progress_text(found, 2 * SECOND_NS, 3, 100.0)
    assert text.startswith("1/1 s  100 messages/s  p50 2.0")
    assert text.endswith("3 in flight")
    found.failed(SECOND_NS, "RequestTimeout")
    assert progress_text(found, 2 * SECOND_NS, None, None).endswith("1 error")


def test_stamped_bodies() -> None:
    ours, others = StampedBodies(64), StampedBodies(64)
    body = ours.body(123, 7)
    assert len(body) == 64
    assert ours.read(body) == (123, 7)
    assert others.read(body) is None
    assert ours.read(b"x" * (HEAD_BYTES - 1)) is None


def test_received_numbers() -> None:
    seen, sent = SeenNumbers(), SeenNumbers()
    for number in (0, 9, 100_000):
        sent.add(number)
    assert seen.add(9)
    assert not seen.add(9)
    assert (seen.count, seen.duplicates, seen.missing(sent)) == (1, 1, 2)
