"""Requests that the server hands on to another client: who hangs, who goes, how much is kept."""

import asyncio

import pytest

from penstock.net import carrier
from penstock.wire.frame import JSON
from penstock.wire.output import encode, response
from tests.integration.loops import Run, Wire, run  # noqa: F401
from tests.integration.test_server import ASK, ECHO, House, ask, house

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
    monkeypatch.setattr(carrier, "RELAYS_PER_CLIENT_MAX", 2)

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
    monkeypatch.setattr(carrier, "_DEADLINES_LEAST", 10)

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
            assert len(home.server.carrier._deadlines) <= 12

    run(body())
