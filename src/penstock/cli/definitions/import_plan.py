"""What an import changes: the definitions of a file compared with those of a cluster.

Settings belong to a broker. A broker of the cluster that the file names gets what the file says of
it. Other brokers get the settings of the first broker that the file has for a topic or group. So a
file fits the cluster that it came from, and also one with other brokers.

An import never deletes anything: what the file lacks stays as it is.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from penstock.cli.schemas.definitions_output import (
    FORMAT,
    VERSION,
    DefinedRule,
    DefinedUser,
    Definitions,
)
from penstock.cli.schemas.group_output import GroupOnBroker
from penstock.cli.schemas.topic_output import TopicOnBroker
from penstock.client.admin.admin_topics import ORDER_NAMESPACE
from penstock.errors import BadSetting
from penstock.wire.bodies.cluster_bodies import UserInfo

Change = Literal["create", "change", "unchanged", "skip"]
Kind = Literal["topic", "group", "user", "rule", "kv", "offset"]
S = TypeVar("S", TopicOnBroker, GroupOnBroker)

NAMESERVERS = "nameservers"
PASSWORD_BYTES = 18


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One definition, what is to be done with it, and the value to set."""

    kind: Kind
    name: str
    where: str
    change: Change
    details: str = ""
    value: object = None
    removed: tuple[str, ...] = ()
    """The attributes of a topic that the file lacks."""

    @property
    def is_change(self) -> bool:
        return self.change in ("create", "change")


@dataclass(frozen=True, slots=True)
class Present:
    """What the cluster has now."""

    brokers: Sequence[str]
    """The names of the masters."""
    topics: Mapping[str, Mapping[str, TopicOnBroker]]
    groups: Mapping[str, Mapping[str, GroupOnBroker]]
    users: Mapping[str, Mapping[str, UserInfo]] = field(default_factory=dict)
    """By address of the broker, which need not be a master, and name."""
    rules: Mapping[str, Sequence[DefinedRule]] = field(default_factory=dict)
    kv: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read_definitions(data: bytes, source: str) -> Definitions:
    """The definitions in a file; raises BadSetting."""
    try:
        head = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise BadSetting(f"{source} is not valid JSON: {error}", hint="export it again") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise BadSetting(
            f"{source} is not a file of definitions", hint="penstock export writes such files"
        )
    if head.get("version") != VERSION:
        raise BadSetting(
            f"{source} has the version {head.get('version')} of the format, not {VERSION}",
            hint="export it with this version of Penstock, or use a newer one",
        )
    try:
        return msgspec.convert(head, Definitions)
    except msgspec.ValidationError as error:
        raise BadSetting(f"{source} is not valid: {error}", hint="export it again") from None


def plan_import(wanted: Definitions, now: Present, *, new_passwords: bool = False) -> list[Item]:
    """All items, in the order in which they are applied."""
    items: list[Item] = []
    for topic in wanted.topics:
        chosen = settings_for(topic.brokers, wanted.brokers, now.brokers)
        items += _plan_settings("topic", topic.topic, chosen, now.topics.get(topic.topic, {}))
    for group in wanted.groups:
        chosen_group = settings_for(group.brokers, wanted.brokers, now.brokers)
        items += _plan_settings("group", group.group, chosen_group, now.groups.get(group.group, {}))
    items += _plan_users(wanted.users, now, new_passwords=new_passwords)
    unknown = {item.name for item in items if item.kind == "user" and item.change == "skip"}
    for address, rules in now.rules.items():
        items += _plan_rules(wanted.rules, address, rules, unknown)
    for namespace, table in wanted.kv.items():
        if namespace != ORDER_NAMESPACE:  # creating ordered topics sets it, with the right brokers
            items += _plan_kv(namespace, table, now.kv.get(namespace, {}))
    return items


def settings_for(
    defined: Mapping[str, S], named: Sequence[str], brokers: Sequence[str]
) -> dict[str, S]:
    """The settings for each broker of the cluster; `named` are the brokers that the file knows."""
    first = next(iter(defined.values()), None)
    chosen = {}
    for broker in brokers:
        settings = defined.get(broker) if broker in named else first
        if settings is not None:
            chosen[broker] = settings
    return chosen


