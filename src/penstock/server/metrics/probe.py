"""A minimal HTTP server for monitoring: /metrics, /healthz, /readyz.

| path | response |
|---|---|
| `/metrics` | metrics in Prometheus' text format |
| `/healthz` | 200 while the process and its event loop run |
| `/readyz` | 200, or 503 with the reason why the server is not ready |

One request per connection, GET or HEAD; bodies are not read. Metrics are read in the event loop, in
slices, and written as text in a thread, so that many topics do not delay messages. If there are too
many connections, the one that has waited longest without a complete request is closed: clients that
send nothing do not shut out others.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
import msgspec

from penstock.clock import Clock, LoopClock, finish_within
from penstock.metrics import CONTENT_TYPE, Family, Registry
from penstock.server.metrics.loop_lag import LoopLag

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8 * 1024
REQUEST_MS = 5_000
RESPONSE_MS = 15_000
CONNECTIONS_MAX = 64
BACKLOG = 256
SAMPLES_PER_SLICE = 1_000
"""Samples of metrics that are read per loop iteration: a few milliseconds at most."""

_JSON = "application/json"


class Page(NamedTuple):
    """A response."""

    status: HTTPStatus
    body: bytes
    content_type: str = _JSON


async def serve_probe(
    host: str,
    port: int,
    registry: Registry,
    not_ready: Callable[[], str | None],
    *,
    clock: Clock | None = None,
) -> "Probe":
    """Serve this port until closed; `not_ready` returns the reason, or None."""
    probe = Probe(registry, not_ready, clock or LoopClock())
    try:
        await probe.listen(host, port)
    except OSError as error:
        text = f"can't serve /metrics on {host or '*'}:{port} (probe_port): {error.strerror}"
        raise OSError(error.errno, text) from None
    return probe


class Probe:
    """The HTTP server; made by `serve_probe`."""

    port: int

    def __init__(
        self, registry: Registry, not_ready: Callable[[], str | None], clock: Clock
    ) -> None:
        self._registry = registry
        self._not_ready = not_ready
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Those of them whose request is not complete, in the order of their arrival.
        self._incomplete: dict[asyncio.Task[None], asyncio.BaseTransport] = {}
        self._failed_metrics: set[str] = set()
        self._scraping = asyncio.Lock()
        self._loop_lag = LoopLag(registry)

    async def listen(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(
            self._connected, host or None, port, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._loop_lag.start()

    async def close(self) -> None:
        """Stop listening and close the connections."""
        self._loop_lag.stop()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- connections

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX and not self._close_oldest():
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        self._incomplete[task] = writer.transport
        task.add_done_callback(self._done)

    def _close_oldest(self) -> bool:
        """Close the oldest connection without a complete request; False if there is none."""
        task = next(iter(self._incomplete), None)
        if task is None:
            return False
        transport = self._incomplete.pop(task)
        transport.abort()  # type: ignore[attr-defined]
        task.cancel()
        self._tasks.discard(task)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._incomplete.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
            writer.close()
            await finish_within(self._clock, RESPONSE_MS, writer.wait_closed())
        except (OSError, TimeoutError):
            log.debug("a probe's client disconnected or did not read its response")
        except Exception:
            log.exception("a probe failed")
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        method = b""
        try:
            request = await finish_within(self._clock, REQUEST_MS, _read_request(http, reader))
            if request is None:
                return
            task = asyncio.current_task()
            assert task is not None
            self._incomplete.pop(task, None)
            method, page = request.method, await self._page(request)
        except h11.RemoteProtocolError as error:
            page = _refusal(HTTPStatus(error.error_status_hint), f"not a valid request: {error}")
        except TimeoutError:
            page = _refusal(HTTPStatus.REQUEST_TIMEOUT, f"no request within {REQUEST_MS} ms")
        writer.write(_encode(http, page, with_body=method != b"HEAD"))
        await finish_within(self._clock, RESPONSE_MS, writer.drain())

    # --- pages

    async def _page(self, request: h11.Request) -> Page:
        path = request.target.decode("latin-1").partition("?")[0]
        if path not in ("/metrics", "/healthz", "/readyz"):
            reason = "the paths are /metrics, /healthz and /readyz"
            return _refusal(HTTPStatus.NOT_FOUND, reason)
        if request.method not in (b"GET", b"HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD")
        if path == "/metrics":
            return Page(HTTPStatus.OK, await self._metrics(), CONTENT_TYPE)
        if path == "/healthz":
            return _json(HTTPStatus.OK, {"status": "ok"})
        cause = self._not_ready()
        if cause is not None:
            unready = {"ready": False, "reason": cause}
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, unready)
        return _json(HTTPStatus.OK, {"ready": True})

    async def _metrics(self) -> bytes:
        """All metrics as text. One scrape at a time: the next one waits."""
        async with self._scraping:
            for prepare in self._registry.preparations:
                try:
                    await prepare()
                except Exception:
                    self._report("a preparation", prepare.__qualname__)
            found: list[tuple[Family, list[Any]]] = []
            for family in self._registry.families:
                try:
                    samples = await _in_slices(family.samples())
                except Exception:  # one failing metric must not hide the others
                    self._report("the metric", family.name)
                    continue
                found.append((family, samples))
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, _write, found, self._registry.common)

    def _report(self, what: str, name: str) -> None:
        if name not in self._failed_metrics:
            self._failed_metrics.add(name)
            log.exception("can't read %s %s", what, name)


async def _in_slices(samples: Iterable[Any]) -> list[Any]:
    """A list of the samples; other work is done in between."""
    if isinstance(samples, list):
        return samples
    found: list[Any] = []
    for sample in samples:
        found.append(sample)
        if len(found) % SAMPLES_PER_SLICE == 0:
            await asyncio.sleep(0)
    return found


def _write(found: list[tuple[Family, list[Any]]], common: str) -> bytes:
    """Write metrics as text, in a thread."""
    lines = [line for family, samples in found for line in family.lines(common, samples)]
    return "".join(lines).encode("utf-8", "replace")


def _json(status: HTTPStatus, value: object) -> Page:
    return Page(status, msgspec.json.encode(value) + b"\n")


def _refusal(status: HTTPStatus, reason: str) -> Page:
    return _json(status, {"error": reason})


async def _read_request(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The request, or None if the client closes the connection first."""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(REQUEST_BYTES_MAX))
        else:
            return event if isinstance(event, h11.Request) else None


def _encode(http: h11.Connection, page: Page, *, with_body: bool) -> bytes:
    headers = [
        ("Content-Type", page.content_type),
        ("Content-Length", str(len(page.body))),
        ("Cache-Control", "no-store"),
        ("Connection", "close"),
    ]
    if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))
    head = h11.Response(
        status_code=page.status.value, headers=headers, reason=page.status.phrase.encode()
    )
    data = http.send(head) or b""
    return data + page.body if with_body else data
