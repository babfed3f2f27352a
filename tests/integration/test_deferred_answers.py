"""Answers that wait for another client or a route, and writes of tables."""

import asyncio

import pytest

from penstock.rpc.answers import Answer, NextIteration, QueryRoute, Reply
from penstock.rpc.command import Command
from penstock.server import answer_executor, client_calls
from penstock.wire.bodies.client_bodies import TopicRouteData
from penstock.wire.frame import JSON
from penstock.wire.output import encode, response
from tests.integration.loops import Run, Wire, run  # noqa: F401
from tests.integration.test_server import (
    CALL,
    ECHO,
    ServerFixture,
    ask,
    nameserver_calls,
    serving_echo,
    until,
)

LONG_MS = "600000"


async def client_number(env: ServerFixture, other: Wire) -> str:
    """The server's number of the newest client."""
    await ask(other, ECHO)
    return str(env.echo.clients[-1])


def test_a_client_that_disconnects_ends_the_calls_to_it(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as env:
            asker = await env.connect()
            await ask(asker, ECHO)
            other = await env.connect()
            target = await client_number(env, other)
            asker.writer.write(encode(CALL, {"client": target, "ms": LONG_MS}, opaque=3))
            await other.read()
            other.writer.transport.abort()
            answer = await asyncio.wait_for(asker.read(), 20)
            assert (answer.opaque, answer.code) == (3, 207)

    run(body())


def test_a_client_that_hangs_does_not_block_others(
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_calls, "CLIENT_CALLS_PER_CLIENT_MAX", 2)

    async def body() -> None:
        async with serving_echo() as env:
            asker = await env.connect()
            await ask(asker, ECHO)
            hanging = await env.connect()
            stuck = await client_number(env, hanging)
            good = await env.connect()
            target = await client_number(env, good)
            for opaque in (1, 2, 3):
                asker.writer.write(encode(CALL, {"client": stuck, "ms": LONG_MS}, opaque=opaque))
            answer = await asker.read()
            assert (answer.opaque, answer.code) == (3, 207)
            asker.writer.write(encode(CALL, {"client": target, "ms": LONG_MS}, opaque=4))
            question = await good.read()
            good.writer.write(response(0, question.opaque, JSON, ext={"a": "!"}))
            answer = await asker.read()
            assert (answer.opaque, answer.ext) == (4, {"a": "!"})

    run(body())


def test_deadlines_of_answered_calls_are_removed(
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_calls, "_DEADLINES_LEAST", 10)

    async def body() -> None:
        async with serving_echo() as env:
            asker = await env.connect()
            await ask(asker, ECHO)
            other = await env.connect()
            target = await client_number(env, other)
            for opaque in range(50):
                asker.writer.write(encode(CALL, {"client": target, "ms": LONG_MS}, opaque=opaque))
                question = await other.read()
                other.writer.write(response(0, question.opaque, JSON, ext={"a": "!"}))
                assert (await asker.read()).opaque == opaque
            assert len(env.server.answer_executor.client_calls._deadlines) <= 12

    run(body())


def test_a_failed_route_query_is_answered(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        loop = asyncio.get_running_loop()
        found: list[asyncio.Future[TopicRouteData | None]] = []

        def find(topic: str) -> asyncio.Future[TopicRouteData | None]:
            found.append(loop.create_future())
            return found[-1]

        async with serving_echo(nameserver_calls(find_route=find)) as env:
            answer = QueryRoute("T", lambda route: Reply(0, {"route": str(route)}))
            env.echo.handle = lambda command: answer  # type: ignore[method-assign]
            wire = await env.connect()
            wire.writer.write(encode(ECHO, opaque=1) + encode(ECHO, opaque=2))
            await until(lambda: len(found) == 2)
            found[0].cancel()
            assert (await wire.read()).ext == {"route": "None"}
            found[1].set_exception(ValueError("a bug"))
            assert (await wire.read()).code == 1
            assert [one.in_flight for one in env.server.connections.values()] == [0]

    run(body())


def test_a_long_request_lets_others_pass_between_its_steps(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as env:
            steps = 0
            others = 0

            def step() -> Answer:
                nonlocal steps
                steps += 1
                return NextIteration(step) if others == 0 else Reply(0, {"steps": "done"})

            def handle(command: Command) -> Answer:
                nonlocal others
                if command.opaque == 1:
                    return NextIteration(step)
                others += 1
                return Reply(0)

            env.echo.handle = handle  # type: ignore[method-assign]
            wire, other = await env.connect(), await env.connect()
            wire.writer.write(encode(ECHO, opaque=1))
            await until(lambda: steps > 0)
            other.writer.write(encode(ECHO, opaque=2))
            assert (await other.read()).code == 0
            assert (await wire.read()).ext == {"steps": "done"}
            assert [one.in_flight for one in env.server.connections.values()] == [0, 0]

    run(body())


def test_the_steps_of_many_long_requests_share_the_time_of_a_loop_iteration(
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_executor, "STEPS_NS", 0)  # enough for one step

    async def body() -> None:
        async with serving_echo() as env:
            loop = asyncio.get_running_loop()
            iteration = 0
            steps: list[tuple[int, int]] = []

            def count() -> None:
                nonlocal iteration
                iteration += 1
                loop.call_soon(count)

            def handle(command: Command) -> Answer:
                def step() -> Answer:
                    steps.append((iteration, command.opaque))
                    done = sum(opaque == command.opaque for _, opaque in steps)
                    return NextIteration(step) if done < 3 else Reply(0)

                return NextIteration(step)

            env.echo.handle = handle  # type: ignore[method-assign]
            loop.call_soon(count)
            wire = await env.connect()
            wire.writer.write(b"".join(encode(ECHO, opaque=n) for n in range(4)))
            assert [(await wire.read()).opaque for _ in range(4)] == [0, 1, 2, 3]
            assert [opaque for _, opaque in steps] == [0, 1, 2, 3] * 3
            assert len({at for at, _ in steps}) == len(steps)

    run(body())
