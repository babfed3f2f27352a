"""The console's database: accounts, the audit log, saved searches. One SQLite file.

Calls run in a thread, one at a time, so that a slow disk does not stop the event loop.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import BadSetting

SCHEMA = """
create table if not exists account (
    name text primary key, role text not null, password text not null, created_ms integer not null
);
create table if not exists audit (
    id integer primary key, at_ms integer not null, user text not null, address text not null,
    action text not null, target text not null, detail text not null, status integer not null
);
create table if not exists reset (
    token text primary key, at_ms integer not null, user text not null,
    consumer_group text not null, topic text not null, undo text not null, undone integer not null
);
create table if not exists saved_search (
    id integer primary key, user text not null, name text not null, query text not null
);
"""
FILE_NAME = "console.sqlite"


class Database:
    """A SQLite file in the console's data directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._connection.execute("pragma journal_mode = wal")
            self._connection.executescript(SCHEMA)
            path.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            raise BadSetting(
                f"can't use {path}: {error}",
                hint="set --data to a directory that this user can write to",
            ) from error
        self._lock = threading.Lock()

    async def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return await asyncio.to_thread(self._execute, sql, values)

    async def change(self, sql: str, *values: object) -> None:
        """Execute one change."""
        await asyncio.to_thread(self._execute, sql, values)

    def _execute(self, sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(sql, tuple(values)).fetchall()

    def close(self) -> None:
        with self._lock:
            self._connection.close()
