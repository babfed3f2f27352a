"""A console without servers: its client answers from memory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx

from penstock.client.admin.async_admin import (
    BrokerAddress,
    BrokerRuntimeInfo,
    BrokerState,
    ClusterState,
    GroupInfo,
    GroupSettings,
    TopicInfo,
    TopicKind,
    TopicSettings,
)
from penstock.console.app import create_app
from penstock.console.console_context import Console, create_console
from penstock.console.console_settings import ConsoleSettings
from penstock.console.monitoring.cluster_snapshot import (
    ClusterSnapshot,
    MeasuredGroup,
    TopicFigures,
)
from penstock.console.monitoring.history import History

T = TypeVar("T")

BROKER = BrokerAddress("DefaultCluster", "broker-a", 0, "127.0.0.1:10911")
NOW_MS = 1_800_000_000_000
SETTINGS = TopicSettings(4, 4, 6, order=False, attributes={"message.type": "NORMAL"})
GROUP_SETTINGS = GroupSettings(
    consume_enabled=True, broadcast_enabled=True, orderly=False, from_min_enabled=True,
    retries_max=16, retry_queues=1, consume_timeout_minutes=15, notify_enabled=True,
    broker_id=0, broker_id_when_slow=1, attributes={},
)  # fmt: skip


class FakeAdmin:
    """The methods of AsyncAdmin that the tests need. `calls` has what was asked."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(
            clock=SimpleNamespace(now_ms=lambda: self.now_ms),
            with_namespace=lambda name: name,
            without_namespace=lambda name: name,
        )
        self.now_ms = NOW_MS
        self.closed = 0
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def nameservers(self) -> tuple[str, ...]:
        return ("127.0.0.1:9876",)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed += 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*positional: Any, **named: Any) -> Any:
            self.calls.append((name, positional, named))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer(*positional, **named) if callable(answer) else answer

        return call


def runtime(**values: Any) -> BrokerRuntimeInfo:
    """The runtime information of a broker; what is not given is unknown."""
    names = [name for name in BrokerRuntimeInfo.__dataclass_fields__ if name != "raw"]
    return BrokerRuntimeInfo(**{**dict.fromkeys(names), "raw": {}, **values})


def broker_state(address: BrokerAddress = BROKER, **values: Any) -> BrokerState:
    return BrokerState(address, runtime(**values))


def topic(name: str, kind: TopicKind = TopicKind.NORMAL) -> TopicInfo:
    return TopicInfo(name, kind, {"broker-a": SETTINGS})


def group(name: str) -> GroupInfo:
    return GroupInfo(name, False, {"broker-a": GROUP_SETTINGS})


def topic_figures(messages: int, **values: Any) -> TopicFigures:
    return TopicFigures(
        **{
            "at_ms": NOW_MS, "stored": messages, "messages": messages, "last_ms": NOW_MS,
            "rate_in": 1.0, **values,
        }
    )  # fmt: skip


def group_figures(lag: int | None, lag_ms: int | None, members: int | None = 1) -> MeasuredGroup:
    return MeasuredGroup(NOW_MS, lag, lag_ms, 1.0, members, ("orders",))


def snapshot(**values: Any) -> ClusterSnapshot:
    """A snapshot with one broker that answers."""
    cluster = ClusterState(("127.0.0.1:9876",), (broker_state(put_tps=5.0, disk_used=0.2),))
    return ClusterSnapshot(**{"at_ms": NOW_MS, "cluster": cluster, **values})


class TestedConsole:
    """A console, its fake client, and an HTTP client. Use it as a context manager."""

    __test__ = False

    def __init__(self, data: Path, **settings: Any) -> None:
        self.admin = FakeAdmin()
        self.console: Console = create_console(
            ConsoleSettings(data=data, **settings),
            lambda: self.admin,  # type: ignore[arg-type,return-value]
            lambda name, password: self.admin,  # type: ignore[arg-type,return-value]
        )
        self.console.watch = FakeWatch()  # type: ignore[assignment]
        host = settings.get("host", "127.0.0.1")
        transport = httpx.ASGITransport(create_app(self.console))
        self.client = httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8080")
        self._runner = asyncio.Runner()
        self.csrf = ""

    def come_from(self, address: str) -> None:
        """Later requests come from this address, without the cookie of earlier ones."""
        self.run(self.client.aclose())
        transport = httpx.ASGITransport(create_app(self.console), client=(address, 50_000))
        self.client = httpx.AsyncClient(transport=transport, base_url=self.client.base_url)

    def __enter__(self) -> TestedConsole:
        self.csrf = self.get("/session").json()["csrf"] or ""
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self.client.aclose())
        self.run(self.console.close())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def show(self, value: ClusterSnapshot) -> None:
        self.console.watch.snapshot = value

    def load(self, path: str, **headers: str) -> httpx.Response:
        """A page or a file."""
        return self.run(self.client.get(path, headers=headers))

    def get(self, path: str) -> httpx.Response:
        return self.load(f"/api{path}")

    def post(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        """A change as another site would send it: without anything that is not given."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.run(self.client.post(f"/api{path}", content=content, headers=named))

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """A change, with the CSRF token."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.run(
            self.client.request(
                method,
                f"/api{path}",
                json=body or {},
                headers={"x-penstock-csrf": self.csrf, **named},
            )
        )


class FakeWatch:
    """A watch that asks nobody."""

    def __init__(self) -> None:
        self.snapshot = ClusterSnapshot()
        self.history = History()
        self.updated = SimpleNamespace(is_set=lambda: True)
        self.refreshed = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def use(self) -> None:
        pass

    def lag_rounds_s(self) -> tuple[float, float]:
        return 5.0, 60.0

    def refresh(self) -> None:
        self.refreshed += 1
