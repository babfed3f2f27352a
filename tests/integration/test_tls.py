"""TLS and plain connections on one port, changed certificates, and misbehaving peers."""

import asyncio
import errno
import logging
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.config import TlsConfig
from penstock.errors import PeerUntrusted, TlsError
from penstock.server.listener import Listener, TlsListener, listen
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Peer
from penstock.transport.tls import Tls, outgoing_context, server_context
from penstock.wire.output import encode
from tests.integration.certificates import Pair, make_pair
from tests.integration.loops import Run, echo, run, serving

__all__ = ["run"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("other"), "second")


class Echo(asyncio.BufferedProtocol):
    """Echoes its input."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray(4096))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(bytes(self._room[:nbytes]))


def config(pair: Pair, mode: str = "permissive", **others: Any) -> TlsConfig:
    return TlsConfig(
        mode=mode, certificate=str(pair.certificate), key=str(pair.key), **others
    )  # fmt: skip


def trusting(pair: Pair) -> ssl.SSLContext:
    """A client context that verifies the server."""
    return ssl.create_default_context(cafile=str(pair.certificate))


@asynccontextmanager
async def listening(tls: TlsConfig | None, **options: Any) -> AsyncIterator[Listener]:
    listener = await listen(
        Echo, "127.0.0.1", 0, tls=Tls(tls) if tls is not None else None, **options
    )
    try:
        yield listener
    finally:
        await listener.close()


async def exchange(listener: Listener, context: ssl.SSLContext | None, data: bytes) -> bytes:
    """The response to `data`; empty if the connection is closed instead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
    try:
        writer.write(data)
        return await reader.readexactly(len(data))
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("size", [1, 100_000])
def test_permissive_mode_serves_tls_and_plain_on_one_port(run: Run, pair: Pair, size: int) -> None:
    async def body() -> None:
        async with listening(config(pair)) as listener:
            data = b"\0" * size
            assert await exchange(listener, trusting(pair), data) == data
            assert await exchange(listener, None, data) == data

    run(body())


