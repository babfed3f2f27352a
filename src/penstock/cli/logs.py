"""Log output of the servers on stderr: text lines, or with `--log json` one object per line.

Modules use the standard library's `logging.getLogger(__name__)` and configure nothing.
"""

import logging
import os
import sys
from datetime import datetime

import msgspec

_RESET, _DIM = "\033[0m", "\033[2m"
_COLOURS = {
    logging.DEBUG: _DIM,
    logging.WARNING: "\033[33m",
    logging.ERROR: "\033[31m",
    logging.CRITICAL: "\033[1;31m",
}
_PACKAGE = "penstock."
_ONE_LINE = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {9: "\t", 10: "\\n"}
"""Control characters are escaped: data from peers must not forge lines or control the terminal."""


def log_to_stderr(form: str, who: str, *, debug: bool = False) -> None:
    """Log to stderr in the format `text` or `json`; `who` names this process in each line."""
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(who) if form == "json" else TextLines(who, colours=colours))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.DEBUG if debug else logging.INFO)


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  broker-a store.maintenance: deleting 2 segments`."""

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
