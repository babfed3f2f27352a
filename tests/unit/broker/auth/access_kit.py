"""Access control without a server: users, rules, and signed requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from penstock.broker.admin.auth_admin import AuthAdmin
from penstock.broker.auth.access_control import AccessControl
from penstock.broker.auth.policies import Action, PolicyDecision, PolicyType, Resource, Rule
from penstock.broker.auth.users import AccessTable, User
from penstock.broker.context import BrokerContext
from penstock.config import AccessConfig, LiveSettings, Settings
from penstock.rpc.answers import EffectQueue, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Router
from penstock.wire.signing import signed

ON = AccessConfig(authentication=True, authorization=True)
PEER = "192.0.2.7:4711"


def rule(resource: str, actions: str, decision: str = "Allow", *sources: str) -> Rule:
    parsed, what = Resource.parse(resource), PolicyDecision.named(decision)
    assert parsed is not None
    assert what is not None
    named = tuple(Action(name) for name in actions.split(","))
    return Rule(parsed, named, what, sources or None)


class AccessFixture:
    """The access control of a broker; the password of each user is its name twice."""

    def __init__(self, config: AccessConfig = ON) -> None:
        self.effects = EffectQueue()
        self.table = AccessTable()
        self.access = AccessControl(LiveSettings(Settings(access=config)), self.table, self.effects)
        self.saved = 0
        context = cast(BrokerContext, SimpleNamespace(access=self.access, persistence=self))
        self.router = Router([AuthAdmin(context).rows()])

    def add(self, name: str, *rules: Rule, type: str = "Normal", status: str = "enable") -> None:
        self.table.put_user(User.of(name, name * 2, type, status), 1)
        if rules:
            self.table.put_rules(name, {PolicyType.CUSTOM: list(rules)}, 1)

    def check(
        self,
        name: str,
        code: int,
        ext: dict[str, str] | None = None,
        body: Any = None,
        *,
        peer: str = PEER,
    ) -> Reply | None:
        """The refusal of a request that this user signs."""
        return self.access.check(command(name, code, ext, body, peer=peer))

    def allows(self, name: str, code: int, ext: dict[str, str], body: Any = None) -> bool:
        return self.check(name, code, ext, body) is None

    def ask(
        self, name: str, code: int, ext: dict[str, str] | None = None, body: Any = None
    ) -> Reply:
        """The response to an administration request."""
        reply = self.router.handle(command(name, code, ext, body))
        if isinstance(reply, InThread):
            reply = reply.then(reply.work())
        assert isinstance(reply, Reply)
        return reply

    def save(self, table: AccessTable) -> Callable[[], None]:
        """Replaces Persistence: counts saves."""
        assert table is self.table

        def work() -> None:
            self.saved += 1

        return work


def command(
    name: str, code: int, ext: dict[str, str] | None = None, body: Any = None, *, peer: str = PEER
) -> Command:
    data = b"" if body is None else json.dumps(body).encode()
    fields = dict(ext or {})
    if name:
        fields = signed(fields, data, access_key=name, secret_key=name * 2)
    return Command(code, fields, data, peer=peer, now_ms=5, version=493)
