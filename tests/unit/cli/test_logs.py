"""Log lines as text and as JSON."""

import json
import logging
import sys

from penstock.cli.logs import JsonLines, TextLines


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
