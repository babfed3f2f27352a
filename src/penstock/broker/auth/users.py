"""Users and their access lists: the table, its file, and the checks of its content.

The file format is Penstock's own. Apache keeps users in two RocksDB databases, which Penstock does
not read; mqadmin's copyUser and copyAcl copy them. Passwords are encrypted (`password_key`); in
format 1 they were not. Only its owner can read the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Final, Self

from penstock.broker.auth.password_key import PasswordKey
from penstock.broker.auth.policies import (
    Action,
    PolicyDecision,
    PolicyType,
    Resource,
    ResourceType,
    Rule,
    Rules,
    network_of,
)
from penstock.errors import BodyError, InvalidParameter, NoPermission
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion
from penstock.wire.bodies.cluster_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from penstock.wire.signing import text_bytes

USERS_MAX: Final = 10_000
"""Maximum number of users."""
USER_NAME_MAX: Final = 255
"""Maximum length of a user name in characters."""
PASSWORD_BYTES_MAX: Final = 1024
"""Maximum length of a password in UTF-8."""
USER_RULES_MAX: Final = 1_000
"""Maximum number of rules of one user, where each source address counts as one more: a request of
its user is compared with all of them."""
RULES_MAX: Final = 100_000
"""Maximum number of rules of all users."""

SUPER: Final = "Super"
NORMAL: Final = "Normal"
ENABLED: Final = "enable"
DISABLED: Final = "disable"

_TYPES: Final = {name.lower(): name for name in (SUPER, NORMAL)}
_STATUSES: Final = {name.lower(): name for name in (ENABLED, DISABLED)}
_FORMAT: Final = 2
_PLAIN_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class User:
    """A user, who signs requests."""

    name: str
    password: str = field(repr=False)
    type: str = NORMAL
    status: str = ENABLED
    secret: bytes = field(default=b"", repr=False)  # bytes of the password

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
        """The user in the form of the protocol, without the password: it never leaves the broker.

        A mask instead would become the password of a copy (mqadmin copyUser).
        """
        return UserInfo(username=self.name, user_type=self.type, user_status=self.status)


class StoredUser(Body):
    """A user in the file."""

    username: str | None = None
    password: str | None = None  # only in format 1
    encrypted_password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


class AccessFile(Body):
    """Content of config/penstock-access.json."""

    format: int = _FORMAT
    data_version: DataVersion = DataVersion()
    users: list[StoredUser] = []
    acls: list[AclInfo] = []


class AccessTable:
    """Users by name, and rules by user."""

    FILE: ClassVar[str] = "config/penstock-access.json"
    PRIVATE: ClassVar[bool] = True  # only the owner can read the file

    def __init__(self, key: PasswordKey | None = None) -> None:
        self.key = key or PasswordKey()
        self.version = DataVersion()
        self.dirty = False
        self._users: dict[str, User] = {}
        self._rules: dict[str, Rules] = {}
        # Texts in the file. A user takes 30 µs and a list of 1,000 rules 15 ms, and a snapshot of
        # all of them is taken in the event loop.
        self._user_texts: dict[User, fastjson.RawJson] = {}
        self._rule_texts: dict[str, fastjson.RawJson] = {}
        self._rule_counts: dict[str, int] = {}
        self.users: Mapping[str, User] = MappingProxyType(self._users)
        self.rules: Mapping[str, Rules] = MappingProxyType(self._rules)

    def load(self, file: ConfigFile) -> bool:
        """Load the file; False if it does not exist. The table is dirty if the file has passwords
        in plain text."""
        content = file.load(self.parse)
        if content is None:
            return False
        self._install(content)
        self.dirty = content.format == _PLAIN_FORMAT
        return True

    def _install(self, content: AccessFile) -> None:
        self.version = content.data_version
        for info in content.users:
            user = User.of(
                info.username or "",
                self._password_of(info),
                parse_user_type(info.user_type) or NORMAL,
                parse_user_status(info.user_status) or ENABLED,
            )
            self._users[user.name] = user
        for acl in content.acls:
            self._set_rules(_user_of(acl.subject), rules_of(acl))

    def snapshot(self) -> bytes:
        """The content of the file; clears `dirty`."""
        self.dirty = False
        return fastjson.encode_pretty(
            {
                "acls": [self._rule_texts[name] for name in sorted(self._rules)],
                "dataVersion": self.version,
                "format": _FORMAT,
                "users": [self._user_text(self._users[name]) for name in sorted(self._users)],
            }
        )

    def put_user(self, user: User, now_ms: int) -> None:
        """Add or replace a user; raises InvalidParameter if there are too many."""
        if user.name not in self._users:
            _check("users", len(self._users) + 1, USERS_MAX)
        self._forget(user.name)
        self._users[user.name] = user
        self._changed(now_ms)

    def remove_user(self, name: str, now_ms: int) -> None:
        """Remove a user and its rules."""
        self._forget(name)
        self._users.pop(name, None)
        self._drop_rules(name)
        self._changed(now_ms)

    def put_rules(self, name: str, rules: Rules, now_ms: int) -> None:
        """Set all rules of a user; raises InvalidParameter if there are too many."""
        count = count_rules(rules)
        _check(f"rules of User:{name}", count, USER_RULES_MAX)
        others = sum(self._rule_counts.values()) - self._rule_counts.get(name, 0)
        _check("rules of all users", count + others, RULES_MAX)
        self._set_rules(name, rules)
        self._changed(now_ms)

    def export(self) -> AccessFile:
        """All users with their passwords in plain text, and all rules; only for `sealed_table`."""
        return AccessFile(
            format=_PLAIN_FORMAT,
            data_version=self.version,
            users=[
                StoredUser(
                    username=user.name,
                    password=user.password,
                    user_type=user.type,
                    user_status=user.status,
                )
                for user in self._users.values()
            ],
            acls=[acl_of(name, rules) for name, rules in self._rules.items()],
        )

    def replace(self, content: AccessFile) -> None:
        """Take over the table of another broker, version included."""
        for table in (self._users, self._rules, self._rule_texts, self._rule_counts):
            table.clear()
        self._user_texts.clear()
        self._install(content)
        self.dirty = True

    def remove_rules(self, name: str, now_ms: int) -> None:
        """Remove all rules of a user."""
        self._drop_rules(name)
        self._changed(now_ms)

    def _set_rules(self, name: str, rules: Rules) -> None:
        self._rules[name] = rules
        self._rule_texts[name] = fastjson.RawJson(fastjson.encode(acl_of(name, rules)).decode())
        self._rule_counts[name] = count_rules(rules)

    def _drop_rules(self, name: str) -> None:
        for table in (self._rules, self._rule_texts, self._rule_counts):
            table.pop(name, None)

    def _changed(self, now_ms: int) -> None:
        self.dirty = True
        self.version = self.version.next(now_ms)

    def _forget(self, name: str) -> None:
        user = self._users.get(name)
        if user is not None:
            self._user_texts.pop(user, None)

    def _user_text(self, user: User) -> fastjson.RawJson:
        text = self._user_texts.get(user)
        if text is None:
            stored = StoredUser(
                username=user.name,
                encrypted_password=self.key.encrypt(user.name, user.password),
                user_type=user.type,
                user_status=user.status,
            )
            text = fastjson.RawJson(fastjson.encode(stored).decode())
            self._user_texts[user] = text
        return text

    def _password_of(self, stored: StoredUser) -> str:
        if stored.encrypted_password:
            return self.key.decrypt(stored.username or "", stored.encrypted_password)
        return stored.password or ""

    def parse(self, data: bytes) -> AccessFile:
        """The content of a file or of `export`; raises BodyError if it is not valid."""
        content = fastjson.decode(data, AccessFile)
        if content.format not in (_PLAIN_FORMAT, _FORMAT):
            raise BodyError(f"the format is {content.format}, but this release reads {_FORMAT}")
        if not all(user.username and self._password_of(user) for user in content.users):
            raise BodyError("a user has no name or no password")
        try:
            for acl in content.acls:
                _user_of(acl.subject)
                rules_of(acl)
        except NoPermission as error:
            raise BodyError(error.message) from None
        return content


def merge_rules(old: Rules, new: Rules) -> Rules:
    """The old and the new rules; a new rule replaces an old one for the same resource."""
    result = {kind: list(rules) for kind, rules in old.items()}
    for kind, rules in new.items():
        if kind not in result:
            result[kind] = list(rules)
            continue
        entries = result[kind]
        places: dict[Resource, int] = {}
        for at, rule in enumerate(entries):
            places.setdefault(rule.resource, at)
        for rule in rules:
            at = places.setdefault(rule.resource, len(entries))
            if at == len(entries):
                entries.append(rule)
            else:
                entries[at] = rule
    return result


def count_rules(rules: Rules) -> int:
    """The number of rules; each source address counts as one more."""
    return sum(1 + len(rule.sources or ()) for entries in rules.values() for rule in entries)


def check_count(acl: AclInfo) -> None:
    """Raise InvalidParameter for a list that has too many rules for one user."""
    count = sum(
        1 + len(entry.source_ips or ())
        for policy in acl.policies or ()
        for entry in policy.entries or ()
    )
    _check(f"rules of {acl.subject}", count, USER_RULES_MAX)


def _check(what: str, figure: int, limit: int) -> None:
    if figure > limit:
        raise InvalidParameter.over(
            f"too many {what}",
            figure=figure,
            limit=limit,
            unit="of them",
            hint="use prefixes such as Topic:or*" if "rules" in what else None,
        )


def remove_rule(rules: Rules, kind: PolicyType, resource: Resource) -> Rules:
    """The rules without the one for this resource."""
    result = {other: list(entries) for other, entries in rules.items()}
    entries = result.get(kind, [])
    at = _index(entries, resource)
    if at is not None:
        del entries[at]
        if not entries:
            del result[kind]
    return result


def apply_user_info(user: User, info: UserInfo) -> User:
    """The user with the changes of a request."""
    if info.password and info.password.strip():
        check_password(info.password)
        user = replace(user, password=info.password, secret=text_bytes(info.password))
    return replace(
        user,
        type=parse_user_type(info.user_type) or user.type,
        status=parse_user_status(info.user_status) or user.status,
    )


def check_password(password: str) -> None:
    """Refuse a password that is too long."""
    length = len(password.encode(errors="replace"))
    if length > PASSWORD_BYTES_MAX:
        raise InvalidParameter.over(
            "the password is too long", figure=length, limit=PASSWORD_BYTES_MAX, unit="bytes"
        )


def check_user_name(name: str) -> None:
    """Refuse a name that is too long or has characters that can't be printed."""
    if len(name) > USER_NAME_MAX:
        raise InvalidParameter.over(
            "the username is too long", figure=len(name), limit=USER_NAME_MAX, unit="characters"
        )
    if not name.isprintable():
        raise InvalidParameter(
            f"the username {name!r} contains characters that can't be printed",
            hint="choose another name",
        )


