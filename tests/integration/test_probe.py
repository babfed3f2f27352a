"""The probe server: three pages, and strict limits for everything else."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.metrics import Registry
from penstock.server.metrics.probe import CONNECTIONS_MAX, REQUEST_BYTES_MAX, Probe, serve_probe
from penstock.testing.virtual_clock import VirtualClock
from tests.integration.loops import Run, run

__all__ = ["run"]


def registry() -> Registry:
    made = Registry({"node": "x"})
    made.gauge("answer", "The answer.", read=lambda: 42)
    return made


@asynccontextmanager
async def probe(
    metrics: Registry | None = None, ready: Callable[[], str | None] = lambda: None,
    clock: VirtualClock | None = None,
) -> AsyncIterator[Probe]:  # fmt: skip
    served = await serve_probe("127.0.0.1", 0, metrics or registry(), ready, clock=clock)
    try:
        yield served
    finally:
        await served.close()


async def ask(served: Probe, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), headers, body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nUser-Agent: test\r\n\r\n".encode()


def test_health_readiness_and_metrics_pages(run: Run) -> None:
    async def body() -> None:
        async with probe() as served:
            status, headers, text = await ask(served, get("/metrics?name=x"))
            assert status == 200
            assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert int(headers["Content-Length"]) == len(text)
            assert b'answer{node="x"} 42\n' in text
            for path, value in (("/healthz", {"status": "ok"}), ("/readyz", {"ready": True})):
                status, headers, text = await ask(served, get(path))
                assert (status, json.loads(text)) == (200, value)
                assert headers["Content-Type"] == "application/json"

    run(body())


def test_the_readiness_page_has_a_reason(run: Run) -> None:
    async def body() -> None:
        async with probe(ready=lambda: "the disk is full") as served:
            status, _, text = await ask(served, get("/readyz"))
            assert status == 503
            assert json.loads(text) == {"ready": False, "reason": "the disk is full"}
            assert (await ask(served, get("/healthz")))[0] == 200

    run(body())


def test_head_is_get_without_the_body(run: Run) -> None:
    async def body() -> None:
        async with probe() as served:
            status, headers, text = await ask(served, get("/metrics", "HEAD"))
            assert (status, text) == (200, b"")
            assert int(headers["Content-Length"]) > 0

    run(body())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/"), 404),
        (get("/metrics/"), 404),
        (get("/metrics", "POST"), 405),
        (get("/readyz", "DELETE"), 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics SMTP/1.0\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            400,
        ),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 2 * REQUEST_BYTES_MAX + b"\r\n\r\n", 431),
    ],
)
def test_invalid_requests_are_refused(run: Run, request_bytes: bytes, status: int) -> None:
    async def body() -> None:
        async with probe() as served:
            found, headers, text = await ask(served, request_bytes)
            assert found == status
            assert json.loads(text)["error"]
            assert (headers.get("Allow") == "GET, HEAD") == (status == 405)
            assert (await ask(served, get("/healthz")))[0] == 200

    run(body())


def test_slow_client_is_disconnected() -> None:
    async def body() -> None:
        clock = VirtualClock()
        async with probe(clock=clock) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"GET /met")
            await clock.elapse(4_000)
            assert not reader.at_eof()
            await clock.elapse(1_001)
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    asyncio.run(body())


def test_clients_that_send_nothing_do_not_shut_out_others(run: Run) -> None:
    async def body() -> None:
        async with probe() as served:
            silent = [
                await asyncio.open_connection("127.0.0.1", served.port)
                for _ in range(2 * CONNECTIONS_MAX)
            ]
            for _, writer in silent[::2]:
                writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            for _ in range(CONNECTIONS_MAX):
                assert (await ask(served, get("/healthz")))[0] == 200
            assert len(served._tasks) <= CONNECTIONS_MAX
            with suppress(ConnectionResetError):
                assert await silent[0][0].read() == b""  # the oldest ones were closed
            for _, writer in silent:
                writer.close()

    run(body())


def test_failing_metric_does_not_hide_others(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> float:
        raise LookupError("no such metric")

    async def body() -> None:
        metrics = Registry()
        metrics.gauge("first", "First.", read=lambda: 1)
        metrics.gauge("broken", "Broken.", read=broken)
        metrics.gauge("last", "Last.", read=lambda: 2)
        async with probe(metrics) as served:
            for _ in range(2):
                status, _, text = await ask(served, get("/metrics"))
                assert status == 200
                assert b"first 1" in text
                assert b"last 2" in text
                assert b"broken" not in text

    with caplog.at_level(logging.ERROR):
        run(body())
    assert caplog.text.count("can't read the metric broken") == 1


def test_event_loop_runs_while_many_metrics_are_written() -> None:
    async def body() -> None:
        turns = 0
        seen: list[int] = []

        def many() -> Iterator[tuple[tuple[str], int]]:
            return (((str(n),), n) for n in range(40_000))

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        metrics = Registry()
        metrics.gauge("before", "Before.", read=lambda: seen.append(turns) or 0)  # type: ignore[func-returns-value]
        metrics.gauge("many", "Many.", ("n",), read=many)
        metrics.gauge("after", "After.", read=lambda: seen.append(turns) or 0)  # type: ignore[func-returns-value]
        async with probe(metrics) as served:
            counting = asyncio.ensure_future(count())
            await ask(served, get("/metrics"))
            counting.cancel()
        assert seen[1] - seen[0] >= 30

    asyncio.run(body())


def test_port_in_use_names_the_setting(run: Run) -> None:
    async def body() -> None:
        async with probe() as served:
            with pytest.raises(OSError, match="probe_port"):
                await serve_probe("127.0.0.1", served.port, registry(), lambda: None)

    run(body())
