"""Access control: authentication and authorization of requests.

1. The user of the field AccessKey must have signed the request with its password and be enabled.
2. A super user may do everything.
3. For other users the access list decides about each right that the request requires
   (`request_rights`, `policies`).

Both `authentication` and `authorization` require signatures; only the latter checks access lists.
A refusal is NO_PERMISSION and one line of the logger `penstock.audit` with subject, action,
resource, source and request. Changes by administrators are logged there too.

Cost: a signature takes a few microseconds. Allowed combinations are cached until the table changes.
"""

import logging
from typing import Final, NamedTuple

from penstock.broker.auth.policies import Action, PolicyDecision, RequiredRight, address_of, decide
from penstock.broker.auth.request_rights import (
    CodeRights,
    RequestRights,
    right_on_topic,
)
from penstock.broker.auth.users import SUPER, AccessTable, User
from penstock.config import LiveSettings
from penstock.errors import NoPermission, PenstockError
from penstock.rpc.answers import EffectQueue, PersistSoon, Reply
from penstock.rpc.command import Command
from penstock.rpc.signatures import is_request_signed
from penstock.wire.codes import request_name
from penstock.wire.signing import ACCESS_KEY, STRICT_SIGNATURE, TIME_TOLERANCE_MS

audit = logging.getLogger("penstock.audit")
log = logging.getLogger("penstock.access")

CACHE_MAX: Final = 100_000
"""Allowed combinations of user, source and right in the cache; names come from clients."""
_ANONYMOUS: Final = User.of("", "")
_PRINTED_CHARACTERS_MAX: Final = 128


class Credentials(NamedTuple):
    """The keys that sign requests."""

    access_key: str
    secret_key: str