def test_enforcing_mode_closes_plain_connections_with_a_log_line(
    run: Run, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with listening(config(pair, "enforcing")) as listener:
            assert await exchange(listener, trusting(pair), b"secret") == b"secret"
            assert await exchange(listener, None, encode(105)) == b""

    with caplog.at_level(logging.INFO):
        run(body())
    assert "does not use TLS, and tls.mode is enforcing" in caplog.text


def test_a_temporary_certificate_is_generated_if_none_is_configured(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE

    async def body() -> None:
        async with listening(TlsConfig()) as listener:
            assert await exchange(listener, None, b"plain") == b"plain"
            assert "self-signed certificate" not in caplog.text
            answers = await asyncio.gather(*(exchange(listener, blind, b"x") for _ in range(5)))
            assert answers == [b"x"] * 5
            assert caplog.text.count("self-signed certificate") == 1

    async def body_without_openssl() -> None:
        async with listening(TlsConfig()) as listener:
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await exchange(listener, blind, b"x")
            assert "none can be made" in caplog.text
            assert await exchange(listener, None, b"plain") == b"plain"

    with caplog.at_level(logging.INFO):
        run(body())
        monkeypatch.setenv("PATH", "")
        run(body_without_openssl())


def test_disabled_mode_serves_plain_only(run: Run) -> None:
    async def body() -> None:
        async with listening(None) as listener:
            assert await exchange(listener, None, b"plain") == b"plain"

    run(body())


@pytest.mark.parametrize("secure", [False, True], ids=["plain only", "both"])
def test_accepted_connections_notice_a_vanished_peer(run: Run, pair: Pair, secure: bool) -> None:
    async def body() -> None:
        accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        class Kept(Echo):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                accepted.set_result(transport.get_extra_info("socket"))

        listener = await listen(
            Kept, "127.0.0.1", 0, tls=Tls(config(pair)) if secure else None
        )  # fmt: skip
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"x")
        with socket.socket(fileno=os.dup((await accepted).fileno())) as copy:
            assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                copy.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
        assert idle + interval * count == 30
        writer.transport.abort()
        await listener.close()

    run(body())


def test_many_connections_at_a_time(run: Run, pair: Pair) -> None:
    async def body() -> None:
        async with listening(config(pair)) as listener:
            context = trusting(pair)
            got = await asyncio.gather(
                *(exchange(listener, context if n % 2 else None, b"x" * n) for n in range(1, 101))
            )
            assert got == [b"x" * n for n in range(1, 101)]

    run(body())


def test_silent_peer_blocks_no_others_and_is_closed(pair: Pair) -> None:
    async def body() -> None:
        clock = VirtualClock()
        async with listening(config(pair), clock=clock) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            assert await exchange(listener, None, b"next") == b"next"
            await clock.elapse(29_999)
            assert not reader.at_eof()
            await clock.elapse(2)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(body())


def test_oldest_silent_peers_are_closed_when_there_are_too_many(run: Run, pair: Pair) -> None:
    async def body() -> None:
        async with listening(config(pair), waiting_max=5) as listener:
            assert isinstance(listener, TlsListener)
            silent = []
            for count in range(1, 8):
                silent.append(await asyncio.open_connection("127.0.0.1", listener.port))
                while listener.waiting + listener.refused < count:
                    await asyncio.sleep(0)
            assert (listener.waiting, listener.refused) == (5, 2)
            assert await silent[0][0].read() == b""
            assert await silent[1][0].read() == b""
            assert await exchange(listener, trusting(pair), b"served") == b"served"
            for _, writer in silent:
                writer.transport.abort()

    run(body())


def test_failed_handshakes_do_not_affect_other_connections(
    run: Run, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with listening(config(pair)) as listener:
            assert isinstance(listener, TlsListener)
            _, gone = await asyncio.open_connection("127.0.0.1", listener.port)
            gone.close()
            assert await exchange(listener, None, b"\x16 this is no client hello " * 9) == b""
            while listener.waiting:
                await asyncio.sleep(0)
            assert await exchange(listener, trusting(pair), b"fine") == b"fine"

    with caplog.at_level(logging.INFO):
        run(body())
    assert "TLS handshake with 127.0.0.1" in caplog.text


def test_accept_continues_after_file_descriptors_ran_out(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    class Empty:
        """A listening socket of a process that has no file descriptor left for a while."""

        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.failures = 0

        def accept(self) -> Any:
            self.failures += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body() -> None:
        clock = VirtualClock()
        async with listening(config(pair), clock=clock) as listener:
            assert isinstance(listener, TlsListener)
            empty = Empty(listener._sockets[0])
            listener._accept(cast(socket.socket, empty))
            assert empty.failures == 1
            waiting = asyncio.ensure_future(exchange(listener, None, b"patient"))
            await clock.elapse(400)
            assert not waiting.done()
            await clock.elapse(200)
            assert await waiting == b"patient"

    asyncio.run(body())
    assert "raise the limit of open files" in caplog.text


def test_changed_certificate_serves_new_connections_and_keeps_old_ones(
    run: Run, pair: Pair, other: Pair, tmp_path: Path
) -> None:
    async def body() -> None:
        files = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
        for source, target in zip(pair, files, strict=True):
            shutil.copy(source, target)
        async with listening(config(files)) as listener:
            assert isinstance(listener, TlsListener)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", listener.port, ssl=trusting(pair)
            )
            assert not listener.tls.refresh()
            os.replace(shutil.copy(other.certificate, tmp_path / "new"), files.certificate)
            assert not listener.tls.refresh()  # the key is still the old one
            assert await exchange(listener, trusting(pair), b"old still") == b"old still"
            os.replace(shutil.copy(other.key, tmp_path / "new"), files.key)
            assert listener.tls.refresh()
            assert not listener.tls.refresh()
            assert await exchange(listener, trusting(other), b"new") == b"new"
            with pytest.raises(ssl.SSLCertVerificationError):
                await exchange(listener, trusting(pair), b"old")
            writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
            writer.transport.abort()

    run(body())


def test_listener_reloads_changed_files_periodically(
    pair: Pair, other: Pair, tmp_path: Path
) -> None:
    async def body() -> None:
        clock = VirtualClock()
        files = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
        for source, target in zip(pair, files, strict=True):
            shutil.copy(source, target)
        async with listening(config(files), clock=clock) as listener:
            assert isinstance(listener, TlsListener)
            for source, target in zip(other, files, strict=True):
                shutil.copy(source, target)
            await clock.elapse(5_001)
            while not listener.tls.loads:
                await asyncio.sleep(0)
            assert await exchange(listener, trusting(other), b"new") == b"new"

    asyncio.run(body())


@pytest.mark.parametrize("client_auth", ["optional", "require"])
def test_client_certificates_are_optional_or_required(
    run: Run, pair: Pair, other: Pair, client_auth: str
) -> None:
    async def body() -> None:
        tls = config(pair, client_auth=client_auth, client_ca=str(other.certificate))
        async with listening(tls) as listener:
            context = trusting(pair)
            context.maximum_version = ssl.TLSVersion.TLSv1_2  # refused within the handshake
            known = trusting(pair)
            known.load_cert_chain(other.certificate, other.key)
            assert await exchange(listener, known, b"known") == b"known"
            if client_auth == "optional":
                assert await exchange(listener, context, b"unknown") == b"unknown"
            else:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await exchange(listener, context, b"unknown")

    run(body())


def test_peer_calls_over_tls_and_checks_the_server_if_it_has_an_authority(
    run: Run, pair: Pair, other: Pair
) -> None:
    async def body() -> None:
        async with serving(echo, ssl=server_context(config(pair))) as server:
            for ca in ("", str(pair.certificate)):
                context = outgoing_context(TlsConfig(outgoing=True, outgoing_ca=ca))
                peer = Peer(server.address, ssl=context)
                assert (await peer.call(3, body=b"x" * 300_000, timeout_ms=5000)).code == 0
                await peer.close()
            wrong = TlsConfig(outgoing=True, outgoing_ca=str(other.certificate))
            peer = Peer(server.address, ssl=outgoing_context(wrong))
            with pytest.raises(PeerUntrusted, match="self-signed certificate"):
                await peer.call(3, timeout_ms=5000)
            await peer.close()

    run(body())


def test_outgoing_calls_are_plain_by_default() -> None:
    assert outgoing_context(TlsConfig()) is None


def test_key_with_password(tmp_path: Path) -> None:
    locked = make_pair(tmp_path, "locked", password="open sesame")
    assert server_context(config(locked, key_password="open sesame"))
    for wrong in ("", "guess"):
        with pytest.raises(TlsError, match=r"can't use tls\.certificate .* and tls\.key"):
            server_context(config(locked, key_password=wrong))


def test_every_bad_file_is_named_with_its_setting(pair: Pair, other: Pair, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no pem")
    cases = [
        (TlsConfig(mode="enforcing"), "tls.certificate is empty"),
        (
            config(Pair(tmp_path / "none", pair.key)),
            "tls.certificate .*none can.t be read",
        ),
        (config(Pair(pair.certificate, tmp_path / "none")), "tls.key .*none can't be read"),
        (config(Pair(pair.certificate, other.key)), "key values mismatch"),
        (config(Pair(junk, pair.key)), "can't use tls.certificate .*junk"),
        (config(pair, client_auth="require"), "tls.client_auth is require, but tls.client_ca is"),
        (
            config(pair, client_auth="require", client_ca=str(junk)),
            "tls.client_ca .*junk.pem can't be used",
        ),
    ]
    for tls, message in cases:
        with pytest.raises(TlsError, match=message) as caught:
            Tls(tls)
        assert caught.value.hint


def test_port_in_use_error_names_the_address(pair: Pair) -> None:
    async def body() -> None:
        async with listening(config(pair)) as listener:
            with pytest.raises(OSError, match=f"127.0.0.1:{listener.port}"):
                await listen(Echo, "127.0.0.1", listener.port, tls=Tls(config(pair)))

    asyncio.run(body())


def test_stalled_handshakes_do_not_block_new_connections(run: Run, pair: Pair) -> None:
    async def body() -> None:
        async with listening(config(pair), waiting_max=5) as listener:
            stalled = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(12)]
            for each in stalled:
                each.sendall(b"\x16")
            async with asyncio.timeout(20):
                while listener.refused < 7:
                    await asyncio.sleep(0.01)
            assert await exchange(listener, None, b"plain") == b"plain"
            assert await exchange(listener, trusting(pair), b"secret") == b"secret"
            for each in stalled:
                each.close()

    run(body())


def test_settings_that_need_a_configured_certificate_are_refused_without_one(pair: Pair) -> None:
    for bad in (TlsConfig(client_auth="require"), TlsConfig(key=str(pair.key))):
        with pytest.raises(TlsError, match=r"tls\.certificate is empty"):
            Tls(bad)
