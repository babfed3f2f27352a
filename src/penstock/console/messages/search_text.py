"""The text of the search box: words, and filters such as `tag:paid since:-1h`.

| Filter | Meaning |
|---|---|
| `key:ORDER-7` | messages with this key |
| `id:AC11…` | the message with this id |
| `queue:broker-a/3` | only this queue |
| `offset:120` | from this offset of the queue on |
| `tag:paid` | this tag; several are alternatives |
| `since:-1h`, `until:2026-08-01T12:00` | stored in this time |
| `body:text` | the body contains this text |
| `sql:"a > 5"` | an SQL92 filter |
| other words | an id if it looks like one, else a key |

A value with spaces is quoted.
"""

import re
import shlex
from dataclasses import dataclass, field
from datetime import datetime

from penstock.console.endpoints import parse_time
from penstock.errors import InvalidParameter

_ID = re.compile(r"[0-9A-Fa-f]{24,56}")
_PLACE = re.compile(r"\S+/\S+/\d+@\d+")
_NAMES = ("key", "id", "queue", "offset", "tag", "since", "until", "body", "sql", "topic")


@dataclass(frozen=True, slots=True)
class SearchText:
    """What to look for. An empty search browses the newest messages."""

    reference: str = ""
    """An id or a place, which find one message."""
    key: str = ""
    topic: str = ""
    broker: str = ""
    queue: int | None = None
    offset: int | None = None
    tags: tuple[str, ...] = field(default_factory=tuple)
    since: datetime | None = None
    until: datetime | None = None
    body: str = ""
    sql: str = ""


def parse_search(text: str, now_ms: int) -> SearchText:
    """Read the text of the search box; raises InvalidParameter."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidParameter(
            f"the search can't be read: {error}", hint="close the quotation mark"
        ) from None
    values: dict[str, list[str]] = {}
    for word in words:
        name, colon, value = word.partition(":")
        if colon and name in _NAMES:
            values.setdefault(name, []).append(value)
        else:
            is_id = _ID.fullmatch(word) or _PLACE.fullmatch(word)
            values.setdefault("id" if is_id else "key", []).append(word)
    many = [name for name, found in values.items() if len(found) > 1 and name != "tag"]
    if many:
        raise InvalidParameter(
            f"there are several values of {many[0]}", hint="quote a value that contains spaces"
        )
    one = {name: found[0] for name, found in values.items()}
    broker, _, queue = one.get("queue", "").rpartition("/")
    return SearchText(
        reference=one.get("id", ""),
        key=one.get("key", ""),
        topic=one.get("topic", ""),
        broker=broker,
        queue=_number("queue", queue),
        offset=_number("offset", one.get("offset", "")),
        tags=tuple(values.get("tag", ())),
        since=parse_time("since", one.get("since", ""), now_ms),
        until=parse_time("until", one.get("until", ""), now_ms),
        body=one.get("body", ""),
        sql=one.get("sql", ""),
    )


def _number(name: str, text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise InvalidParameter(
            f"{name}:{text[:40]} is not a number", hint="as in queue:broker-a/3 offset:120"
        )
    return int(text)
