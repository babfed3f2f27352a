"""Chains of facts as JSON."""

from collections.abc import Iterable

from penstock.client.diagnosis.values import Fact


def facts_json(facts: Iterable[Fact]) -> list[dict[str, object]]:
    """Each fact with its subject, its status and its sentence."""
    return [
        {"kind": fact.kind.value, "status": fact.status.value, "text": fact.text} for fact in facts
    ]
