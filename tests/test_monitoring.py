"""The Grafana board and the alert rules in deploy/monitoring use metrics that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy" / "monitoring"
BOARD = FOLDER / "grafana-board.json"
RULES = FOLDER / "prometheus-rules.yaml"
PAGE = ROOT / "docs" / "metrics.md"

_NAME = re.compile(r"\b(?:rocketmq|penstock|process)_[a-z0-9_]+\b")
_ROW = re.compile(r"^\| (`.*?) \| (counter|gauge|histogram) \|([^|]*)\|", re.MULTILINE)
_COMMON = {"cluster", "node_type", "node_id", "le"}


def documented() -> dict[str, set[str]]:
    """All metrics and series on the page, with their labels."""
    found = {}
    for names, kind, labels in _ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([a-z0-9_]+)`", names):
            series = [name]
            if kind == "histogram":
                series = [f"{name}_bucket", f"{name}_sum", f"{name}_count"]
            for one in series:
                found[one] = {*re.findall(r"\w+", labels), *_COMMON}
    return found


def board_expressions() -> Iterator[str]:
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]


@pytest.mark.parametrize("expressions", [board_expressions, rule_expressions])
def test_every_metric_and_label_is_documented(expressions: Any) -> None:
    known = documented()
    assert len(known) > 80
    seen = 0
    for expression in expressions():
        names = _NAME.findall(expression)
        assert names, expression
        for name in names:
            seen += 1
            assert name in known, f"docs/metrics.md has no {name}: {expression}"
        labels = {
            label
            for selector in re.findall(r"{([^}]*)}", expression)
            for label in re.findall(r"(\w+)\s*[=!]~?", selector)
        }
        labels |= {
            label.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", expression)
            for label in group.split(",")
        }
        allowed = set.union(*(known[name] for name in names))
        assert labels <= allowed, f"{labels - allowed} in {expression}"
    assert seen > 15


def test_parentheses_are_balanced() -> None:
    for expression in (*board_expressions(), *rule_expressions()):
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_rates_are_of_counters_and_histograms() -> None:
    counters = re.findall(r"`([a-z0-9_]+)`[^|]*\| counter", PAGE.read_text())
    for expression in (*board_expressions(), *rule_expressions()):
        for name in re.findall(r"(?:rate|increase)\(([a-z0-9_]+)", expression):
            assert name in counters or name.endswith("_bucket"), expression


def test_the_panels_of_the_board_do_not_overlap() -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")


def test_every_alert_has_a_severity_and_says_what_it_means() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")
