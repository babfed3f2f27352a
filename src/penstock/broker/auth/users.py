"""Users and their access lists: the table, its file, and what may be put into it.

The file is ours (Apache keeps two RocksDB databases, which we do not read; mqadmin's copyUser and
copyAcl bring them over). It holds passwords as they are: HMAC needs the key itself, a hash would
not do. Therefore it is readable by its owner alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Final, Self

from penstock.broker.auth.policies import (
    Action,
    Decision,
    Kind,
    PolicyType,
    Resource,
    Rule,
    Rules,
    network_of,
)
from penstock.errors import BodyError, NoPermission
from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion
from penstock.wire.bodies.cluster_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from penstock.wire.signing import text_bytes

SUPER: Final = "Super"
NORMAL: Final = "Normal"
ENABLED: Final = "enable"
DISABLED: Final = "disable"

_TYPES: Final = {name.lower(): name for name in (SUPER, NORMAL)}
_STATUSES: Final = {name.lower(): name for name in (ENABLED, DISABLED)}
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class User:
    """Who signs requests."""

    name: str
    password: str
    type: str = NORMAL
    status: str = ENABLED
    secret: bytes = b""  # of the password, made once

    @classmethod
    def of(cls, name: str, password: str, type: str = NORMAL, status: str = ENABLED) -> Self:
        return cls(name, password, type, status, text_bytes(password))

    @property
    def is_super(self) -> bool:
        return self.type == SUPER

    @property
    def is_enabled(self) -> bool:
        return self.status != DISABLED

    def info(self) -> UserInfo:
        return UserInfo(
            username=self.name,
            password=self.password,
            user_type=self.type,
            user_status=self.status,
        )


class AccessFile(Body):
    """The content of the file."""

    format: int = _FORMAT
    data_version: DataVersion = DataVersion()
    users: list[UserInfo] = []
    acls: list[AclInfo] = []


class AccessTable:
    """The users by name and the rules by user."""

    FILE: ClassVar[str] = "config/penstock-access.json"
    PRIVATE: ClassVar[bool] = True  # readable by its owner alone

    def __init__(self) -> None:
        self.version = DataVersion()
        self.dirty = False
        self._users: dict[str, User] = {}
        self._rules: dict[str, Rules] = {}
        self.users: Mapping[str, User] = MappingProxyType(self._users)
        self.rules: Mapping[str, Rules] = MappingProxyType(self._rules)

    def load(self, file: ConfigFile) -> bool:
        """Take over what the file holds; False if there is none yet."""
        content = file.load(_parse)
        if content is None:
            return False
        self.version = content.data_version
        for info in content.users:
            user = User.of(
                info.username or "",
                info.password or "",
                type_of(info.user_type) or NORMAL,
                status_of(info.user_status) or ENABLED,
            )
            self._users[user.name] = user
        for acl in content.acls:
            self._rules[_user_of(acl.subject)] = rules_of(acl)
        self.dirty = False
        return True

    def snapshot(self) -> bytes:
        """The whole file; the table counts as clean from here on."""
        content = AccessFile(
            data_version=self.version,
            users=[self._users[name].info() for name in sorted(self._users)],
            acls=[acl_of(name, self._rules[name]) for name in sorted(self._rules)],
        )
        self.dirty = False
        return fastjson.encode_pretty(content)

    def put_user(self, user: User, now_ms: int) -> None:
        """Add a user, or put it in the place of the one with its name."""
        self._users[user.name] = user
        self._changed(now_ms)

    def remove_user(self, name: str, now_ms: int) -> None:
        """Forget a user and its rules."""
        self._users.pop(name, None)
        self._rules.pop(name, None)
        self._changed(now_ms)

    def put_rules(self, name: str, rules: Rules, now_ms: int) -> None:
        """Set all rules of a user."""
        self._rules[name] = rules
        self._changed(now_ms)

    def remove_rules(self, name: str, now_ms: int) -> None:
        """Forget all rules of a user."""
        self._rules.pop(name, None)
        self._changed(now_ms)

    def _changed(self, now_ms: int) -> None:
        self.dirty = True
        self.version = self.version.next(now_ms)


def merged(old: Rules, new: Rules) -> Rules:
    """The old rules with the new ones: one for the same resource takes the old one's place."""
    result = {kind: list(rules) for kind, rules in old.items()}
    for kind, rules in new.items():
        if kind not in result:
            result[kind] = list(rules)
            continue
        kept = result[kind]
        for rule in rules:
            at = _index(kept, rule.resource)
            if at is None:
                kept.append(rule)
            else:
                kept[at] = rule
    return result


