"""NameServers: several of them, dead ones among them, a list behind a URL, and namespaces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock import AsyncProducer, Message, ReceivedMessage
from penstock.errors import BadSetting, PenstockError

from .environment import QUICK, Environment, Inbox, eventually, numbers, running, send_all, text
from .proxy import NameProxy, Network

DEAD = "127.0.0.1:1"


@pytest.mark.parametrize("form", ["list", "semicolons", "commas"])
async def test_a_dead_nameserver_is_skipped(env: Environment, form: str) -> None:
    topic = env.topic()
    given: object = [DEAD, env.nameservers]
    if form != "list":
        given = f"{DEAD}{';' if form == 'semicolons' else ','}{env.nameservers}"
    inbox = Inbox()
    consumer = env.consumer(nameservers=given, start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer(nameservers=given) as producer:
        await send_all(producer, topic, numbers(8))
        await inbox.count(8)


async def test_the_client_fails_over_to_another_nameserver(env: Environment) -> None:
    first, second = env.topic("one"), env.topic("two")
    async with (
        NameProxy(env.nameservers, {}) as one,
        NameProxy(env.nameservers, {}) as other,
        env.producer(nameservers=[one.address, other.address]) as producer,
    ):
        await producer.send(Message(first, "x"))
        assert (one.accepted, other.accepted) in ((1, 0), (0, 1), (1, 1))
        for proxy in (one, other):
            proxy.refusing = True
            proxy.cut()
            await producer.send(Message(second if proxy is one else env.topic("three"), "x"))
            proxy.refusing = False
    assert text(env.stored(second)) == ["x"]


@contextmanager
def _list_server(lines: list[str]) -> Iterator[str]:
    """An HTTP server that returns the first of `lines`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = lines[0].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/rocketmq/nsaddr"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_the_list_of_nameservers_can_be_read_from_a_url(env: Environment) -> None:
    topic = env.topic()
    with _list_server([f"{DEAD};{env.nameservers}\n"]) as url:
        async with env.producer(nameservers=url) as producer:
            await producer.send(Message(topic, "x"))
    assert text(env.stored(topic)) == ["x"]
    with _list_server(["\n"]) as url, pytest.raises(PenstockError) as caught:
        async with env.producer(nameservers=url) as producer:
            await producer.send(Message(topic, "x"))
    assert url in str(caught.value)


async def test_nameservers_default_to_the_environment(
    env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = env.topic()
    monkeypatch.setenv("NAMESRV_ADDR", env.nameservers)
    async with AsyncProducer(group=env.name("p"), **QUICK) as producer:
        await producer.send(Message(topic, "x"))
    assert text(env.stored(topic)) == ["x"]


def test_an_invalid_address_is_refused_at_once() -> None:
    for bad in ("nowhere", "host:", ":9876", "host:99999", "", ";"):
        with pytest.raises(BadSetting):
            AsyncProducer(bad, group="p")


async def test_clients_continue_without_any_nameserver(env: Environment) -> None:
    """Known routes stay valid: NameServers may be unavailable for hours."""
    topic = env.topic()
    inbox = Inbox()
    async with Network(env.cluster) as network:
        consumer = env.consumer(nameservers=network.nameservers, start_at="first")
        consumer.on(topic)(inbox)
        async with running(consumer), env.producer(nameservers=network.nameservers) as producer:
            await send_all(producer, topic, numbers(16))
            await inbox.count(16)
            network.names.refusing = True
            network.names.cut()
            asked = network.names.accepted
            await eventually(lambda: network.names.accepted > asked)  # a refresh has failed
            await send_all(producer, topic, numbers(16, 100))
            await inbox.count(32)
            network.names.refusing = False
            await asyncio.to_thread(env.topic, "new")
            await producer.send(Message(env.name("new"), "x"))
    assert len(env.stored(topic)) == 32


async def test_namespaces_separate_tenants(env: Environment) -> None:
    space = env.name("ns")
    plain = env.name()
    env.cluster.make_topic(f"{space}%{plain}")
    env.cluster.make_topic(plain)
    inbox, outside = Inbox(), Inbox()
    consumer = env.consumer(namespace=space, start_at="first")

    @consumer.on(plain)
    async def handle(message: ReceivedMessage) -> bool:
        inbox.add(message)
        return message.reconsume_times > 0

    stranger = env.consumer(start_at="first")
    stranger.on(plain)(outside)
    async with running(consumer, stranger), env.producer(namespace=space) as producer:
        receipt = await producer.send(Message(plain, "inside"))
        await inbox.count(2)
        async with env.producer() as other:
            await other.send(Message(plain, "outside"))
        await outside.count(1)
    assert receipt.queue.topic == plain, "the application never sees the namespace"
    assert [(m.topic, m.body, m.reconsume_times) for m in inbox.messages] == [
        (plain, b"inside", 0), (plain, b"inside", 1)
    ]  # fmt: skip
    assert outside.bodies == ["outside"]
    assert text(env.stored(f"{space}%{plain}")) == ["inside"]
    group = f"{space}%{env.name('c')}"
    await eventually(lambda: env.progress(f"{space}%{plain}", group) == 1)
