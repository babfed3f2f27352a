"""Outgoing calls: responses reach their callers, and every failure has its error."""

import asyncio
import logging
from collections.abc import Mapping

import pytest

from penstock.errors import PeerError, PeerLost, PeerTimeout, PeerUnreachable, SystemBusy
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Peer, PeerRequest, Response, split_address
from penstock.wire.frame import BINARY, JSON, Request
from tests.integration.loops import Frame, Run, Wire, echo, run, serving

__all__ = ["run"]


def test_responses_are_matched_to_calls_in_any_order(run: Run) -> None:
    async def backwards(wire: Wire) -> None:
        frames = [await wire.read() for _ in range(50)]
        for frame in reversed(frames):
            wire.answer(frame, ext=frame.ext, body=frame.body)

    async def body() -> None:
        async with serving(backwards) as server:
            peer = Peer(server.address)
            answers = await asyncio.gather(
                *(
                    peer.call(
                        300 + n, {"n": str(n)}, b"x" * n, timeout_ms=5000,
                        encoding=BINARY if n % 2 else JSON,
                    )
                    for n in range(50)
                )
            )  # fmt: skip
            assert [(a.ext["n"], len(a.body)) for a in answers] == [(str(n), n) for n in range(50)]
            assert len(server.wires) == 1  # one connection for all calls
            await peer.close()

    run(body())


def test_response_with_an_error_code_is_returned(run: Run) -> None:
    async def body() -> None:
        async with serving(echo) as server:
            peer = Peer(server.address)
            answer = await peer.call(17, timeout_ms=5000)
            assert (answer.code, answer.remark, answer.version, answer.language) == (
                2, "heard", 493, 3,
            )  # fmt: skip
            await peer.close()

    run(body())


