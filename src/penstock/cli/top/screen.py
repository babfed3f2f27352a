"""The screen: tables for rich, from a snapshot and what the user has chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import size_text
from penstock.cli.top.screen_snapshot import (
    SORTS,
    BrokerRow,
    GroupRow,
    ScreenSnapshot,
    TopicRow,
    sorted_rows,
)

VIEWS = ("all", "brokers", "topics", "groups")
UNKNOWN = "-"
DISK_WARN, DISK_FULL = 0.75, 0.90
LAG_WARN_S, LAG_LONG_S = 60, 600
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
KEYS = "q quit  1 brokers  2 topics  3 groups  0 all  s sort  r reverse  p pause  ↑↓ scroll"


@dataclass(slots=True)
class ScreenState:
    """What the user has chosen with keys."""

    view: str = "all"
    sorts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SORTS, 0))
    reverse: bool = False
    paused: bool = False
    scroll: int = 0
    quit: bool = False

    def press(self, key: str) -> None:
        """Apply a key; unknown ones do nothing."""
        if key in ("q", "Q", "\x1b", "\x03"):
            self.quit = True
        elif key in "0123" and key:
            self.view, self.scroll = VIEWS[int(key)], 0
        elif key == "s":
            for table in self._sorted_tables():
                self.sorts[table] = (self.sorts[table] + 1) % len(SORTS[table])
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "p":
            self.paused = not self.paused
        else:
            step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10}
            self.scroll = max(self.scroll + step.get(key, 0), 0)

    def sort_of(self, table: str) -> str:
        """The column by which a table is sorted."""
        return SORTS[table][self.sorts[table]]

    def _sorted_tables(self) -> tuple[str, ...]:
        return ("topics", "groups") if self.view == "all" else (self.view,)


@dataclass(frozen=True, slots=True)
class ScreenColumn:
    """A column: its head, the attribute to sort by, and the text of a row."""

    head: str
    name: str
    text: Callable[[Any], str | Text]
    right: bool = True


def number_text(value: float | None) -> str:
    """A number with thousands separators; a dash if unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:,.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def age_text(seconds: float | None) -> str:
    """A duration with its two largest units; a dash if unknown."""
    if seconds is None:
        return UNKNOWN
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{seconds:.0f} s"
    whole = int(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} m {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} m"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def _bytes_text(value: int | None) -> str:
    return UNKNOWN if value is None else size_text(value)


def _disk_text(row: BrokerRow) -> Text:
    if row.disk_used is None:
        return Text(UNKNOWN)
    style = "red" if row.disk_used >= DISK_FULL else "yellow" if row.disk_used >= DISK_WARN else ""
    return Text(f"{row.disk_used:.0%}", style=style)


def _lag_text(row: GroupRow) -> Text:
    seconds = row.lag_seconds
    style = "" if seconds is None or seconds < LAG_WARN_S else "yellow"
    return Text(age_text(seconds), style="red" if seconds and seconds >= LAG_LONG_S else style)


def _sync_text(row: BrokerRow) -> Text:
    if row.id == 0:
        return Text("")
    if row.in_sync is None:
        return Text(UNKNOWN)
    return Text("yes", style="green") if row.in_sync else Text("no", style="red")


def _broker_columns(now_ms: int) -> tuple[ScreenColumn, ...]:
    def up_text(row: BrokerRow) -> str:
        return age_text(None if row.started_ms is None else (now_ms - row.started_ms) / 1000)

    return (
        ScreenColumn("BROKER", "name", lambda row: row.name, right=False),
        ScreenColumn("ID", "id", lambda row: str(row.id)),
        ScreenColumn("ADDRESS", "address", lambda row: row.address, right=False),
        ScreenColumn("ROLE", "role", _role_text, right=False),
        ScreenColumn("IN/s", "in_per_second", lambda row: number_text(row.in_per_second)),
        ScreenColumn("OUT/s", "out_per_second", lambda row: number_text(row.out_per_second)),
        ScreenColumn("LOG", "log_bytes", lambda row: _bytes_text(row.log_bytes)),
        ScreenColumn("DISK", "disk_used", _disk_text),
        ScreenColumn("MEMORY", "memory_bytes", lambda row: _bytes_text(row.memory_bytes)),
        ScreenColumn("BEHIND", "behind_bytes", lambda row: _behind_text(row)),
        ScreenColumn("IN SYNC", "in_sync", _sync_text, right=False),
        ScreenColumn("UP", "started_ms", up_text),
    )


def _role_text(row: BrokerRow) -> Text:
    if row.problem is not None and row.role is None:
        return Text("no answer", style="red")
    return Text(row.role or UNKNOWN)


def _behind_text(row: BrokerRow) -> str:
    return "" if row.id == 0 else _bytes_text(row.behind_bytes)


