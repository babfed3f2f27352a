"""Requests that wait: for another client, which hangs or goes; for a table's file; for a route."""

import asyncio
import threading
from pathlib import Path
from typing import ClassVar, cast

import pytest

from penstock.rpc.answers import Answer, PersistTable, QueryRoute, Reply
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.server import answer_executor
from penstock.server.answer_executor import AnswerExecutor
from penstock.store.disk import Disk
from penstock.wire.bodies.client_bodies import TopicRouteData
from penstock.wire.frame import JSON
from penstock.wire.output import encode, response
from tests.integration.loops import Run, Wire, run  # noqa: F401
from tests.integration.test_server import ASK, ECHO, House, ask, house, until

LONG_MS = "600000"


async def meet(home: House, other: Wire) -> str:
    """The number by which the server knows the client that came last."""
    await ask(other, ECHO)
    return str(home.echo.clients[-1])


def test_a_client_that_goes_ends_the_wait_for_its_answer(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with house() as home:
            asker = await home.connect()
            await ask(asker, ECHO)
            other = await home.connect()
            target = await meet(home, other)
            asker.writer.write(encode(ASK, {"client": target, "ms": LONG_MS}, opaque=3))
            await other.read()
            other.writer.transport.abort()
            answer = await asyncio.wait_for(asker.read(), 20)
            assert (answer.opaque, answer.code) == (3, 207)

    run(body())


def test_a_client_that_hangs_leaves_room_for_others(
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_executor, "RELAYS_PER_CLIENT_MAX", 2)

    async def body() -> None:
        async with house() as home:
            asker = await home.connect()
            await ask(asker, ECHO)
            hanging = await home.connect()
            stuck = await meet(home, hanging)
            good = await home.connect()
            target = await meet(home, good)
            for opaque in (1, 2, 3):
                asker.writer.write(encode(ASK, {"client": stuck, "ms": LONG_MS}, opaque=opaque))
            answer = await asker.read()
            assert (answer.opaque, answer.code) == (3, 207)
            asker.writer.write(encode(ASK, {"client": target, "ms": LONG_MS}, opaque=4))
            question = await good.read()
            good.writer.write(response(0, question.opaque, JSON, ext={"a": "!"}))
            answer = await asker.read()
            assert (answer.opaque, answer.ext) == (4, {"a": "!"})

    run(body())


def test_what_was_answered_is_not_kept_until_its_deadline(
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_executor, "_DEADLINES_LEAST", 10)

    async def body() -> None:
        async with house() as home:
            asker = await home.connect()
            await ask(asker, ECHO)
            other = await home.connect()
            target = await meet(home, other)
            for opaque in range(50):
                asker.writer.write(encode(ASK, {"client": target, "ms": LONG_MS}, opaque=opaque))
                question = await other.read()
                other.writer.write(response(0, question.opaque, JSON, ext={"a": "!"}))
                assert (await asker.read()).opaque == opaque
            assert len(home.server.answer_executor._deadlines) <= 12

    run(body())


class Notes:
    """A table that counts what it holds."""

    FILE: ClassVar[str] = "notes.json"

    def __init__(self) -> None:
        self.dirty = False
        self.held = 0

    def snapshot(self) -> bytes:
        self.dirty = False
        return str(self.held).encode()


class SlowDisk:
    """Writes when it is told to; the contents that came, in order."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.go = threading.Semaphore(0)
        self.failing = False

    def replace(self, path: Path, data: bytes) -> None:
        assert self.go.acquire(timeout=20)
        if self.failing:
            raise OSError(28, "no space left on device")
        self.written.append(data)


def test_who_waits_for_a_table_shares_its_writes(run: Run) -> None:  # noqa: F811
    notes, disk = Notes(), SlowDisk()

    def note(command: Command) -> Answer:
        notes.held += 1
        notes.dirty = True
        mine = notes.held

        def then(written: bool) -> Answer:
            if written:
                assert int(disk.written[-1]) >= mine, "it is on the disk before it is told"
            return Reply(0, {"written": str(written)})

        return PersistTable(notes, then)

    async def body() -> None:
        async with house() as home:
            server = home.server
            persistence = Persistence(cast(Disk, disk), Path("/nowhere"))
            server.answer_executor = AnswerExecutor(
                server, server.answer_executor._submit, persistence=persistence
            )
            home.echo.handle = note  # type: ignore[method-assign]
            wire = await home.connect()

            async def ask_during_a_write(*, written: bool) -> None:
                wire.writer.write(encode(ECHO, opaque=1))
                await until(lambda: server.answer_executor.saving)
                last = notes.held + 100
                wire.writer.write(encode(ECHO, opaque=2) * 100)
                await until(lambda: notes.held == last)
                disk.go.release(2)
                told = {(await wire.read()).ext["written"] for _ in range(101)}
                assert told == {str(written)}

            await ask_during_a_write(written=True)
            assert disk.written == [b"1", b"101"]
            disk.failing = True
            await ask_during_a_write(written=False)
            assert notes.dirty
            disk.failing = False
            await ask_during_a_write(written=True)
            assert disk.written == [b"1", b"101", b"203", b"303"]
            assert not server.answer_executor.saving
            assert [one.under_way for one in server.connections.values()] == [0]

    run(body())


def test_a_search_for_a_route_that_fails_is_answered(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with house() as home:
            loop = asyncio.get_running_loop()
            found: list[asyncio.Future[TopicRouteData | None]] = []

            def find(topic: str) -> asyncio.Future[TopicRouteData | None]:
                found.append(loop.create_future())
                return found[-1]

            home.server.answer_executor.find_route = find
            answer = QueryRoute("T", lambda route: Reply(0, {"route": str(route)}))
            home.echo.handle = lambda command: answer  # type: ignore[method-assign]
            wire = await home.connect()
            wire.writer.write(encode(ECHO, opaque=1) + encode(ECHO, opaque=2))
            await until(lambda: len(found) == 2)
            found[0].cancel()
            assert (await wire.read()).ext == {"route": "None"}
            found[1].set_exception(ValueError("a bug"))
            assert (await wire.read()).code == 1
            assert [one.under_way for one in home.server.connections.values()] == [0]

    run(body())
