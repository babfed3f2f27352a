"""Log output of the servers on stderr: text lines, or with `--log json` one object per line.

A fault that repeats is logged once and then counted (`CountingHandler`).

Modules use the standard library's `logging.getLogger(__name__)` and configure nothing.
"""

import logging
import os
import sys
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from typing import TextIO

import msgspec

_RESET, _DIM = "\033[0m", "\033[2m"
_COLOURS = {
    logging.DEBUG: _DIM,
    logging.WARNING: "\033[33m",
    logging.ERROR: "\033[31m",
    logging.CRITICAL: "\033[1;31m",
}
_PACKAGE = "penstock."
_AUDIT = "penstock.audit"
REPEAT_S = 60.0
"""How long repetitions of a warning or error are counted before the count is logged."""
FAULTS_MAX = 1_000
"""How many different faults are counted at the same time."""
_ONE_LINE = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {9: "\t", 10: "\\n"}
"""Control characters are escaped: data from peers must not forge lines or control the terminal."""


def log_to_stderr(form: str, who: str, *, debug: bool = False) -> None:
    """Log to stderr in the format `text` or `json`; `who` names this process in each line."""
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler = CountingHandler()
    handler.setFormatter(JsonLines(who) if form == "json" else TextLines(who, colours=colours))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.DEBUG if debug else logging.INFO)


@dataclass(slots=True)
class _Fault:
    """A warning or error, when it was logged last, and how often it has repeated since then."""

    record: logging.LogRecord
    text: str
    logged_s: float
    repeated: int = 0


class CountingHandler(logging.StreamHandler[TextIO]):
    """Logs a warning or error once, and then once a minute how often it has repeated.

    Records with a traceback are the same if they come from the same line of code for the same
    kind of exception; other records if their text is the same. The audit log is always complete.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._faults: dict[object, _Fault] = {}  # in the order of their last line

    def emit(self, record: logging.LogRecord) -> None:
        self._log_due_counts(record.created)
        if record.levelno < logging.WARNING or record.name.startswith(_AUDIT):
            super().emit(record)
            return
        key = _kind(record)
        fault = self._faults.get(key)
        if fault is not None:
            fault.repeated += 1
            return
        if len(self._faults) >= FAULTS_MAX:
            self._log_count(self._faults.pop(next(iter(self._faults))), record.created)
        self._faults[key] = _Fault(record, record.getMessage(), record.created)
        super().emit(record)

    def close(self) -> None:
        """Log the counts that are left."""
        faults, self._faults = self._faults, {}
        for fault in faults.values():
            self._log_count(fault, fault.logged_s)
        super().close()

    def _log_due_counts(self, now_s: float) -> None:
        while self._faults:
            key, fault = next(iter(self._faults.items()))
            if 0 <= now_s - fault.logged_s < REPEAT_S:
                break
            del self._faults[key]
            if fault.repeated:
                self._log_count(fault, now_s)
                self._faults[key] = fault

    def _log_count(self, fault: _Fault, now_s: float) -> None:
        """Log how often a fault has repeated, if it has, and begin to count again."""
        if not fault.repeated:
            return
        record = copy(fault.record)
        record.msg, record.args = "repeated %s times: %s", (f"{fault.repeated:,}", fault.text)
        record.created, record.exc_info, record.exc_text = now_s, None, None
        fault.logged_s, fault.repeated = now_s, 0
        super().emit(record)


def _kind(record: logging.LogRecord) -> object:
    """What repetitions of a record have in common."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return record.name, record.getMessage()
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = (trace.tb_frame.f_code, trace.tb_lineno) if trace is not None else None
    return record.name, record.msg, type(error), getattr(error, "errno", None), place


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  broker-a broker.topics: created topic orders`."""

    def __init__(self, who: str, *, colours: bool) -> None:
        super().__init__()
        self._who = who
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        level = f"{record.levelname:<7}"
        name = record.name.removeprefix(_PACKAGE)
        message = record.getMessage().translate(_ONE_LINE)
        if self._colours:
            colour = _COLOURS.get(record.levelno, "")
            time = f"{_DIM}{time}{_RESET}"
            level = f"{colour}{level}{_RESET}" if colour else level
        text = f"{time} {level} {self._who} {name}: {message}"
        trace = _trace(self, record)
        return f"{text}\n{trace}" if trace else text


class JsonLines(logging.Formatter):
    """`{"time":…,"level":"info","process":"broker-a","logger":"store.put","message":…}`."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created)
            .astimezone()
            .isoformat("T", "milliseconds"),
            "level": record.levelname.lower(),
            "process": self._who,
            "logger": record.name.removeprefix(_PACKAGE),
            "message": record.getMessage(),
        }
        trace = _trace(self, record)
        if trace:
            fields["trace"] = trace
        return msgspec.json.encode(fields).decode()


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)