@pytest.mark.parametrize("size", [0, 65_000, 70_000, 8 * 1024 * 1024])
def test_large_frames_are_sent_and_received(run: Run, size: int) -> None:
    async def body() -> None:
        async with serving(echo) as server:
            peer = Peer(server.address)
            sent = bytes(range(256)) * (size // 256)
            answers = await asyncio.gather(
                *(peer.call(3, {}, sent, timeout_ms=20_000) for _ in "ab")
            )
            assert all(answer.body == sent for answer in answers)
            assert (await peer.call(3, body=b"small", timeout_ms=5000)).body == b"small"
            await peer.close()

    run(body())


def test_lost_connection_fails_calls_at_once_and_the_next_call_reconnects(run: Run) -> None:
    async def body() -> None:
        lost: list[int] = []

        async def hang_up(wire: Wire) -> None:
            while len(server.wires) == 1:
                if (await wire.read()).code == 99:
                    return
            await echo(wire)

        async with serving(hang_up) as server:
            peer = Peer(server.address, on_lost=lambda: lost.append(1))
            waiting = [asyncio.ensure_future(peer.call(3, timeout_ms=600_000)) for _ in range(3)]
            await peer.oneway(99, timeout_ms=5000)
            for call in waiting:
                with pytest.raises(PeerLost) as caught:
                    await call
            assert caught.value.address == server.address
            assert caught.value.retry
            assert not peer.connected
            assert lost == [1]
            assert (await peer.call(3, timeout_ms=5000)).code == 0
            await peer.close()
            assert lost == [1]

    run(body())


def test_late_response_to_a_timed_out_call_is_ignored() -> None:
    async def body() -> None:
        clock = VirtualClock()
        first: list[Frame] = []

        async def late(wire: Wire) -> None:
            first.append(await wire.read())
            second = await wire.read()
            wire.answer(first[0], body=b"late")
            wire.answer(second, body=b"in time")
            await wire.read()

        async with serving(late) as server:
            peer = Peer(server.address, clock=clock)
            call = asyncio.ensure_future(peer.call(3, timeout_ms=1000))
            while not first:
                await asyncio.sleep(0)
            await clock.elapse(1001)
            with pytest.raises(PeerTimeout, match="no response to request 3 within 1000 ms"):
                await call
            assert peer.connected  # a short wait does not close the connection
            assert (await peer.call(3, timeout_ms=1000)).body == b"in time"
            await peer.close()
            assert clock.pending() == 0

    asyncio.run(body())


def test_silent_connection_is_closed_after_a_long_wait() -> None:
    async def body() -> None:
        clock = VirtualClock()
        heard = asyncio.Event()

        async def silent(wire: Wire) -> None:
            await wire.read()
            await wire.read()
            heard.set()
            await wire.read()

        async with serving(silent) as server:
            peer = Peer(server.address, clock=clock)
            calls = [asyncio.ensure_future(peer.call(3, timeout_ms=ms)) for ms in (5000, 60_000)]
            await heard.wait()
            await clock.elapse(5001)
            with pytest.raises(PeerTimeout):
                await calls[0]
            with pytest.raises(PeerLost, match="nothing was received for 5000 ms"):
                await calls[1]
            assert not peer.connected
            await peer.close()

    asyncio.run(body())


def test_error_of_an_unreachable_server_has_the_reason(run: Run) -> None:
    async def body() -> None:
        async with serving(echo) as server:
            address = server.address
        peer = Peer(address)
        with pytest.raises(PeerUnreachable, match="refused") as caught:
            await peer.call(3, timeout_ms=5000)
        assert caught.value.address == address
        assert "check the address" in caught.value.remark()
        nowhere = Peer("no-such-host.invalid:9876")
        with pytest.raises(PeerUnreachable, match=r"no-such-host\.invalid:9876"):
            await nowhere.call(3, timeout_ms=20_000)
        await peer.close()
        with pytest.raises(PeerUnreachable, match="closed by this client"):
            await peer.call(3, timeout_ms=5000)

    run(body())


@pytest.mark.parametrize(
    "junk",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x7f\xff\xff\xff\0\0\0\0", b"\0\0\0\x08\x05\0\0\0aaaa"],
    ids=["http", "huge", "encoding"],
)
def test_bad_frame_closes_the_connection(
    run: Run, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def spoil(wire: Wire) -> None:
        await wire.read()
        wire.writer.write(junk)
        await wire.read()

    async def body() -> None:
        async with serving(spoil) as server:
            peer = Peer(server.address)
            with pytest.raises(PeerLost, match="invalid frame"):
                await peer.call(3, timeout_ms=5000)
            await peer.close()

    with caplog.at_level(logging.WARNING):
        run(body())
    assert "invalid frame" in caplog.text


def test_requests_of_the_server_are_answered(run: Run) -> None:
    async def body() -> None:
        answers: list[Frame] = []
        asked: list[PeerRequest] = []
        done = asyncio.Event()

        async def asks(wire: Wire) -> None:
            wire.answer(await wire.read())
            wire.ask(40, 1, flag=2)
            wire.ask(307, 2, ext={"clientId": "c"}, encoding=BINARY)
            wire.ask(309, 3, body=b"now or later")
            wire.ask(999, 4)
            answers.extend([await wire.read() for _ in range(3)])
            done.set()
            await wire.read()

        def on_request(ask: PeerRequest) -> Response | None:
            asked.append(ask)
            if ask.code == 307:
                return Response(0, {"seen": ask.ext["clientId"]}, b"info")
            if ask.code == 999:
                raise LookupError("fault of ours")
            return None

        async with serving(asks) as server:
            peer = Peer(server.address, on_request=on_request)
            await peer.call(34, timeout_ms=5000)
            while len(asked) < 4:
                await asyncio.sleep(0)
            peer.reply(asked[0], Response())  # one-way: no caller waits for it
            peer.reply(asked[2], Response(0, body=b"later"))
            await done.wait()
            got = {a.opaque: (a.code, a.flag, a.ext, a.body) for a in answers}
            assert got[2] == (0, 1, {"seen": "c"}, b"info")
            assert got[3] == (0, 1, {}, b"later")
            assert got[4][0] == 1
            assert [ask.oneway for ask in asked] == [True, False, False, False]
            await peer.close()
            peer.reply(asked[2], Response())  # too late to have an effect

    run(body())


def test_request_without_a_handler_is_refused(run: Run) -> None:
    async def body() -> None:
        answered = asyncio.get_running_loop().create_future()

        async def asks(wire: Wire) -> None:
            wire.answer(await wire.read())
            wire.ask(220, 8)
            answered.set_result(await wire.read())

        async with serving(asks) as server:
            peer = Peer(server.address)
            await peer.call(34, timeout_ms=5000)
            refusal = await answered
            assert (refusal.code, refusal.opaque) == (3, 8)
            await peer.close()

    run(body())


def test_every_request_is_signed(run: Run) -> None:
    def sign(code: int, ext: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        return {**ext, "Signature": f"{code}:{len(body)}"}

    async def body() -> None:
        async with serving(echo) as server:
            peer = Peer(server.address, sign=sign)
            answer = await peer.call(12, {"a": "b"}, b"four", timeout_ms=5000)
            assert answer.ext == {"a": "b", "Signature": "12:4"}
            await peer.close()

    run(body())


def test_callers_wait_while_the_server_does_not_read(run: Run) -> None:
    async def body() -> None:
        go = asyncio.Event()

        async def slow(wire: Wire) -> None:
            await go.wait()
            await echo(wire)

        async with serving(slow, limit=1024) as server:
            peer = Peer(server.address)
            calls = [
                asyncio.ensure_future(peer.call(3, body=bytes(2 << 20), timeout_ms=60_000))
                for _ in range(12)
            ]
            connection = None
            while connection is None or not connection.full:
                connection = peer._connection
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert connection.transport is not None
            # All twelve would be 24 MiB: most callers are still waiting to write.
            assert connection.transport.get_write_buffer_size() < 6 << 20
            with pytest.raises(PeerTimeout, match="read nothing"):
                await peer.oneway(3, timeout_ms=20)
            go.set()
            assert all(len(answer.body) == 2 << 20 for answer in await asyncio.gather(*calls))
            await peer.close()

    run(body())


def test_closing_fails_waiting_calls(run: Run) -> None:
    async def body() -> None:
        heard = asyncio.Event()

        async def silent(wire: Wire) -> None:
            await wire.read()
            heard.set()
            await wire.read()

        async with serving(silent) as server:
            peer = Peer(server.address)
            call = asyncio.ensure_future(peer.call(3, timeout_ms=60_000))
            await heard.wait()
            await peer.close()
            with pytest.raises(PeerLost, match="closed by this client"):
                await call

    run(body())


def test_call_to_a_server_that_closes_at_once_connects_once(run: Run) -> None:
    async def hang_up(wire: Wire) -> None:
        pass

    async def body() -> None:
        async with serving(hang_up) as server:
            for _ in range(5):
                peer = Peer(server.address)
                with pytest.raises(PeerError):
                    await peer.call(3, timeout_ms=60_000)
                await peer.close()
            assert len(server.wires) <= 5

    run(body())


def test_closing_while_connecting_leaks_no_connection(run: Run) -> None:
    async def body() -> None:
        ended = 0

        async def until_the_end(wire: Wire) -> None:
            nonlocal ended
            await wire.reader.read()
            ended += 1

        async with serving(until_the_end) as server:
            for turns in range(12):
                peer = Peer(server.address)
                call = asyncio.ensure_future(peer.call(3, timeout_ms=60_000))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await peer.close()
                with pytest.raises(PeerError, match="closed by this client"):
                    await call
            async with asyncio.timeout(10):
                while ended < len(server.wires):
                    await asyncio.sleep(0)

    run(body())


def test_cancelled_caller_is_cancelled_even_if_the_peer_is_closed_meanwhile(run: Run) -> None:
    async def body() -> None:
        async with serving(echo) as server:
            peer = Peer(server.address)
            call = asyncio.ensure_future(peer.call(3, timeout_ms=60_000))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            await peer.close()
            with pytest.raises(asyncio.CancelledError):
                await call

    run(body())


def test_name_that_can_not_be_looked_up_is_unreachable(run: Run) -> None:
    async def body() -> None:
        peer = Peer(f"{'a' * 64}..b:9876")
        with pytest.raises(PeerUnreachable, match="can't connect"):
            await peer.call(3, timeout_ms=5000)
        await peer.close()

    run(body())


def test_error_raised_by_a_reader_is_passed_to_the_caller(run: Run) -> None:
    async def body() -> None:
        def refuse(request: Request) -> None:
            raise SystemBusy("so it is")

        async with serving(echo) as server:
            peer = Peer(server.address)
            with pytest.raises(SystemBusy, match="so it is"):
                await peer.read(3, reader=refuse, timeout_ms=5000)
            assert (await peer.call(3, timeout_ms=5000)).code == 0
            assert len(server.wires) == 1  # the connection stays open
            await peer.close()

    run(body())


@pytest.mark.parametrize(
    ("text", "pair"),
    [("a:1", ("a", 1)), ("[::1]:9876", ("::1", 9876)), ("::1:9876", ("::1", 9876)),
     (" 10.0.0.1:80 ", ("10.0.0.1", 80))],
)  # fmt: skip
def test_addresses_are_parsed(text: str, pair: tuple[str, int]) -> None:
    assert split_address(text) == pair


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:b", "a:65536", "a:-1"])
def test_invalid_address_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address of the form host:port"):
        split_address(text)
