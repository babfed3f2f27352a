"""Log lines as text and as JSON."""

import io
import json
import logging
import sys

import pytest

from penstock.cli.servers.logs import FAULTS_MAX, CountingHandler, JsonLines, TextLines


def record(message: str, *values: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("broken")
        except ValueError:
            info = sys.exc_info()
    made = logging.LogRecord(
        "penstock.store.maintenance", logging.WARNING, "", 0, message, values, info
    )
    made.created = 1_769_860_800.123
    return made


def test_a_text_line_has_time_level_process_and_logger() -> None:
    line = TextLines("broker-a", colours=False).format(record("%d segments", 2))
    assert line.endswith(".123 WARNING broker-a store.maintenance: 2 segments")
    assert "\033" not in line


def test_colours_are_only_for_terminals() -> None:
    assert "\033[33mWARNING" in TextLines("broker-a", colours=True).format(record("x"))


def test_data_from_a_peer_can_not_forge_a_line() -> None:
    line = TextLines("broker-a", colours=False).format(record("%s", "a\nb\x1b[31m"))
    assert line.endswith(r"a\nb\x1b[31m")


def test_a_json_line_is_one_object() -> None:
    line = JsonLines("broker-a").format(record("a\n%s", '"b"', error=True))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["level"] == "warning"
    assert fields["process"] == "broker-a"
    assert fields["logger"] == "store.maintenance"
    assert fields["message"] == 'a\n"b"'
    assert "ValueError: broken" in fields["trace"]
    assert fields["time"][19:23] == ".123"


def test_tracebacks_follow_the_line() -> None:
    text = TextLines("broker-a", colours=False).format(record("x", error=True))
    assert text.splitlines()[-1] == "ValueError: broken"


# --- repeated faults


class Output:
    """What a handler has written, and a clock."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = CountingHandler(self._stream)
        self.now_s = 1_769_860_800.0

    def log(
        self,
        message: str,
        *values: object,
        level: int = logging.WARNING,
        name: str = "penstock.server",
        error: Exception | None = None,
    ) -> None:
        info = (type(error), error, error.__traceback__) if error is not None else None
        made = logging.LogRecord(name, level, "", 0, message, values, info)
        made.created = self.now_s
        self.handler.handle(made)

    def lines(self) -> list[str]:
        text = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        return text.splitlines()


def failure(text: str) -> Exception:
    try:
        raise OSError(5, text)
    except OSError as error:
        return error


def test_a_repeated_fault_is_logged_once_and_counted() -> None:
    output = Output()
    for number in range(3_226):
        output.log("request %d from %s failed", 310, f"peer-{number}", error=failure(f"{number}"))
    first = output.lines()
    assert first[0] == "request 310 from peer-0 failed"
    assert sum(line.startswith("OSError") for line in first) == 1
    output.now_s += 60
    output.log("ready", level=logging.INFO)
    counted = "repeated 3,225 times: request 310 from peer-0 failed"
    assert output.lines() == [counted, "ready"]
    output.log("request %d from %s failed", 310, "late", error=failure("x"))
    assert output.lines() == []
    output.handler.close()
    assert output.lines() == ["repeated 1 times: request 310 from peer-0 failed"]


def test_a_fault_that_ended_is_logged_in_full_when_it_returns() -> None:
    output = Output()
    for _ in range(2):
        output.log("can't write %s", "a")
        assert output.lines() == ["can't write a"]
        output.now_s += 60
        output.log("other")
        assert output.lines() == ["other"]


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_clock_step_ends_the_count(step_s: int) -> None:
    output = Output()
    output.log("x")
    output.log("x")
    output.now_s += step_s
    output.log("y")
    assert output.lines() == ["x", "repeated 1 times: x", "y"]


def test_different_faults_and_other_lines_are_not_counted() -> None:
    output = Output()
    for topic in "ab":
        output.log("can't read %s", topic)
    for _ in range(2):
        output.log("created", level=logging.INFO)
        output.log("refused", name="penstock.audit")
    errors = ["can't read a", "can't read b"]
    assert output.lines() == [*errors, "created", "refused", "created", "refused"]


def test_the_number_of_counted_faults_is_limited() -> None:
    output = Output()
    for number in range(FAULTS_MAX + 1):
        output.log("fault %d", number)
        output.log("fault %d", number)
    assert output.lines()[-2:] == ["repeated 1 times: fault 0", f"fault {FAULTS_MAX}"]
