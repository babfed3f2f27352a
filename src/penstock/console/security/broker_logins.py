"""Logins with the users of the brokers.

A login sends a request that is signed with the name and the password. The brokers also check all
later requests of this user, by their access lists. The role in the console is admin for a super
user, operate for a user who may update the cluster, and view for all others.
"""

import secrets
from collections.abc import Callable

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.console.broker_access import read_rules, read_user
from penstock.console.security.accounts import Login, Role
from penstock.errors import BadSetting, NoPermission
from penstock.wire.codes import RequestCode

ClientFor = Callable[[str, str], AsyncAdmin]
"""Creates a client with a user name and a password."""


class BrokerLogins:
    """Names and passwords are those of the brokers."""

    def __init__(self, admin: AsyncAdmin, client_for: ClientFor) -> None:
        """`admin` is the console's own client, which may read users and access lists."""
        self._admin = admin
        self._client_for = client_for

    async def log_in(self, name: str, password: str) -> Login | None:
        """The user; None if name or password is wrong."""
        if not name or not password:
            return None
        nobody = await self._accepted(f"nobody-{secrets.token_hex(8)}", secrets.token_hex(8))
        if nobody is not None:
            await nobody.close()
            raise BadSetting(
                "the brokers do not check users, so they can't be the source of logins",
                hint="turn on access.authentication at the brokers, or use --logins console",
            )
        client = await self._accepted(name, password)
        if client is None:
            return None
        return Login(name, await self._role(name), client)

    async def _accepted(self, name: str, password: str) -> AsyncAdmin | None:
        """A client with these credentials, if the brokers accept them."""
        client = self._client_for(name, password)
        await client.start()
        try:
            broker = (await self._admin.masters())[0]
            # Any user with a rule may send it, and it changes nothing: no client has this id.
            fields = {"clientID": f"console-{secrets.token_hex(8)}"}
            await client.ask(broker.address, RequestCode.UNREGISTER_CLIENT, fields)
        except NoPermission:
            await client.close()
            return None
        except BaseException:
            await client.close()
            raise
        return client

    async def _role(self, name: str) -> Role:
        user = await read_user(self._admin, name)
        if user is not None and (user.user_type or "").lower() == "super":
            return Role.ADMIN
        for rule in await read_rules(self._admin, name):
            resource = str(rule["resource"])
            on_cluster = resource == "*" or resource.startswith("Cluster:")
            actions = {action.lower() for action in rule["actions"]}
            if on_cluster and rule["decision"] == "Allow" and actions & {"all", "update"}:
                return Role.OPERATE
        return Role.VIEW
