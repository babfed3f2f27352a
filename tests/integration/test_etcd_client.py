"""The HTTP client of etcd against servers that fail in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.errors import EtcdError, EtcdOutcomeUnknown, EtcdRefused
from penstock.server.controller.etcd import etcd_client as client_module
from penstock.server.controller.etcd import http_connection
from penstock.server.controller.etcd.etcd_client import EtcdClient, parse
from penstock.server.controller.etcd.etcd_messages import PutAnswer
from penstock.server.controller.etcd.http_connection import HttpError
from tests.integration.scripted_server import (
    Received,
    ScriptedServer,
    Step,
    be_silent,
    lose,
    raw,
    raw_reply,
    reply,
)

PATH = "/v3/kv/put"
DONE = reply({"header": {"revision": "7"}})
UNAVAILABLE = reply({"code": 14, "message": "etcdserver: no leader"}, 503)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ATTEMPT_MS", (1_000,))
    monkeypatch.setattr(client_module, "PAUSE_MS", 1)


async def revision(client: EtcdClient) -> int:
    return (await client.call(PATH, {"key": "YQ=="}, PutAnswer)).header.revision


def run(
    main: Callable[[EtcdClient, list[ScriptedServer]], Coroutine[Any, Any, None]],
    *scripts: tuple[Step, ...],
    **options: Any,
) -> None:
    """Run a test with one server per script."""

    async def with_servers() -> None:
        servers = [ScriptedServer(*script) for script in scripts]
        for server in servers:
            await server.__aenter__()
        client = EtcdClient([server.endpoint for server in servers], **options)
        try:
            await main(client, servers)
        finally:
            client.close()
            for server in servers:
                await server.__aexit__(None, None, None)

    asyncio.run(with_servers())


def test_calls_share_a_connection() -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        assert [await revision(client) for _ in range(3)] == [7, 7, 7]
        assert servers[0].connections == 1
        assert servers[0].received[0].message == {"key": "YQ=="}
        assert client.figures.calls == {(PATH, "ok"): 3}

    run(main, (DONE,))


@pytest.mark.parametrize(
    "failure",
    [
        lose,
        be_silent,
        UNAVAILABLE,
        raw(b"garbage\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"),
        raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000 + b"\r\n\r\n"),
        raw_reply(b"not JSON"),
        raw_reply(b'{"header": 5}'),
        raw_reply(b"<html>", 502),
    ],
    ids=[
        "lost", "silent", "unavailable", "garbage", "short", "long header", "no JSON", "other JSON",
        "not etcd",
    ],
)  # fmt: skip
def test_the_next_member_answers_if_one_fails(failure: Step) -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        assert await revision(client) == 7
        assert await revision(client) == 7
        assert len(servers[0].received) == 1  # the client stays with the member that answers
        assert servers[0].received[0].message == servers[1].received[0].message
        assert client.figures.failures == {str(servers[0].endpoint): 1}

    run(main, (failure,), (DONE,))


def test_a_response_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "BODY_BYTES_MAX", 1000)

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdOutcomeUnknown, match="longer than 1000 bytes"):
            await revision(client)

    run(main, (raw_reply(b'{"x":"' + b"x" * 1000 + b'"}'),), call_ms=50)


def test_a_member_that_has_closed_an_idle_connection_is_called_again() -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        assert await revision(client) == 7
        servers[0].close_connections()
        assert await revision(client) == 7
        assert len(servers[1].received) == 0

    run(main, (DONE,), (DONE,))


def test_a_lost_answer_on_a_used_connection_makes_the_outcome_unknown() -> None:
    """Even if nobody listens any more afterwards."""

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        assert await revision(client) == 7

        async def lose_and_end(request: Received, writer: asyncio.StreamWriter) -> None:
            servers[0]._server.close()
            writer.close()

        servers[0].script = [lose_and_end]
        with pytest.raises(EtcdOutcomeUnknown):
            await revision(client)

    run(main, (DONE,), call_ms=200)


def test_without_a_connection_nothing_was_changed() -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        await servers[0].__aexit__(None, None, None)
        with pytest.raises(EtcdError, match="no connection to etcd") as caught:
            await revision(client)
        assert not isinstance(caught.value, EtcdOutcomeUnknown)
        assert client.figures.calls == {(PATH, "failed"): 1}

    run(main, (DONE,), call_ms=100)


def test_without_an_answer_the_outcome_is_unknown() -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdOutcomeUnknown, match="no answer within"):
            await revision(client)

    run(main, (be_silent,), call_ms=150)


def test_a_refusal_is_final() -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdRefused, match="lease not found") as caught:
            await revision(client)
        assert caught.value.grpc_code == 5
        assert len(servers[1].received) == 0

    run(main, (reply({"code": 5, "message": "lease not found"}, 404),), (DONE,))


# --- users


def test_a_token_is_asked_for_once_and_renewed_when_it_has_expired() -> None:
    expired = reply({"code": 16, "message": "invalid auth token"}, 401)
    script = (reply({"token": "one"}), DONE, expired, reply({"token": "two"}), DONE)

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        assert await revision(client) == 7
        assert await revision(client) == 7
        seen = [(r.path, r.headers.get("authorization")) for r in servers[0].received]
        login = ("/v3/auth/authenticate", None)
        assert seen == [login, (PATH, "one"), (PATH, "one"), login, (PATH, "two")]
        assert servers[0].received[0].message == {"name": "u", "password": "p"}

    run(main, script, user="u", password="p")


def test_a_token_that_stays_invalid_is_a_refusal() -> None:
    expired = reply({"code": 16, "message": "invalid auth token"}, 401)

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdRefused, match="invalid auth token"):
            await revision(client)

    script = (reply({"token": "one"}), expired, reply({"token": "two"}), expired)
    run(main, script, user="u", password="p")


def test_a_wrong_password_is_reported() -> None:
    wrong = reply({"code": 3, "message": "authentication failed"}, 400)

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdRefused, match="authentication failed") as caught:
            await revision(client)
        assert "controller.etcd_password" in caught.value.hint

    run(main, (wrong,), user="u", password="p")


# --- streams


def chunked(*parts: bytes) -> Step:
    async def step(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()

    return step


async def read_line(client: EtcdClient) -> None:
    """Read a line, and complain about it."""
    async with client.stream("/v3/watch", {}) as stream:
        async for line in stream:
            raise HttpError(line.decode(), sent=True)


def test_lines_of_a_stream_may_be_cut_anywhere() -> None:
    lines = b'{"header":{"revision":"1"}}\n\n{"header":{"revision":"2"}}\n'
    step = chunked(*(bytes([byte]) for byte in lines))

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        found = []
        async with client.stream("/v3/watch", {}) as stream:
            async for line in stream:
                found.append(parse(line, PutAnswer).header.revision)
                if len(found) == 2:
                    break
        assert found == [1, 2]
        assert servers[0].received[0].headers["grpc-metadata-hasleader"] == "true"

    run(main, (step,))


def test_a_broken_stream_leaves_the_member() -> None:
    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdError):
            await read_line(client)
        assert await revision(client) == 7
        assert len(servers[1].received) == 1

    run(main, (chunked(b"x\n"),), (DONE,))


def test_a_line_that_is_too_long_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "BODY_BYTES_MAX", 1000)

    async def main(client: EtcdClient, servers: list[ScriptedServer]) -> None:
        with pytest.raises(EtcdError, match="longer than 1000 bytes"):
            await read_line(client)

    run(main, (chunked(b"x" * 1001),))
