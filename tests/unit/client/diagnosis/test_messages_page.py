"""docs/messages.md lists every verdict, every fact and every field of its evidence."""

import re
from pathlib import Path

import pytest

from penstock.client.diagnosis.group.group_decision import decide_group
from penstock.client.diagnosis.message_decision import decide_message
from penstock.client.diagnosis.traces import Delivery
from penstock.client.diagnosis.values import Fact, FactKind, GroupVerdict, Verdict
from tests.unit.client.diagnosis import test_message_decision
from tests.unit.client.diagnosis.evidence_kit import NOW, place
from tests.unit.client.diagnosis.group import test_group_decision

PAGE = (Path(__file__).parents[4] / "docs" / "messages.md").read_text()
PLACE = set(place().json())


def section(heading: str) -> str:
    """The text below a heading."""
    return PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]


def test_every_verdict_is_listed() -> None:
    for heading, verdicts in (
        ("Why was it not consumed?", Verdict),
        ("Is a group healthy?", GroupVerdict),
    ):
        rows = re.findall(r"^\| `(\w+)` \|", section(heading), re.MULTILINE)
        fields = {"verdict", "text", "command", "facts", "message", "partial"}
        assert set(rows) - fields == {verdict.value for verdict in verdicts}


def facts(column: int) -> list[Fact]:
    if column == 1:
        kit = test_group_decision
        return [f for case in kit.CASES for f in decide_group(kit.evidence(**case[1])).facts]
    traced = {"deliveries": (Delivery("billing", NOW, "10.0.0.9", 0, True),)}
    cases = [case[1] for case in test_message_decision.CASES]
    evidence = test_message_decision.evidence
    return [f for case in (*cases, traced) for f in decide_message(evidence(**case)).facts]


@pytest.mark.parametrize("column", [0, 1], ids=["message", "group"])
def test_every_field_of_the_evidence_is_listed(column: int) -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|$", section("Evidence in JSON"), re.MULTILINE)
    listed = {kind: set(re.findall(r"`(\w+)`", cells[column])) for kind, *cells in rows}
    assert set(listed) == {kind.value for kind in FactKind}
    for cells in rows:
        if "place" in cells[column + 1].lower():
            listed[cells[0]] |= PLACE
    used: dict[str, set[str]] = {kind: set() for kind in listed}
    for fact in facts(column):
        used[fact.kind.value] |= set(fact.evidence)
    for kind, names in used.items():
        assert names == listed[kind], kind
