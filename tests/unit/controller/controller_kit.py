"""A controller without sockets and files: its states are a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.config import ControllerConfig, LiveSettings, Settings
from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, Living
from penstock.controller.controller import Controller
from penstock.controller.decisions import ControllerDecision
from penstock.rpc.answers import ClientId, Reply, WhenDone
from penstock.rpc.command import Command

NOW_MS = 1_700_000_000_000
ADDRESS = "controller:9878"


class Done:
    """Work that is done already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        callback(self)

    def result(self) -> Any:
        return self._value


class TableStates:
    """States in a table. A replica that has sent a heartbeat lives."""

    def __init__(self) -> None:
        self.table: dict[str, BrokerSet] = {}
        self.living: dict[str, dict[int, LiveReplica]] = {}
        self.heartbeats: list[Heartbeat] = []
        self.elected: list[BrokerSet] = []
        self.isolated = ""

    def decide(
        self, name: str, decide: Callable[[BrokerSet | None, Living], ControllerDecision]
    ) -> Done:
        decision = decide(self.table.get(name), self.living.get(name, {}))
        if decision.changed:
            self.table.pop(name, None)
            if decision.state is not None:
                self.table[name] = decision.state
        if decision.elected and decision.state is not None:
            self.elected.append(decision.state)
        return Done(decision)

    def read(self, names: Iterable[str]) -> Done:
        known = [name for name in names if name in self.table]
        return Done({name: (self.table[name], self.living.get(name, {})) for name in known})

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        self.heartbeats.append(heartbeat)
        self.living.setdefault(heartbeat.name, {})[heartbeat.replica_id] = heartbeat.live
        return self.isolated

    def disconnected(self, client: ClientId) -> None:
        pass


class ControllerFixture:
    """A controller with its own time."""

    def __init__(self, **config: Any) -> None:
        self.live = LiveSettings(Settings(controller=ControllerConfig(**config)), "controller")
        self.states = TableStates()
        self.controller = Controller(self.live, self.states, ADDRESS)

    def ask(self, code: int, body: bytes = b"", **ext: str) -> Reply:
        """The response to a request."""
        answer = self.controller.handle(Command(code, ext, body, client=1, now_ms=NOW_MS))
        if isinstance(answer, WhenDone):
            answer = answer.then(answer.work.result())
        assert isinstance(answer, Reply)
        return answer
