"""Writing of tables to their files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, cast

from penstock.rpc.persistence import Persistence
from penstock.server.table_writes import PAUSE, PAUSE_MS_MAX, TableWrites
from penstock.store.disk import Disk


class CountTable:
    """A table with a counter."""

    FILE: ClassVar[str] = "count.json"

    def __init__(self) -> None:
        self.dirty = False
        self.count = 0

    def snapshot(self) -> bytes:
        self.dirty = False
        return str(self.count).encode()


class Server:
    """A pool, a loop and a disk in which everything happens when a test says so."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.written: list[bytes] = []
        self.full = False
        self.table = CountTable()
        self._work: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._timer: tuple[int, Callable[[], None]] | None = None
        self.tables = TableWrites(
            Persistence(cast(Disk, self), Path("/nowhere")),
            self._submit,
            lambda call, *arguments: call(*arguments),
            self._later,
            lambda: self.now_ms,
        )

    def read(self, path: Path) -> bytes:
        return b"{}"

    def replace(self, path: Path, data: bytes) -> None:
        if self.full:
            raise OSError(28, "no space left on device")
        self.written.append(data)

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append((work, future))
        return future

    def _later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None:
        assert self._timer is None
        self._timer = (self.now_ms + ms, lambda: call(*arguments))

    def change(self) -> None:
        self.table.count += 1
        self.table.dirty = True
        self.tables.write(self.table)

    def finish_write(self, *, took_ms: int) -> None:
        self.now_ms += took_ms
        (work, future), self._work = self._work[0], self._work[1:]
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    def end_pause(self) -> int:
        """Let the pause pass; returns its length."""
        assert self._timer is not None
        (end_ms, call), self._timer = self._timer, None
        length_ms, self.now_ms = end_ms - self.now_ms, end_ms
        call()
        return length_ms


def test_changes_during_a_write_and_the_pause_share_the_next_write() -> None:
    server = Server()
    for _ in range(100):
        server.change()
    assert server.tables.running
    server.finish_write(took_ms=10)
    for _ in range(100):
        server.change()
    assert not server.tables.running
    assert server.written == [b"1"]
    assert server.end_pause() == PAUSE * 10
    server.finish_write(took_ms=60_000)
    assert server.written == [b"1", b"200"]
    assert server.end_pause() == PAUSE_MS_MAX
    assert not server.tables.running, "nothing has changed"
    server.change()
    assert server.tables.running


def test_a_failed_write_is_repeated_with_the_next_change() -> None:
    server = Server()
    server.full = True
    server.change()
    server.finish_write(took_ms=1)
    assert server.table.dirty
    server.end_pause()
    assert not server.tables.running
    server.full = False
    server.change()
    server.finish_write(took_ms=1)
    assert server.written == [b"2"]
    assert not server.table.dirty


class ListTable(CountTable):
    """A table whose snapshot is made in the pool."""

    def begin_snapshot(self) -> Callable[[], bytes]:
        self.dirty = False
        count = self.count
        return lambda: b"%d items" % count


def test_the_snapshot_of_a_large_table_is_made_in_the_pool() -> None:
    server = Server()
    server.table = table = ListTable()
    table.count, table.dirty = 3, True
    work = Persistence(cast(Disk, server), Path("/nowhere")).save(table)
    assert not table.dirty
    table.count, table.dirty = 4, True
    work()
    assert server.written == [b"3 items"]
    assert table.dirty
