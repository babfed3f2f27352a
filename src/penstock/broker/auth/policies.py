"""The rules of an access list and the decision they lead to. Pure.

A rule says what a subject may do with a resource: `Topic:orders`, `Topic:or*`, `Topic:*` or `*`.
Of the rules that fit a request (resource, action, source address) one decides:

1. Custom rules come first; Default rules count only where no Custom rule fits.
2. The most specific resource wins: a kind before `*`; a name before a prefix before `Topic:*`; a
   longer prefix before a shorter one.
3. Between equals, Deny wins. (Apache RocketMQ 5.4.0 does it so; up to 5.3.3 Allow won there.)

Where no rule fits, the answer is no.
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
        """The member of this name in any case."""
        wanted = (name or "").lower()
        return next((member for member in cls if member.value.lower() == wanted), None)


class Kind(_Named):
    """Kinds of resources. Nothing asks for a namespace: names carry theirs (`space%topic`)."""

    UNKNOWN = "Unknown"
    ANY = "Any"
    CLUSTER = "Cluster"
    NAMESPACE = "Namespace"
    TOPIC = "Topic"
    GROUP = "Group"


class Action(_Named):
    """What is done to a resource. A rule may hold All; only a need may hold Any."""

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


class Decision(_Named):
    """What a rule says."""

    ALLOW = "Allow"
    DENY = "Deny"


class PolicyType(_Named):
    """Which rules are asked first."""

    CUSTOM = "Custom"
    DEFAULT = "Default"


class Need(NamedTuple):
    """What a request takes: one of the actions on the resource.

    No name means all of the kind: only `Topic:*` and `*` cover it. The kind ANY means: some right
    to one of the actions, on whatever resource.
    """

    kind: Kind
    name: str | None
    actions: tuple[Action, ...]

    def resource(self) -> str:
        if self.kind is Kind.ANY:
            return "*"
        return f"{self.kind}:{self.name or '*'}"

    def action(self) -> str:
        return "|".join(self.actions)


@dataclass(frozen=True, slots=True)
class Resource:
    """What a rule is about; `name` is None for all of the kind."""

    kind: Kind
    name: str | None = None
    prefix: bool = False

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """The resource of a text such as `Topic:or*`; None if it is none."""
        if not text or not text.strip():
            return None
        if text == "*":
            return cls(Kind.ANY)
        kind = Kind.named(text.partition(":")[0])
        if kind is None:
            return None
        name = text.partition(":")[2]
        if name == "*":
            return cls(kind)
        if name.endswith("*"):
            return cls(kind, name.partition("*")[0], prefix=True)
        return cls(kind, name)

    def __str__(self) -> str:
        if self.kind is Kind.ANY:
            return "*"
        return f"{self.kind}:{self.name or ''}{'*' if self.prefix or self.name is None else ''}"

    def covers(self, kind: Kind, name: str | None) -> bool:
        if self.kind is not kind:
            return self.kind is Kind.ANY
        if self.kind is Kind.ANY or self.name is None:
            return True
        if self.prefix:
            return name is not None and name.startswith(self.name)
        return name == self.name

    def rank(self) -> tuple[bool, int, int]:
        """How specific: higher wins."""
        form = 0 if self.name is None else 1 if self.prefix else 2
        return self.kind is not Kind.ANY, form, len(self.name or "") if self.prefix else 0


@dataclass(frozen=True)
class Rule:
    """One line of an access list."""

    resource: Resource
    actions: tuple[Action, ...]
    decision: Decision
    sources: tuple[str, ...] | None = None  # addresses and networks; None: from anywhere

    def fits(self, need: Need, source: Address | None) -> bool:
        return (
            self.resource.covers(need.kind, need.name)
            and self.has_action(need.actions)
            and self.has_source(source)
        )

    def has_action(self, wanted: Sequence[Action]) -> bool:
        if Action.ALL in self.actions or Action.ANY in wanted:
            return True
        return any(action in self.actions for action in wanted)

    def has_source(self, source: Address | None) -> bool:
        if not self.sources:
            return True
        if source is None:  # where the address is not known, only what denies holds
            return self.decision is Decision.DENY
        return any(source in network for network in self._networks)

    @cached_property
    def _networks(self) -> tuple[Network, ...]:
        return tuple(network for text in self.sources or () if (network := network_of(text)))


Rules: TypeAlias = dict[PolicyType, list[Rule]]


def decide(rules: Rules, need: Need, source: Address | None) -> Rule | None:
    """The rule that decides; None if no rule fits."""
    for kind in PolicyType:
        fitting = _fitting(rules.get(kind, ()), need, source)
        if fitting:
            return max(fitting, key=lambda r: (r.resource.rank(), r.decision is Decision.DENY))
    return None


def _fitting(rules: Iterable[Rule], need: Need, source: Address | None) -> list[Rule]:
    if need.kind is not Kind.ANY:
        return [rule for rule in rules if rule.fits(need, source)]
    return [
        rule
        for rule in rules
        if rule.decision is Decision.ALLOW
        and rule.has_action(need.actions)
        and rule.has_source(source)
    ]


def network_of(text: str) -> Network | None:
    """The network of `10.1.2.3`, `10.0.0.0/8` or their IPv6 likes; None if it is none."""
    address, slash, bits = text.partition("/")
    if slash and not (bits.isascii() and bits.isdigit()):
        return None
    try:
        return ip_network(f"{address}/{bits}" if slash else address, strict=False)
    except ValueError:
        return None


def address_of(peer: str) -> Address | None:
    """The address of a peer, which is `host:port`; None if it has none."""
    host = peer.rpartition(":")[0].strip("[]")
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