class AccessControl:
    """Checks the requests of clients."""

    def __init__(self, settings: LiveSettings, table: AccessTable, effects: EffectQueue) -> None:
        access = settings.current.access
        self.table = table
        self._effects = effects
        self._rights = RequestRights(settings.current.broker.cluster)
        self._authorization = access.authorization
        self._enabled = access.authentication or access.authorization
        self._strict = access.strict_signing
        self._initial = credentials_of(access.initial_user)
        self._internal = credentials_of(access.internal_user)
        self._allowed: set[tuple[str, str, RequiredRight]] = set()
        self._allowed_version = table.version

    def enabled(self) -> bool:
        """Whether requests are checked."""
        return self._enabled

    def internal(self) -> Credentials | None:
        """The credentials of this server's own requests; None if they are not signed."""
        return self._internal

    def seed(self, now_ms: int) -> None:
        """Create the users of the settings that the loaded table does not have."""
        for credentials in (self._initial, self._internal):
            if credentials is not None and credentials.access_key not in self.table.users:
                self.table.put_user(User.of(*credentials, SUPER), now_ms)
                self._effects.put(PersistSoon(self.table))
        if self._enabled and not any(user.is_super for user in self.table.users.values()):
            log.warning(
                "access control is on, but there is no super user to administer this server; "
                "set access.initial_user"
            )

    def check(self, command: Command) -> Reply | None:
        """None if the request is allowed, else the refusal (NO_PERMISSION), which is logged."""
        if not self._enabled:
            return None
        rights = self._rights.of(command.code)
        source = command.peer.rpartition(":")[0]
        name = command.ext.get(ACCESS_KEY, "")
        user = self.table.users.get(name, _ANONYMOUS)
        signed = is_request_signed(command, user.secret, strict=self._strict)
        if user is _ANONYMOUS or not signed or not user.is_enabled:
            return self._refuse_user(command, rights, user, signed)
        command.user = name
        if self._authorization and not user.is_super:
            refusal = self._check_rights(command, rights, user)
            if refusal is not None:
                return refusal
        if rights.is_admin_change:
            self._audit(command, rights, name, source)
        return None

    def check_read(self, command: Command, topic: str) -> Reply | None:
        """Like `check`, for reading a topic that only the handler knows."""
        return self.check_topic(command, topic, Action.SUB)

    def check_write(self, command: Command, topic: str) -> Reply | None:
        """Like `check_read`, for writing."""
        return self.check_topic(command, topic, Action.PUB)

    def check_topic(self, command: Command, topic: str, *actions: Action) -> Reply | None:
        """Like `check`, for one of the actions on a topic that only the handler knows."""
        user = self.table.users.get(command.user, _ANONYMOUS)
        if not self._authorization or user.is_super:
            return None
        return self._refusal(command, [right_on_topic(topic, *actions)], user)

    def may_publish(self, name: str, peer: str, topic: str) -> bool:
        """Whether a user at this address may send to a topic; without access control anybody may.

        A refusal is not logged.
        """
        if not self._enabled:
            return True
        user = self.table.users.get(name, _ANONYMOUS)
        if user is _ANONYMOUS or not user.is_enabled:
            return False
        if user.is_super or not self._authorization:
            return True
        return self._why_refused(right_on_topic(topic, Action.PUB), user, peer) is None

    def _check_rights(self, command: Command, rights: CodeRights, user: User) -> Reply | None:
        try:
            required = rights.required(command)
        except PenstockError as error:
            right = rights.general
            return _refuse(command, user.name, right, f"its body can't be read ({error.message})")
        return self._refusal(command, required, user)

    def _refusal(self, command: Command, required: list[RequiredRight], user: User) -> Reply | None:
        """The refusal if the user lacks one of the rights; it is logged."""
        for right in required:
            why = self._why_refused(right, user, command.peer)
            if why is not None:
                return _refuse(command, user.name, right, why)
        return None

    def _why_refused(self, right: RequiredRight, user: User, peer: str) -> str | None:
        """Why a user at this address lacks a right; None if it has it."""
        if self._allowed_version is not self.table.version or len(self._allowed) > CACHE_MAX:
            self._allowed.clear()
            self._allowed_version = self.table.version
        key = (user.name, peer.rpartition(":")[0], right)
        if key in self._allowed:
            return None
        rule = decide(self.table.rules.get(user.name, {}), right, address_of(peer))
        if right.unless_denied and (
            rule is None or rule.resource.resource_type is not right.resource_type
        ):
            return None  # a rule for everything is not meant for what needs no rule
        if rule is None:
            return "no rule allows it"
        if rule.decision is PolicyDecision.DENY:
            return f"the rule for {rule.resource} denies it"
        self._allowed.add(key)
        return None

    def _refuse_user(self, command: Command, rights: CodeRights, user: User, signed: bool) -> Reply:
        """Refuse a user; only the log says whether the name or the key was wrong."""
        # The body of an unauthenticated request is not decoded.
        right = rights.general if rights.by_body else rights.required(command)[0]
        name = command.ext.get(ACCESS_KEY, "")
        if not name:
            return _refuse(command, "", right, "the request is not signed")
        if signed and user is not _ANONYMOUS:
            return _refuse(command, name, right, "the user is disabled")
        why = "unknown user or wrong signature"
        if self._strict and STRICT_SIGNATURE not in command.ext:
            why = "only strict signatures are accepted (access.strict_signing)"
        elif STRICT_SIGNATURE in command.ext:
            why += f", or a clock differs by more than {TIME_TOLERANCE_MS // 1000} s"
        reason = why.removeprefix("unknown user or ") if user is not _ANONYMOUS else "unknown user"
        hint = "check the user name, the secret key and strict_signing of the client"
        return _refuse(command, name, right, why, logged=reason, hint=hint)

    def _audit(self, command: Command, rights: CodeRights, name: str, source: str) -> None:
        try:
            required = rights.required(command)
        except PenstockError:  # the handler will refuse it
            required = [rights.general]
        for right in required:
            audit.info(
                "allowed subject=%s action=%s resource=%s source=%s request=%s",
                _subject(name),
                right.action(),
                _printable(right.resource()),
                source,
                request_name(command.code),
            )


def credentials_of(text: str) -> Credentials | None:
    """The user of a setting `username:password`; None if it is empty."""
    name, _, password = text.partition(":")
    return Credentials(name, password) if text else None


def _refuse(
    command: Command,
    name: str,
    right: RequiredRight,
    why: str,
    *,
    logged: str = "",
    hint: str = "show the rules with mqadmin getAcl or `penstock acl get`",
) -> Reply:
    source = command.peer.rpartition(":")[0] or "an unknown address"
    subject, resource = _subject(name), _printable(right.resource())
    audit.warning(
        "refused subject=%s action=%s resource=%s source=%s request=%s why=%s",
        subject,
        right.action(),
        resource,
        source,
        request_name(command.code),
        logged or why,
    )
    error = NoPermission(
        f"{subject} may not {right.action()} {resource} from {source} "
        f"({request_name(command.code)}): {why}",
        hint=hint if name else "sign with an access key and its secret key",
    )
    return Reply(error.code, remark=error.remark())


def _subject(name: str) -> str:
    return f"User:{_printable(name)}" if name else "an anonymous user"


def _printable(text: str) -> str:
    """Text of a client for the log: one line of limited length."""
    if len(text) > _PRINTED_CHARACTERS_MAX:
        text = text[:_PRINTED_CHARACTERS_MAX] + "..."
    return text if text.isprintable() else ascii(text)