def without(rules: Rules, kind: PolicyType, resource: Resource) -> Rules:
    """The rules without the one for this resource."""
    result = {other: list(kept) for other, kept in rules.items()}
    kept = result.get(kind, [])
    at = _index(kept, resource)
    if at is not None:
        del kept[at]
        if not kept:
            del result[kind]
    return result


def changed(user: User, info: UserInfo) -> User:
    """The user with whatever the request sets."""
    if info.password and info.password.strip():
        user = replace(user, password=info.password, secret=text_bytes(info.password))
    return replace(
        user,
        type=type_of(info.user_type) or user.type,
        status=status_of(info.user_status) or user.status,
    )


def type_of(name: str | None) -> str | None:
    """The type of user of this name in any case."""
    return _TYPES.get((name or "").lower())


def status_of(name: str | None) -> str | None:
    """The status of this name in any case."""
    return _STATUSES.get((name or "").lower())


def acl_of(name: str, rules: Rules) -> AclInfo:
    """Rules in the form of the wire."""
    policies = [
        PolicyInfo(policy_type=kind.value, entries=[_entry(rule) for rule in kept])
        for kind, kept in rules.items()
    ]
    return AclInfo(subject=f"User:{name}", policies=policies)


def rules_of(acl: AclInfo) -> Rules:
    """The rules of an access list as it came over the wire; NoPermission names what is wrong.

    Two policies of one type are one: rules of the second come after those of the first.
    """
    rules: Rules = {}
    for policy in acl.policies or []:
        if policy.entries:
            kind = PolicyType.named(policy.policy_type) or PolicyType.CUSTOM
            rules.setdefault(kind, []).extend(_rule(entry) for entry in policy.entries)
    if not rules:
        raise NoPermission("the access list has no policies", hint="give at least one rule")
    return rules


def subject_user(subject: str | None) -> str | None:
    """The user of a subject such as `User:alice`; None for anything else."""
    kind, colon, name = (subject or "").partition(":")
    return name if colon and kind.lower() == "user" else None


def _user_of(subject: str | None) -> str:
    name = subject_user(subject)
    if name is None:
        raise BodyError(f"{subject!r} is no subject: it is User:<name>")
    return name


def _parse(data: bytes) -> AccessFile:
    content = fastjson.decode(data, AccessFile)
    if content.format != _FORMAT:
        raise BodyError(f"format {content.format}, this release reads {_FORMAT}")
    if not all(user.username and user.password for user in content.users):
        raise BodyError("a user has no name or no password")
    try:
        for acl in content.acls:
            _user_of(acl.subject)
            rules_of(acl)
    except NoPermission as error:
        raise BodyError(error.message) from None
    return content


def _index(rules: list[Rule], resource: Resource) -> int | None:
    return next((at for at, rule in enumerate(rules) if rule.resource == resource), None)


def _entry(rule: Rule) -> PolicyEntryInfo:
    return PolicyEntryInfo(
        resource=str(rule.resource),
        actions=list(rule.actions),
        source_ips=list(rule.sources) if rule.sources else None,
        decision=rule.decision.value,
    )


def _rule(entry: PolicyEntryInfo) -> Rule:
    resource = Resource.parse(entry.resource)
    if resource is None:
        kinds = ", ".join(f"{kind}:<name>" for kind in (Kind.CLUSTER, Kind.TOPIC, Kind.GROUP))
        raise _wrong("resource", entry.resource, f"it is * or one of {kinds}, with * at the end")
    actions = tuple(filter(None, map(Action.named, entry.actions or [])))
    if not actions:
        raise _wrong("actions", entry.actions, "All, Pub, Sub, Create, Update, Delete, Get or List")
    if Action.ANY in actions:
        raise _wrong("actions", entry.actions, "a rule can't be about Any; All stands for each")
    for source in entry.source_ips or []:
        if network_of(source) is None:
            raise _wrong("source ip", source, "it is an address or a network such as 10.0.0.0/8")
    decision = Decision.named(entry.decision)
    if decision is None:
        raise _wrong("decision", entry.decision, "it is Allow or Deny")
    return Rule(resource, actions, decision, tuple(entry.source_ips or ()) or None)


def _wrong(what: str, value: object, rule: str) -> NoPermission:
    return NoPermission(f"the {what} of a rule can't be {value!r}", hint=rule)