def parse_user_type(name: str | None) -> str | None:
    """The user type with this name, in any case of letters."""
    return _TYPES.get((name or "").lower())


def parse_user_status(name: str | None) -> str | None:
    """The user status with this name, in any case of letters."""
    return _STATUSES.get((name or "").lower())


def acl_of(name: str, rules: Rules) -> AclInfo:
    """The rules in the form of the protocol."""
    policies = [
        PolicyInfo(policy_type=kind.value, entries=[_entry(rule) for rule in entries])
        for kind, entries in rules.items()
    ]
    return AclInfo(subject=f"User:{name}", policies=policies)


def rules_of(acl: AclInfo) -> Rules:
    """The rules of an access list of the protocol; raises NoPermission if it is not valid.

    Rules of two policies of one type are appended.
    """
    rules: Rules = {}
    for policy in acl.policies or []:
        if policy.entries:
            kind = PolicyType.named(policy.policy_type) or PolicyType.CUSTOM
            rules.setdefault(kind, []).extend(_rule(entry) for entry in policy.entries)
    if not rules:
        raise NoPermission("the access list has no policies", hint="add at least one rule")
    return rules


def subject_user(subject: str | None) -> str | None:
    """The user of a subject such as `User:alice`; None for anything else."""
    kind, colon, name = (subject or "").partition(":")
    return name if colon and kind.lower() == "user" else None