_TOPIC_COLUMNS = (
    ScreenColumn("TOPIC", "name", lambda row: row.name, right=False),
    ScreenColumn("IN/s", "in_per_second", lambda row: number_text(row.in_per_second)),
    ScreenColumn("OUT/s", "out_per_second", lambda row: number_text(row.out_per_second)),
    ScreenColumn("STORED", "next_offsets", lambda row: number_text(row.next_offsets)),
    ScreenColumn("GROUPS", "groups", lambda row: number_text(row.groups)),
)
_GROUP_COLUMNS = (
    ScreenColumn("GROUP", "name", lambda row: row.name, right=False),
    ScreenColumn("LAG", "lag", lambda row: number_text(row.lag)),
    ScreenColumn("OLDEST", "lag_seconds", _lag_text),
    ScreenColumn("OUT/s", "out_per_second", lambda row: number_text(row.out_per_second)),
    ScreenColumn("TOPICS", "topics", lambda row: number_text(row.topics)),
)


def screen(snapshot: ScreenSnapshot, state: ScreenState, height: int | None) -> RenderableType:
    """The whole screen, at most `height` lines; None: all rows, for `--once`."""
    tables: dict[str, tuple[Sequence[ScreenColumn], Sequence[BrokerRow | TopicRow | GroupRow]]] = {
        "brokers": (_broker_columns(snapshot.time_ms), snapshot.brokers),
        "topics": (_TOPIC_COLUMNS, snapshot.topics),
        "groups": (_GROUP_COLUMNS, snapshot.groups),
    }
    shown = list(tables) if state.view == "all" else [state.view]
    notes = snapshot.notes if height is None else snapshot.notes[:3]
    rooms = _rooms({name: len(tables[name][1]) for name in shown}, height, len(notes))
    parts: list[RenderableType] = [_head(snapshot, state)]
    for name in shown:
        columns, rows = tables[name]
        parts.append("")
        ordered = sorted_rows(rows, state.sort_of(name), reverse=state.reverse)
        if state.view != "all" and rooms[name] is not None:
            state.scroll = min(state.scroll, max(len(ordered) - rooms[name], 0))
            ordered = ordered[state.scroll :]
        parts.append(_table(name, columns, ordered, rooms[name], state, total=len(rows)))
    parts += [
        Text(f"! {note}", style="yellow", no_wrap=True, overflow="ellipsis") for note in notes
    ]
    if height is not None:
        parts.append(Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _rooms(rows: dict[str, int], height: int | None, notes: int) -> dict[str, Any]:
    """How many rows of each table fit; the largest tables share what the others leave."""
    if height is None:
        return dict.fromkeys(rows)
    left = height - 2 - notes - 3 * len(rows)  # head, keys; blank, title and heads of a table
    rooms: dict[str, Any] = {}
    for count, name in sorted((count, name) for name, count in rows.items()):
        share = max(left // (len(rows) - len(rooms)), 1)
        rooms[name] = min(count, share)
        left -= rooms[name]
    return rooms


def _head(snapshot: ScreenSnapshot, state: ScreenState) -> Text:
    clusters = sorted({row.cluster for row in snapshot.brokers})
    time = datetime.fromtimestamp(snapshot.time_ms / 1000).strftime("%H:%M:%S")
    masters = [row for row in snapshot.brokers if row.id == 0]
    words = [
        ", ".join(clusters) or "no brokers",
        f"NameServer {'; '.join(snapshot.nameservers)}",
        f"in {_total(row.in_per_second for row in masters)}/s",
        f"out {_total(row.out_per_second for row in masters)}/s",
        time + (" paused" if state.paused else ""),
    ]
    return Text("  ".join(words), style="bold", no_wrap=True, overflow="ellipsis")


def _total(values: Any) -> str:
    """The sum; with a + if some are unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    if not known:
        return UNKNOWN
    return number_text(sum(known)) + ("+" if len(known) < len(found) else "")


def _table(
    name: str,
    columns: Sequence[ScreenColumn],
    rows: Sequence[Any],
    room: int | None,
    state: ScreenState,
    *,
    total: int,
) -> Table:
    visible = rows if room is None else rows[:room]
    more = f" ({len(visible):,} of {total:,})" if len(visible) < total else ""
    table = Table(
        title=f"{name.capitalize()}{more}",
        title_justify="left",
        title_style="bold cyan",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    sort = state.sort_of(name)
    for column in columns:
        arrow = (
            ("▲" if (sort == "name") is not state.reverse else "▼") if column.name == sort else ""
        )
        table.add_column(
            column.head + arrow, justify="right" if column.right else "left", no_wrap=True
        )
    for row in visible:
        table.add_row(*(column.text(row) for column in columns))
    return table
