"""Failures of handlers are logged, or written to stderr once per kind with a count."""

import logging

import pytest

from penstock.client.handler_failures import KINDS_MAX, HandlerFailures, is_logged, show_error
from penstock.testing.virtual_clock import VirtualClock

log = logging.getLogger("penstock.client.test_handler_failures")
unconfigured = logging.Logger("penstock.client")  # without a parent: no other handler
unconfigured.addHandler(logging.NullHandler())


def failure(text: str = "no such customer") -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_each_kind_is_written_once_and_then_with_its_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = HandlerFailures(VirtualClock())
    for number in range(100):
        failures.report(unconfigured, "Orders", f"message {number} failed", failure())
    failures.report(unconfigured, "Orders", "message 100 failed", KeyError("id"))
    text = capsys.readouterr().err
    assert text.count("Traceback") == 1
    lines = [line for line in text.splitlines() if line.startswith("penstock: ")]
    assert lines[0] == "penstock: message 0 failed"
    assert [line.partition(" times: ValueError: no such customer (")[0] for line in lines[1:3]] == [
        "penstock: the handler of topic Orders failed 10",
        "penstock: the handler of topic Orders failed 100",
    ]
    assert lines[3:] == ["penstock: message 100 failed"]


def test_an_application_can_switch_the_output_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(logging, "lastResort", None)
        HandlerFailures(VirtualClock()).report(unconfigured, "Orders", "failed", failure())
    show_error(logging.Logger("penstock.client", logging.CRITICAL), "failed")
    assert capsys.readouterr().err == ""
    show_error(unconfigured, "failed")
    assert capsys.readouterr().err == "penstock: failed\n"


def test_configured_logging_gets_each_failure_and_stderr_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert is_logged(log)
    failures = HandlerFailures(VirtualClock())
    for number in range(2):
        failures.report(log, "Orders", f"message {number} failed", failure())
    assert caplog.messages == ["message 0 failed", "message 1 failed"]
    assert "penstock: " not in capsys.readouterr().err


def test_failures_are_summarized_by_kind_and_bounded() -> None:
    clock = VirtualClock()
    failures = HandlerFailures(clock, "check")
    failures.report(log, "A", "x", "it returned an int")
    failures.report(log, "A", "x", "it returned an int")
    failures.report(log, "A", "x", failure("long" * 100 + "\nsecond line"))
    first, second = failures.texts()
    assert first == "the check of topic A failed 2 times, the last time 0 s ago: it returned an int"
    assert "failed once" in second
    assert "longlong… (test_handler_failures.py:" in second
    for number in range(KINDS_MAX):
        failures.report(log, f"T{number}", "x", failure())
    assert len(failures.texts()) == KINDS_MAX