def _user_of(subject: str | None) -> str:
    name = subject_user(subject)
    if name is None:
        raise BodyError(f"the subject {subject!r} is not valid: it must be User:<name>")
    return name


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
        types = (ResourceType.CLUSTER, ResourceType.TOPIC, ResourceType.GROUP)
        names = ", ".join(f"{one}:<name>" for one in types)
        raise _invalid("resource", entry.resource, f"use *, {names} or a prefix such as Topic:or*")
    actions = tuple(filter(None, map(Action.named, entry.actions or [])))
    if not actions:
        raise _invalid(
            "actions", entry.actions, "All, Pub, Sub, Create, Update, Delete, Get or List"
        )
    if Action.ANY in actions:
        raise _invalid("actions", entry.actions, "Any is not for rules; use All")
    for source in entry.source_ips or []:
        if network_of(source) is None:
            raise _invalid("source ip", source, "use an address or a network such as 10.0.0.0/8")
    decision = PolicyDecision.named(entry.decision)
    if decision is None:
        raise _invalid("decision", entry.decision, "use Allow or Deny")
    return Rule(resource, actions, decision, tuple(entry.source_ips or ()) or None)


def _invalid(what: str, value: object, rule: str) -> NoPermission:
    return NoPermission(f"the {what} {value!r} of a rule is not valid", hint=rule)