def _plan_settings(
    kind: Literal["topic", "group"], name: str, wanted: Mapping[str, S], now: Mapping[str, S]
) -> Iterator[Item]:
    if not wanted:
        yield Item(kind, name, "-", "skip", "the file has it only on brokers that are not here")
    for broker, settings in wanted.items():
        old = now.get(broker)
        changed = _differences(old, settings)
        if old is not None and not changed:
            yield Item(kind, name, broker, "unchanged")
        else:
            change: Change = "create" if old is None else "change"
            gone = () if old is None else tuple(set(old.attributes) - set(settings.attributes))
            yield Item(kind, name, broker, change, ", ".join(changed), settings, gone)


def _differences(old: S | None, new: S) -> list[str]:
    """The settings that differ, as text; all of a new definition that matter."""
    found = []
    for name in new.__struct_fields__:
        after = getattr(new, name)
        before = None if old is None else getattr(old, name)
        if name == "type" or (isinstance(new, GroupOnBroker) and name == "attributes"):
            continue  # the type is one of the attributes; those of groups can't be set
        if old is None:
            if name in ("read_queues", "write_queues", "perm", "retries_max") or after is True:
                found.append(f"{name} {_text(after)}")
        elif before != after:
            found.append(f"{name} {_text(before)} → {_text(after)}")
    return found


def _plan_users(
    wanted: Sequence[DefinedUser], now: Present, *, new_passwords: bool
) -> Iterator[Item]:
    made = {user.user: secrets.token_urlsafe(PASSWORD_BYTES) for user in wanted}
    for address, present in now.users.items():
        for user in wanted:
            old = present.get(user.user)
            shown = f"{user.type}, {user.status}"
            if old is None:
                password = user.password or (made[user.user] if new_passwords else None)
                info = _user_info(user, password)
                change: Change = "skip" if password is None else "create"
                why = "the file has no password; add --new-passwords" if password is None else shown
                yield Item("user", user.user, address, change, why, info)
            elif (old.user_type, old.user_status) == (user.type, user.status):
                yield Item("user", user.user, address, "unchanged")
            else:
                text = f"{old.user_type}, {old.user_status} → {shown}"
                yield Item("user", user.user, address, "change", text, _user_info(user, None))


def _user_info(user: DefinedUser, password: str | None) -> UserInfo:
    return UserInfo(
        username=user.user, password=password, user_type=user.type, user_status=user.status
    )


def _plan_rules(
    wanted: Sequence[DefinedRule], address: str, now: Sequence[DefinedRule], unknown: set[str]
) -> Iterator[Item]:
    present = {_rule_name(rule): rule for rule in now}
    for rule in wanted:
        old = present.get(_rule_name(rule))
        name = f"{rule.user} {rule.resource}"
        text = f"{rule.decision} {','.join(rule.actions)}"
        if rule.user in unknown:
            yield Item("rule", name, address, "skip", "the user is skipped")
        elif old is not None and _rule_value(old) == _rule_value(rule):
            yield Item("rule", name, address, "unchanged")
        else:
            yield Item("rule", name, address, "create" if old is None else "change", text, rule)


def _plan_kv(namespace: str, wanted: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Item]:
    for key, value in wanted.items():
        name = f"{namespace}/{key}"
        if now.get(key) == value:
            yield Item("kv", name, NAMESERVERS, "unchanged")
        else:
            change: Change = "change" if key in now else "create"
            yield Item("kv", name, NAMESERVERS, change, value[:60], value)


def _rule_name(rule: DefinedRule) -> tuple[str, str, str]:
    return rule.user, rule.policy.lower(), rule.resource.lower()


def _rule_value(rule: DefinedRule) -> tuple[object, ...]:
    actions = sorted(action.lower() for action in rule.actions)
    return actions, sorted(rule.sources), rule.decision.lower()


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in sorted(value.items())) or "none"
    return str(value)
