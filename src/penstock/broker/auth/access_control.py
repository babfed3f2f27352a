"""Authentication and authorization: may this request be served?

1. The user of the field AccessKey signed the request with its password, and is enabled.
2. A super user may do everything.
3. For everybody else the user's rules decide about each thing the request needs (`rights`,
   `policies`).

Either setting alone asks for signatures; only `authorization` asks the rules. A refusal is
NO_PERMISSION and one line of the logger `penstock.audit`, which names subject, action, resource,
source and request; what administrators change gets a line too.

Cost: the signature takes a few microseconds and can't be spared. What was allowed once is
remembered until the table changes.
"""

import logging
from typing import Final, NamedTuple

from penstock.broker.auth.policies import Decision, Need, address_of, decide
from penstock.broker.auth.request_rights import Right, Rights, reading, sending
from penstock.broker.auth.users import SUPER, AccessTable, User
from penstock.config import Live
from penstock.errors import NoPermission, PenstockError
from penstock.rpc.answers import EffectQueue, PersistSoon, Reply
from penstock.rpc.command import Command
from penstock.wire.codes import request_name
from penstock.wire.signing import ACCESS_KEY, is_signed

audit = logging.getLogger("penstock.audit")
log = logging.getLogger("penstock.access")

REMEMBERED_MAX: Final = 100_000
"""Allowed combinations of user, source and need that are kept; names come from clients."""
_NOBODY: Final = User.of("", "")
_SHOWN_CHARACTERS_MAX: Final = 128


class Credentials(NamedTuple):
    """What to sign requests with."""

    access_key: str
    secret_key: str


class Access:
    """Who may do what."""

    def __init__(self, settings: Live, table: AccessTable, effects: EffectQueue) -> None:
        access = settings.current.access
        self.table = table
        self._effects = effects
        self._rights = Rights(settings.current.broker.cluster)
        self._authorization = access.authorization
        self._enabled = access.authentication or access.authorization
        self._initial = credentials_of(access.initial_user)
        self._internal = credentials_of(access.internal_user)
        self._allowed: set[tuple[str, str, Need]] = set()
        self._allowed_version = table.version

    def enabled(self) -> bool:
        """Whether requests are checked at all."""
        return self._enabled

    def internal(self) -> Credentials | None:
        """What this server signs its own requests with; None: not at all."""
        return self._internal

    def seed(self, now_ms: int) -> None:
        """After the table was loaded: make the users of the settings that are missing yet."""
        for credentials in (self._initial, self._internal):
            if credentials is not None and credentials.access_key not in self.table.users:
                self.table.put_user(User.of(*credentials, SUPER), now_ms)
                self._effects.put(PersistSoon(self.table))
        if self._enabled and not any(user.is_super for user in self.table.users.values()):
            log.warning(
                "access control is on and there is no super user: nobody can administer this "
                "server; set access.initial_user"
            )

    def check(self, command: Command) -> Reply | None:
        """None if the request may be served, else the refusal (NO_PERMISSION), noted."""
        if not self._enabled:
            return None
        right = self._rights.of(command.code)
        source = command.peer.rpartition(":")[0]
        name = command.ext.get(ACCESS_KEY, "")
        user = self.table.users.get(name, _NOBODY)
        signed = is_signed(command.ext, command.body, user.secret, version=command.version)
        if user is _NOBODY or not signed or not user.is_enabled:
            return self._refuse_user(command, right, user, signed)
        if self._authorization and not user.is_super:
            refusal = self._refuse_needs(command, right, user, source)
            if refusal is not None:
                return refusal
        if right.is_change:
            self._note(command, right, name, source)
        return None

    def check_read(self, command: Command, topic: str) -> Reply | None:
        """As `check`, for a topic that only the handling has shown: whether it may be read."""
        return self._check_shown(command, reading(topic))

    def check_write(self, command: Command, topic: str) -> Reply | None:
        """As `check_read`, whether it may be sent to."""
        return self._check_shown(command, sending(topic))

    def _check_shown(self, command: Command, right: Right) -> Reply | None:
        user = self.table.users.get(command.ext.get(ACCESS_KEY, ""), _NOBODY)
        if not self._authorization or user.is_super:
            return None
        source = command.peer.rpartition(":")[0]
        return self._refuse_needs(command, right, user, source)

    def _refuse_needs(
        self, command: Command, right: Right, user: User, source: str
    ) -> Reply | None:
        if self._allowed_version is not self.table.version or len(self._allowed) > REMEMBERED_MAX:
            self._allowed.clear()
            self._allowed_version = self.table.version
        try:
            needs = right.needs(command)
        except PenstockError as error:
            need = right.in_general
            return _refuse(command, user.name, need, f"its body can't be read ({error.message})")
        for need in needs:
            key = (user.name, source, need)
            if key in self._allowed:
                continue
            rule = decide(self.table.rules.get(user.name, {}), need, address_of(command.peer))
            if rule is None:
                return _refuse(command, user.name, need, "no rule allows it")
            if rule.decision is Decision.DENY:
                return _refuse(command, user.name, need, f"the rule for {rule.resource} denies it")
            self._allowed.add(key)
        return None

    def _refuse_user(self, command: Command, right: Right, user: User, signed: bool) -> Reply:
        """Which of name and key was wrong is told to the log only."""
        # Nobody's body is worth reading.
        need = right.in_general if right.by_body else right.needs(command)[0]
        name = command.ext.get(ACCESS_KEY, "")
        if not name:
            return _refuse(command, "", need, "the request is not signed")
        if signed and user is not _NOBODY:
            return _refuse(command, name, need, "the user is disabled")
        why = "unknown user or wrong signature"
        known = "wrong signature" if user is not _NOBODY else "unknown user"
        return _refuse(command, name, need, why, noted=known)

    def _note(self, command: Command, right: Right, name: str, source: str) -> None:
        try:
            needs = right.needs(command)
        except PenstockError:  # the handler will refuse it
            needs = [right.in_general]
        for need in needs:
            audit.info(
                "allowed subject=%s action=%s resource=%s source=%s request=%s",
                _subject(name),
                need.action(),
                _shown(need.resource()),
                source,
                request_name(command.code),
            )


def credentials_of(text: str) -> Credentials | None:
    """The user of a setting, username:password; None where it is empty."""
    name, _, password = text.partition(":")
    return Credentials(name, password) if text else None


def _refuse(command: Command, name: str, need: Need, why: str, *, noted: str = "") -> Reply:
    source = command.peer.rpartition(":")[0] or "an unknown address"
    subject, resource = _subject(name), _shown(need.resource())
    audit.warning(
        "refused subject=%s action=%s resource=%s source=%s request=%s why=%s",
        subject,
        need.action(),
        resource,
        source,
        request_name(command.code),
        noted or why,
    )
    error = NoPermission(
        f"{subject} may not {need.action()} {resource} from {source} "
        f"({request_name(command.code)}): {why}",
        hint="sign with an access key and its secret key"
        if not name
        else "see the rules with mqadmin getAcl or `penstock acl get`",
    )
    return Reply(error.code, remark=error.remark())


def _subject(name: str) -> str:
    return f"User:{_shown(name)}" if name else "nobody"


def _shown(text: str) -> str:
    """Text of a client for a log: one line, and not too long."""
    if len(text) > _SHOWN_CHARACTERS_MAX:
        text = text[:_SHOWN_CHARACTERS_MAX] + "..."
    return text if text.isprintable() else ascii(text)
