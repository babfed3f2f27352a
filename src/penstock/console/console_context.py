"""What all handlers of the console share."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.console.console_settings import ConsoleSettings, Logins
from penstock.console.jobs import Jobs
from penstock.console.monitoring.cluster_watch import ClusterWatch
from penstock.console.reset_plans import ResetPlans
from penstock.console.security.accounts import Accounts, Login, LoginSource, Role
from penstock.console.security.audit import AuditLog
from penstock.console.security.broker_logins import BrokerLogins, ClientFor
from penstock.console.security.database import Database
from penstock.console.security.login_limit import LoginLimit
from penstock.console.security.sessions import LoginSession, Sessions

EXPIRY_S = 60.0
"""How often sessions that have expired are removed."""
ANYBODY = Login("local", Role.ADMIN)
"""The user of a console without logins: whoever has access to this machine."""


@dataclass(slots=True)
class Console:
    """The parts of a running console."""

    settings: ConsoleSettings
    admin: AsyncAdmin
    database: Database
    watch: ClusterWatch
    accounts: Accounts
    logins: LoginSource
    audit: AuditLog
    resets: ResetPlans
    jobs: Jobs = field(default_factory=Jobs)
    sessions: Sessions = field(default_factory=Sessions)
    limit: LoginLimit = field(default_factory=LoginLimit)

    expiry: asyncio.Task[None] | None = None
    """Ends the sessions that have expired."""

    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """The token of a console without logins."""

    def now_ms(self) -> int:
        return self.admin.session.clock.now_ms()

    @property
    def needs_login(self) -> bool:
        return self.settings.logins is not Logins.NONE

    async def start(self) -> None:
        await self.admin.start()
        await self.watch.start()
        self.expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.expiry
        await self.watch.close()
        await self.jobs.close()
        await close_clients(self.sessions.end_all())
        await self.admin.close()
        self.database.close()

    async def end_expired_sessions(self) -> None:
        """Remove the sessions that have expired, with their clients."""
        await close_clients(self.sessions.end_expired(self.now_ms()))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_S)
            await self.end_expired_sessions()


async def close_clients(ended: Iterable[LoginSession]) -> None:
    """Close the clients of sessions that have ended."""
    for session in ended:
        if session.login.admin is not None:
            await session.login.admin.close()


def create_console(
    settings: ConsoleSettings, client: Callable[[], AsyncAdmin], client_for: ClientFor
) -> Console:
    """A console that is not started yet. `client_for` creates clients of users of the brokers."""
    database = Database(settings.data)
    admin = client()
    accounts = Accounts(database)
    from_brokers = settings.logins is Logins.BROKERS
    return Console(
        settings=settings,
        admin=admin,
        database=database,
        watch=ClusterWatch(admin, settings.interval_s),
        accounts=accounts,
        logins=BrokerLogins(admin, client_for) if from_brokers else accounts,
        audit=AuditLog(database),
        resets=ResetPlans(database),
    )
