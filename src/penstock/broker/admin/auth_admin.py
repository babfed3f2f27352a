"""Administration of users and access lists: AUTH_CREATE_USER … AUTH_LIST_ACL.

Responses are Apache's: a refusal is NO_PERMISSION with the reason; a user or list that does not
exist is a success without a body. Two rules are stricter: only a super user sees the password of a
super user, and the last super user can't be removed or disabled while access control is on.
"""

import logging
from collections.abc import Iterator

from penstock.broker.auth.policies import PolicyType, Resource
from penstock.broker.auth.users import (
    ENABLED,
    NORMAL,
    SUPER,
    User,
    acl_of,
    apply_user_info,
    check_count,
    check_password,
    check_user_name,
    merge_rules,
    parse_user_status,
    parse_user_type,
    remove_rule,
    rules_of,
    subject_user,
)
from penstock.broker.context import BrokerContext
from penstock.errors import InvalidParameter, NoPermission
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import AclInfo, PolicyInfo, UserInfo
from penstock.wire.codes import RequestCode
from penstock.wire.signing import ACCESS_KEY

audit = logging.getLogger("penstock.audit")

BODY_BYTES_MAX = 1024 * 1024
"""Maximum size of a request: a user or an access list."""


class AuthAdmin:
    """Handles the requests for users and access lists."""

    def __init__(self, context: BrokerContext) -> None:
        self._access = context.access
        self._table = context.access.table
        self._persistence = context.persistence

    def rows(self) -> Iterator[Row]:
        code = RequestCode
        yield Row(code.AUTH_CREATE_USER, self.create_user)
        yield Row(code.AUTH_UPDATE_USER, self.update_user)
        yield Row(code.AUTH_DELETE_USER, self.delete_user)
        yield Row(code.AUTH_GET_USER, self.get_user)
        yield Row(code.AUTH_LIST_USER, self.list_users)
        yield Row(code.AUTH_CREATE_ACL, self.put_acl)
        yield Row(code.AUTH_UPDATE_ACL, self.put_acl)
        yield Row(code.AUTH_DELETE_ACL, self.delete_acl)
        yield Row(code.AUTH_GET_ACL, self.get_acl)
        yield Row(code.AUTH_LIST_ACL, self.list_acls)

    def create_user(self, command: Command) -> Answer:
        """Body: UserInfo; the name is in the header."""
        name = _username(command)
        check_user_name(name)
        info = command.body_as(UserInfo, bytes_max=BODY_BYTES_MAX)
        type = parse_user_type(info.user_type) or NORMAL
        if type == SUPER:
            self._require_super(command, name)
        if not (info.password or "").strip():
            raise NoPermission(f"the user {name} has no password", hint="set a password")
        check_password(info.password or "")
        if name in self._table.users:
            raise NoPermission(f"the user {name} already exists", hint="change it with updateUser")
        user = User.of(
            name, info.password or "", type, parse_user_status(info.user_status) or ENABLED
        )
        self._table.put_user(user, command.now_ms)
        return self._done(command, f"created user {name} ({user.type}, {user.status})")

    def update_user(self, command: Command) -> Answer:
        """Body: UserInfo with the changes."""
        name = _username(command)
        info = command.body_as(UserInfo, bytes_max=BODY_BYTES_MAX)
        old = self._user(name)
        if old.is_super or parse_user_type(info.user_type) == SUPER:
            self._require_super(command, name)
        user = apply_user_info(old, info)
        if not (user.is_super and user.is_enabled):
            self._keep_last_super(name)
        self._table.put_user(user, command.now_ms)
        return self._done(command, f"changed user {name} ({user.type}, {user.status})")

    def delete_user(self, command: Command) -> Answer:
        """Delete a user and its rules."""
        name = command.text_or("username")
        if not name.strip():
            raise NoPermission("the username is blank")
        user = self._table.users.get(name)
        if user is None:
            return Reply()
        if user.is_super:
            self._require_super(command, name)
            self._keep_last_super(name)
        self._table.remove_user(name, command.now_ms)
        return self._done(command, f"deleted user {name}")

    def get_user(self, command: Command) -> Answer:
        user = self._table.users.get(_username(command))
        return Reply(body=fastjson.encode(user.info())) if user else Reply()

    def list_users(self, command: Command) -> Answer:
        """Users whose name contains `filter`."""
        wanted = command.text_or("filter").strip()
        users = list(self._table.users.values())

        def work() -> bytes:
            infos = [user.info() for user in users if wanted in user.name]
            infos.sort(key=lambda info: info.username or "")
            return fastjson.encode(infos) if infos else b""

        return InThread(work, lambda data: Reply(body=data))

    def put_acl(self, command: Command) -> Answer:
        """Body: AclInfo; its rules are added, or replace those for the same resource. Create and
        update are the same."""
        acl = command.body_as(AclInfo, bytes_max=BODY_BYTES_MAX)
        if not acl.policies:
            raise InvalidParameter("the access list has no policies", hint="add at least one rule")
        name = subject_user(acl.subject)
        if name is None:
            name = self._subject(command)
        check_count(acl)
        rules = rules_of(acl)
        if name not in self._table.users:
            raise NoPermission(f"the subject User:{name} does not exist", hint="create the user")
        old = self._table.rules.get(name)
        self._table.put_rules(
            name, rules if old is None else merge_rules(old, rules), command.now_ms
        )
        text = "; ".join(
            f"{rule.decision} {','.join(rule.actions)} on {rule.resource}"
            + (f" from {','.join(rule.sources)}" if rule.sources else "")
            for some in rules.values()
            for rule in some
        )
        return self._done(command, f"set rules of User:{name}: {text}")

    def delete_acl(self, command: Command) -> Answer:
        """Delete the rule for `resource` in the policy type (default Custom), or all rules."""
        name = self._subject(command)
        self._user(name)
        rules = self._table.rules.get(name)
        if rules is None:
            raise NoPermission(f"User:{name} has no access list")
        kind = PolicyType.named(command.ext.get("policyType")) or PolicyType.CUSTOM
        text = command.text_or("resource")
        resource = Resource.parse(text)
        if resource is None:
            if text.strip():
                raise NoPermission(f"{text!r} is not a resource", hint="nothing was deleted")
            self._table.remove_rules(name, command.now_ms)
            return self._done(command, f"deleted all rules of User:{name}")
        remaining = remove_rule(rules, kind, resource)
        if remaining:
            self._table.put_rules(name, remaining, command.now_ms)
        else:
            self._table.remove_rules(name, command.now_ms)
        return self._done(command, f"deleted the {kind} rule of User:{name} for {resource}")

    def get_acl(self, command: Command) -> Answer:
        name = self._subject(command)
        self._user(name)
        rules = self._table.rules.get(name)
        return Reply(body=fastjson.encode(acl_of(name, rules))) if rules else Reply()

    def list_acls(self, command: Command) -> Answer:
        """Lists whose subject contains `subjectFilter`, with the rules whose resource contains
        `resourceFilter`."""
        subject_part = command.text_or("subjectFilter").strip()
        resource_part = command.text_or("resourceFilter").strip()
        rules = dict(self._table.rules)  # the rules of a user are replaced as a whole

        def work() -> bytes:
            found = []
            for name in sorted(rules):
                acl = acl_of(name, rules[name])
                if subject_part in (acl.subject or ""):
                    acl = _filter_entries(acl, resource_part)
                    if acl.policies:
                        found.append(acl)
            return fastjson.encode(found) if found else b""

        return InThread(work, lambda data: Reply(body=data))

    def _done(self, command: Command, what: str) -> Answer:
        subject = command.text_or(ACCESS_KEY)
        audit.info(
            "%s %s",
            ascii(f"User:{subject}")[1:-1] if subject else "an anonymous user",
            ascii(what)[1:-1],
        )
        return InThread(self._persistence.save(self._table), lambda _: Reply())

    def _user(self, name: str) -> User:
        user = self._table.users.get(name)
        if user is None:
            raise NoPermission(f"the user {name} does not exist", hint="create it with createUser")
        return user

    def _subject(self, command: Command) -> str:
        subject = command.text_or("subject")
        name = subject_user(subject)
        if name is None:
            raise NoPermission(f"{subject!r} is not a subject", hint="use User:<name>")
        return name

    def _is_super(self, command: Command) -> bool:
        """Whether the client may administer super users; without access control every one may."""
        name = command.text_or(ACCESS_KEY)
        if not name:
            return not self._access.enabled()
        user = self._table.users.get(name)
        return user is not None and user.is_super

    def _require_super(self, command: Command, name: str) -> None:
        if not self._is_super(command):
            raise NoPermission(
                f"{name} is a super user: only a super user may create, change or delete one"
            )

    def _keep_last_super(self, name: str) -> None:
        others = (user for user in self._table.users.values() if user.name != name)
        user = self._table.users[name]
        if not (user.is_super and user.is_enabled and self._access.enabled()):
            return
        if not any(other.is_super and other.is_enabled for other in others):
            raise NoPermission(
                f"{name} is the last super user, so it can't be removed or disabled",
                hint="create another super user first",
            )


def _username(command: Command) -> str:
    name = command.text_or("username")
    if not name.strip():
        raise InvalidParameter("the username is blank", hint="set the header field username")
    return name


def _filter_entries(acl: AclInfo, part: str) -> AclInfo:
    """The list with only the rules whose resource contains `part`."""
    policies = []
    for policy in acl.policies or []:
        entries = [entry for entry in policy.entries or [] if part in (entry.resource or "")]
        if entries:
            policies.append(PolicyInfo(policy_type=policy.policy_type, entries=entries))
    return AclInfo(subject=acl.subject, policies=policies)
