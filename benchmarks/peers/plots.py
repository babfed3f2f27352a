"""The plots of docs/benchmarks.md as SVG: panels of bars, and panels of percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from benchmarks.peers.results import Spread

WIDTH = 880
COLUMNS = 2
NAME_WIDTH = 150
LABEL_WIDTH = 76
ROW = 22
HEAD = 34
GAP = 18
MARGIN = 16
# Readable on a light and on a dark page: the plot has its own background.
STYLE = """
    .back { fill: #ffffff } .ink { fill: #1f2d3d } .soft { fill: #5d6f82 }
    .own { fill: #2266aa } .peer { fill: #a9b8c8 } .line { stroke: #1f2d3d; stroke-width: 1.2 }
    .grid { stroke: #dde4ec; stroke-width: 1 } .bold { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #12181f } .ink { fill: #e6edf3 } .soft { fill: #9fb0c0 }
      .own { fill: #5aa9f0 } .peer { fill: #54677a } .line { stroke: #e6edf3 }
      .grid { stroke: #2a3541 }
    }
"""


@dataclass(frozen=True)
class Bar:
    """A peer's value in a panel; Penstock's own is emphasized."""

    name: str
    value: Spread
    label: str
    own: bool


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Range:
    """A peer's percentiles in a panel."""

    name: str
    p50_ms: float
    p99_ms: float
    label: str
    own: bool


@dataclass(frozen=True)
class RangePanel:
    title: str
    ranges: Sequence[Range]


def bars(title: str, panels: Sequence[Panel]) -> str:
    """Horizontal bars of the medians, with a line from the lowest to the highest round."""
    rows = max((len(panel.bars) for panel in panels), default=0)
    width, height = _panel_width(), HEAD + rows * ROW + GAP
    parts = []
    for number, panel in enumerate(panels):
        x, y = _corner(number, width, height)
        parts.append(_text(x, y + 16, panel.title, "ink bold"))
        room = width - NAME_WIDTH - LABEL_WIDTH
        scale = room / max(bar.value.high for bar in panel.bars)
        for row, bar in enumerate(panel.bars):
            parts.append(_bar(bar, x, y + HEAD - 8 + row * ROW, scale))
    return _document(title, math.ceil(len(panels) / COLUMNS) * height, parts)


def _bar(bar: Bar, x: float, y: float, scale: float) -> str:
    left, middle = x + NAME_WIDTH, y + ROW / 2
    kind = "own" if bar.own else "peer"
    end = left + bar.value.high * scale
    return "\n".join((
        _text(x, middle + 4, bar.name, "ink" if bar.own else "soft"),
        f'  <rect class="{kind}" x="{left:.1f}" y="{y + 4:.1f}" '
        f'width="{max(bar.value.median * scale, 1):.1f}" height="{ROW - 8}" rx="2"/>',
        _line(left + bar.value.low * scale, middle, end, middle, "line"),
        _text(end + 6, middle + 4, bar.label, "ink"),
    ))  # fmt: skip


def ranges(title: str, panels: Sequence[RangePanel]) -> str:
    """Lines from p50 to p99 on one logarithmic axis of milliseconds."""
    found = [one for panel in panels for one in panel.ranges]
    lowest = min((one.p50_ms for one in found), default=1.0)
    highest = max((one.p99_ms for one in found), default=10.0)
    low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    height = HEAD + max((len(panel.ranges) for panel in panels), default=0) * ROW + 2 * GAP
    parts = []
    left, room = MARGIN + NAME_WIDTH, WIDTH - 2 * MARGIN - NAME_WIDTH - 2 * LABEL_WIDTH

    def place(ms: float) -> float:
        return left + (math.log10(ms) - low) / max(high - low, 1) * room

    for number, panel in enumerate(panels):
        y = MARGIN + HEAD + number * height
        parts.append(_text(MARGIN, y + 16, panel.title, "ink bold"))
        bottom = y + HEAD + len(panel.ranges) * ROW
        for power in range(low, high + 1):
            at = place(10.0**power)
            parts.append(_line(at, y + HEAD - 8, at, bottom, "grid"))
            parts.append(_text(at, bottom + 14, f"{10.0**power:g} ms", "soft", "middle"))
        parts.extend(
            _range(one, y + HEAD - 8 + row * ROW, place(one.p50_ms), place(one.p99_ms))
            for row, one in enumerate(panel.ranges)
        )
    return _document(title, len(panels) * height, parts)


def _range(one: Range, y: float, start: float, end: float) -> str:
    middle = y + ROW / 2
    kind = "own" if one.own else "peer"
    dots = (
        f'  <circle class="{kind}" cx="{at:.1f}" cy="{middle:.1f}" r="5"/>' for at in (start, end)
    )
    return "\n".join((
        _text(MARGIN, middle + 4, one.name, "ink" if one.own else "soft"),
        _line(start, middle, end, middle, "line"),
        *dots,
        _text(end + 10, middle + 4, one.label, "ink"),
    ))  # fmt: skip


def _panel_width() -> float:
    return (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS


def _corner(number: int, width: float, height: float) -> tuple[float, float]:
    row, column = divmod(number, COLUMNS)
    return MARGIN + column * (width + GAP), MARGIN + HEAD + row * height


def _document(title: str, body: float, parts: Sequence[str]) -> str:
    height = math.ceil(body + 2 * MARGIN + HEAD)
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" '
        f"aria-label={quoteattr(title)}>",
        f"  <style>{STYLE}  </style>",
        f'  <rect class="back" width="{WIDTH}" height="{height}"/>',
        f'  <text class="ink bold" x="{MARGIN}" y="{MARGIN + 14}" font-size="15">'
        f"{escape(title)}</text>",
        *parts,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'  <text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'  <line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
