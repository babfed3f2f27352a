"""The accounts of the console and their roles. Passwords are stored as scrypt hashes."""

import asyncio
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.console.security.database import Database
from penstock.errors import InvalidParameter

FIRST_ACCOUNT = "admin"
PASSWORD_CHARACTERS_MIN = 10
NAME_CHARACTERS_MAX = 64
_COST, _BLOCK, _PARALLEL = 2**14, 8, 1


class Role(IntEnum):
    """What a user may do. Each role includes those below it."""

    VIEW = 1
    """Look at everything, change nothing."""
    OPERATE = 2
    """Also change topics, groups, offsets, messages."""
    ADMIN = 3
    """Also change brokers, users, access lists and accounts."""

    @property
    def text(self) -> str:
        return self.name.lower()


def role_of(text: str) -> Role:
    """A role by its name."""
    try:
        return Role[text.upper()]
    except KeyError:
        raise InvalidParameter(
            f"{text!r} is not a role", hint="use view, operate or admin"
        ) from None


@dataclass(frozen=True, slots=True)
class Login:
    """A user who has logged in."""

    name: str
    role: Role
    admin: AsyncAdmin | None = None
    """A client with the user's own credentials, if the brokers check them."""


class LoginSource(Protocol):
    """Checks names and passwords."""

    async def log_in(self, name: str, password: str) -> Login | None:
        """The user; None if name or password is wrong."""


class Accounts:
    """The accounts in the console's database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_first(self, now_ms: int) -> str | None:
        """Create the first account if there is none; returns its password, which is not stored."""
        if await self._database.rows("select 1 from account limit 1"):
            return None
        password = secrets.token_urlsafe(15)
        await self.put(FIRST_ACCOUNT, Role.ADMIN, password, now_ms)
        return password

    async def put(self, name: str, role: Role, password: str, now_ms: int) -> None:
        """Create an account or replace it."""
        if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
            raise InvalidParameter(
                f"{name[:80]!r} is not a valid account name",
                hint=f"use 1 to {NAME_CHARACTERS_MAX} printable characters",
            )
        if len(password) < PASSWORD_CHARACTERS_MIN:
            raise InvalidParameter(
                f"the password has {len(password)} characters",
                hint=f"use at least {PASSWORD_CHARACTERS_MIN}",
            )
        stored = await asyncio.to_thread(hash_password, password)
        await self._database.change(
            "insert or replace into account (name, role, password, created_ms) values (?, ?, ?, ?)",
            *(name, role.text, stored, now_ms),
        )

    async def set_role(self, name: str, role: Role) -> None:
        await self._need_other_admin(name, role)
        await self._database.change("update account set role = ? where name = ?", role.text, name)

    async def delete(self, name: str) -> None:
        await self._need_other_admin(name, None)
        await self._database.change("delete from account where name = ?", name)

    async def list(self) -> list[dict[str, object]]:
        rows = await self._database.rows("select name, role, created_ms from account order by name")
        return [{"name": name, "role": role, "created_ms": ms} for name, role, ms in rows]

    async def log_in(self, name: str, password: str) -> Login | None:
        """The user; None if name or password is wrong."""
        rows = await self._database.rows("select role, password from account where name = ?", name)
        stored = rows[0][1] if rows else _UNKNOWN_USER
        # An unknown name takes as long as a wrong password, so that nobody can probe for names.
        good = await asyncio.to_thread(check_password, password, stored)
        return Login(name, role_of(rows[0][0])) if rows and good else None

    async def _need_other_admin(self, name: str, role: Role | None) -> None:
        if role is Role.ADMIN:
            return
        others = await self._database.rows(
            "select 1 from account where role = 'admin' and name != ?", name
        )
        if not others:
            raise InvalidParameter(
                f"{name} is the only account with the role admin",
                hint="give this role to another account first",
            )


def hash_password(password: str) -> str:
    """Salt and hash, as hex."""
    salt = secrets.token_bytes(16)
    return f"{salt.hex()}:{_scrypt(password, salt).hex()}"


def check_password(password: str, stored: str) -> bool:
    """Whether a password has this hash."""
    salt, _, expected = stored.partition(":")
    return hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)).hex(), expected)


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=_COST, r=_BLOCK, p=_PARALLEL)


_UNKNOWN_USER = f"{'00' * 16}:{'00' * 64}"
