"""The rules of access lists, and how they decide.

A rule says what a subject may do with a resource: `Topic:orders`, `Topic:or*`, `Topic:*` or `*`.
Of the rules that match a request (resource, action, source address) one decides:

1. Custom rules take precedence; Default rules apply only if no Custom rule matches.
2. The most specific resource wins: a type before `*`; a name before a prefix before `Topic:*`; a
   longer prefix before a shorter one.
3. Between equals, Deny wins, as in Apache RocketMQ 5.4.0 (up to 5.3.3, Allow won).

If no rule matches, the request is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple, Self, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network


class _Named(StrEnum):
    @classmethod
    def named(cls, name: str | None) -> Self | None:
        """The member with this name, ignoring case."""
        wanted = (name or "").lower()
        return next((member for member in cls if member.value.lower() == wanted), None)


class ResourceType(_Named):
    """Types of resources. No right requires a namespace: it is part of names (`space%topic`)."""

    UNKNOWN = "Unknown"
    ANY = "Any"
    CLUSTER = "Cluster"
    NAMESPACE = "Namespace"
    TOPIC = "Topic"
    GROUP = "Group"


class Action(_Named):
    """Actions on a resource. All is only for rules, Any only for required rights."""

    UNKNOWN = "Unknown"
    ALL = "All"
    ANY = "Any"
    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


class PolicyDecision(_Named):
    """The decision of a rule."""

    ALLOW = "Allow"
    DENY = "Deny"


class PolicyType(_Named):
    """Types of policies, in order of precedence."""

    CUSTOM = "Custom"
    DEFAULT = "Default"


class RequiredRight(NamedTuple):
    """A right that a request requires: one of the actions on a resource.

    Without a name it is required on all resources of the type: only `Topic:*` and `*` cover it. The
    type ANY requires one of the actions on any resource. With `unless_denied` the right needs no
    rule, but a rule for this type of resource may deny it.
    """

    resource_type: ResourceType
    name: str | None
    actions: tuple[Action, ...]
    unless_denied: bool = False

    def resource(self) -> str:
        if self.resource_type is ResourceType.ANY:
            return "*"
        return f"{self.resource_type}:{self.name or '*'}"

    def action(self) -> str:
        return "|".join(self.actions)


@dataclass(frozen=True, slots=True)
class Resource:
    """The resource of a rule; `name` is None for all resources of the type."""

    resource_type: ResourceType
    name: str | None = None
    prefix: bool = False

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """Parse a text such as `Topic:or*`; None if it is not valid."""
        if not text or not text.strip():
            return None
        if text == "*":
            return cls(ResourceType.ANY)
        resource_type = ResourceType.named(text.partition(":")[0])
        if resource_type is None:
            return None
        name = text.partition(":")[2]
        if name == "*":
            return cls(resource_type)
        if name.endswith("*"):
            return cls(resource_type, name.partition("*")[0], prefix=True)
        return cls(resource_type, name)

    def __str__(self) -> str:
        if self.resource_type is ResourceType.ANY:
            return "*"
        wildcard = "*" if self.prefix or self.name is None else ""
        return f"{self.resource_type}:{self.name or ''}{wildcard}"

    def covers(self, resource_type: ResourceType, name: str | None) -> bool:
        if self.resource_type is not resource_type:
            return self.resource_type is ResourceType.ANY
        if self.resource_type is ResourceType.ANY or self.name is None:
            return True
        if self.prefix:
            return name is not None and name.startswith(self.name)
        return name == self.name

    def rank(self) -> tuple[bool, int, int]:
        """How specific the resource is; the highest rank wins."""
        form = 0 if self.name is None else 1 if self.prefix else 2
        return (
            self.resource_type is not ResourceType.ANY,
            form,
            len(self.name or "") if self.prefix else 0,
        )


@dataclass(frozen=True)
class Rule:
    """One entry of an access list."""

    resource: Resource
    actions: tuple[Action, ...]
    decision: PolicyDecision
    sources: tuple[str, ...] | None = None  # addresses and networks; None: any

    def matches(self, right: RequiredRight, source: Address | None) -> bool:
        return (
            self.resource.covers(right.resource_type, right.name)
            and self.has_action(right.actions)
            and self.has_source(source)
        )

    def has_action(self, wanted: Sequence[Action]) -> bool:
        if Action.ALL in self.actions or Action.ANY in wanted:
            return True
        return any(action in self.actions for action in wanted)

    def has_source(self, source: Address | None) -> bool:
        if not self.sources:
            return True
        if source is None:  # an unknown address matches only rules that deny
            return self.decision is PolicyDecision.DENY
        return any(source in network for network in self._networks)

    @cached_property
    def _networks(self) -> tuple[Network, ...]:
        return tuple(network for text in self.sources or () if (network := network_of(text)))


Rules: TypeAlias = dict[PolicyType, list[Rule]]


def decide(rules: Rules, right: RequiredRight, source: Address | None) -> Rule | None:
    """The rule that decides; None if no rule matches."""
    for policy_type in PolicyType:
        matching = _matching(rules.get(policy_type, ()), right, source)
        if matching:
            return max(
                matching, key=lambda r: (r.resource.rank(), r.decision is PolicyDecision.DENY)
            )
    return None


def _matching(rules: Iterable[Rule], right: RequiredRight, source: Address | None) -> list[Rule]:
    if right.resource_type is not ResourceType.ANY:
        return [rule for rule in rules if rule.matches(right, source)]
    return [
        rule
        for rule in rules
        if rule.decision is PolicyDecision.ALLOW
        and rule.has_action(right.actions)
        and rule.has_source(source)
    ]


def network_of(text: str) -> Network | None:
    """Parse `10.1.2.3`, `10.0.0.0/8` or the IPv6 equivalent; None if it is not valid."""
    address, slash, bits = text.partition("/")
    if slash and not (bits.isascii() and bits.isdigit()):
        return None
    try:
        return ip_network(f"{address}/{bits}" if slash else address, strict=False)
    except ValueError:
        return None


def address_of(peer: str) -> Address | None:
    """The address in a peer's `host:port`; None if the host is not an address."""
    host = peer.rpartition(":")[0].strip("[]")
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
