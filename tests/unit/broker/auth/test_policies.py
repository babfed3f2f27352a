"""Policies: which rule decides."""

from __future__ import annotations

import pytest

from penstock.broker.auth.policies import (
    Action,
    PolicyDecision,
    PolicyType,
    RequiredRight,
    Resource,
    ResourceType,
    address_of,
    decide,
    network_of,
)

from .access_kit import rule

PUB = RequiredRight(ResourceType.TOPIC, "orders", (Action.PUB,))
HERE = address_of("10.1.2.3:5000")


def decision(
    *rules: tuple[str, ...], need: RequiredRight = PUB, default: tuple[str, ...] = ()
) -> str:
    """The decision of Custom rules and a Default rule; `none` if no rule matches."""
    policies = {PolicyType.CUSTOM: [rule(*parts) for parts in rules]}
    if default:
        policies[PolicyType.DEFAULT] = [rule(*default)]
    found = decide(policies, need, HERE)
    return found.decision.value if found else "none"


ALLOW, DENY = "Allow", "Deny"


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ([], "none"),
        ([("Topic:orders", "Sub", ALLOW)], "none"),
        ([("Topic:other", "Pub", ALLOW)], "none"),
        ([("Group:orders", "Pub", ALLOW)], "none"),
        ([("Topic:orders", "All", ALLOW)], ALLOW),
        ([("Topic:orders", "Pub", DENY), ("Topic:*", "All", ALLOW)], DENY),
        ([("Topic:orders", "Pub", ALLOW), ("Topic:ord*", "All", DENY)], ALLOW),
        ([("Topic:ord*", "Pub", ALLOW), ("Topic:orde*", "All", DENY)], DENY),
        ([("Topic:*", "Pub", ALLOW), ("Topic:o*", "All", DENY)], DENY),
        ([("*", "Pub", ALLOW), ("Topic:*", "All", DENY)], DENY),
        ([("*", "Pub", DENY), ("Topic:*", "All", ALLOW)], ALLOW),
        # A more specific rule about something else does not count.
        ([("Topic:orders", "Sub", DENY), ("*", "Pub", ALLOW)], ALLOW),
    ],
)
def test_the_most_specific_matching_rule_decides(rules: list[tuple[str, ...]], wanted: str) -> None:
    assert decision(*rules) == wanted
    assert decision(*reversed(rules)) == wanted


@pytest.mark.parametrize("resource", ["Topic:orders", "Topic:or*", "Topic:*", "*"])
def test_between_equals_deny_wins_in_any_order(resource: str) -> None:
    rules = [(resource, "Pub", ALLOW), (resource, "All", DENY)]
    assert decision(*rules) == decision(*reversed(rules)) == DENY


def test_default_rules_apply_only_without_a_matching_custom_rule() -> None:
    assert decision(("*", "Pub", ALLOW), default=("Topic:orders", "All", DENY)) == ALLOW
    assert decision(("*", "Sub", ALLOW), default=("Topic:orders", "All", DENY)) == DENY


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("10.1.2.3", True),
        ("10.1.2.4", False),
        ("10.0.0.0/8", True),
        ("10.1.2.9/24", True),
        ("11.0.0.0/8", False),
        ("0.0.0.0/0", True),
        ("::/0", False),
    ],
)
def test_a_rule_may_have_source_addresses(source: str, fits: bool) -> None:
    assert decision(("Topic:orders", "Pub", ALLOW, source)) == (ALLOW if fits else "none")


def test_ipv6_sources_match_by_value() -> None:
    rules = {PolicyType.CUSTOM: [rule("*", "All", ALLOW, "fe80::/10", "::1")]}
    for peer, fits in (("[fe80::1]:5", True), ("0:0:0:0:0:0:0:1:5", True), ("[ff02::1]:5", False)):
        assert (decide(rules, PUB, address_of(peer)) is not None) == fits, peer
    assert address_of("[::ffff:10.1.2.3]:7") == HERE


def test_an_unknown_source_is_never_allowed_by_address() -> None:
    policies = {PolicyType.CUSTOM: [rule("*", "All", ALLOW, "0.0.0.0/0")]}
    assert decide(policies, PUB, None) is None
    policies = {
        PolicyType.CUSTOM: [rule("*", "All", ALLOW), rule("Topic:*", "All", DENY, "1.1.1.1")]
    }
    found = decide(policies, PUB, None)
    assert found is not None
    assert found.decision is PolicyDecision.DENY


def test_a_right_on_all_resources_needs_a_rule_for_all() -> None:
    need = RequiredRight(ResourceType.TOPIC, None, (Action.LIST, Action.GET))
    assert decision(("Topic:o*", "All", ALLOW), need=need) == "none"
    assert decision(("Topic:*", "Get", ALLOW), need=need) == ALLOW
    assert decision(("*", "List", ALLOW), need=need) == ALLOW


def test_any_right_on_any_resource() -> None:
    need = RequiredRight(ResourceType.ANY, None, (Action.ANY,))
    assert decision(("Group:g", "Sub", ALLOW), ("*", "All", DENY), need=need) == ALLOW
    assert decision(("*", "All", DENY), need=need) == "none"
    need = RequiredRight(ResourceType.ANY, None, (Action.PUB,))
    assert decision(("Group:g", "Sub", ALLOW), need=need) == "none"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("*", "*"),
        ("topic:a", "Topic:a"),
        ("Topic:a*", "Topic:a*"),
        ("GROUP:*", "Group:*"),
        ("Topic:ns%a:b", "Topic:ns%a:b"),
        ("Topic:a*b*", "Topic:a*"),
        ("Foo:a", "None"),
        ("", "None"),
        (" ", "None"),
    ],
)
def test_resources_are_parsed_as_by_apache(text: str, shown: str) -> None:
    assert str(Resource.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "1.2.3", "1.2.3.4/33", "::/129", "1.2.3.4/255.0.0.0", "a/8"])
def test_invalid_networks_are_rejected(text: str) -> None:
    assert network_of(text) is None
