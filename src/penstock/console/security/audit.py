"""The audit log: who changed what, when, and with which result."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.console.security.database import Database

ENTRIES_MAX = 100_000
"""Older entries are deleted."""
DETAIL_CHARACTERS = 2_000
_SECRET_WORDS = ("password", "secret", "token")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change, or one login."""

    at_ms: int
    user: str
    address: str
    action: str
    target: str
    detail: str
    status: int


class AuditLog:
    """Entries in the console's database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, entry: AuditEntry) -> None:
        """Store an entry."""
        await self._database.change(
            "insert into audit (at_ms, user, address, action, target, detail, status) "
            "values (?, ?, ?, ?, ?, ?, ?)",
            *(entry.at_ms, entry.user, entry.address, entry.action),
            *(entry.target, entry.detail, entry.status),
        )
        await self._database.change(
            "delete from audit where id <= (select max(id) from audit) - ?", ENTRIES_MAX
        )

    async def entries(self, count_max: int, before: int | None = None) -> list[dict[str, object]]:
        """The newest entries, before the entry with this number."""
        rows = await self._database.rows(
            "select id, at_ms, user, address, action, target, detail, status from audit "
            "where id < ? order by id desc limit ?",
            before if before is not None else 2**62,
            count_max,
        )
        names = ("id", "at_ms", "user", "address", "action", "target", "detail", "status")
        return [dict(zip(names, row, strict=True)) for row in rows]


def detail_of(body: Mapping[str, object]) -> str:
    """The values of a request as text, without passwords."""
    shown = {
        name: "(hidden)" if any(word in name.lower() for word in _SECRET_WORDS) else value
        for name, value in body.items()
    }
    return json.dumps(shown, ensure_ascii=False, default=str)[:DETAIL_CHARACTERS]
