"""Our own servers as child processes, with the interface of tests/compat/apache.py.

    with Up(tmp / "up") as up:  # `penstock up`: NameServer and brokers together
        ... up.address, up.broker_address ...
    with NameServer(tmp / "ns") as names, Broker(tmp / "b", store, names.address) as broker:
        broker.kill()
        broker.start()

A broker takes lines of RocketMQ's broker.conf as keywords, so that one test serves both kinds of
server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from . import apache


class Server(apache.Server):
    """A `penstock` command that has announced that it is ready."""

    _arguments: tuple[str, ...] = ()
    _settings: Mapping[str, str] = MappingProxyType({})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop cleanly, which takes no time here."""
        try:
            self.stop()
        except Exception:
            self.kill()
            if error is None:
                raise

    def _command(self) -> tuple[list[str], dict[str, str]]:
        # Settings of this machine's user must not reach the tests; the mode of the core must.
        kept = {"PENSTOCK_PURE", "PENSTOCK_EXPECT"}
        environment = {
            k: v for k, v in os.environ.items() if k in kept or not k.startswith("PENSTOCK_")
        }
        environment.update(self._settings)
        penstock = str(Path(sys.executable).with_name("penstock"))
        return [penstock, *self._main_class.split()[1:], *self._arguments], environment


class NameServer(Server):
    """`penstock nameserver`."""

    _main_class = "penstock nameserver"
    _announcement = "penstock nameserver is ready"

    def __init__(self, directory: Path, *, timeout: float = 30.0, **conf: Any) -> None:
        port = apache.free_port()
        super().__init__(directory, port, {"listenPort": port, **conf}, timeout)
        self._arguments = ("-c", str(self._conf_file))


class Controller(Server):
    """`penstock controller`."""

    _main_class = "penstock controller"
    _announcement = "penstock controller is ready"

    def __init__(self, directory: Path, *, etcd: str = "", timeout: float = 30.0) -> None:
        """Its state is in files, or in `etcd`."""
        port = apache.free_port(above=2)
        super().__init__(directory, port, {}, timeout)
        where = ("--etcd", etcd) if etcd else ("--data", str(directory / "data"))
        self._arguments = ("--port", str(port), *where)


class Broker(Server):
    """`penstock broker -c broker.conf` over the store in `store_dir`.

    `settings` are environment variables, for settings that broker.conf has no name for.
    """

    _main_class = "penstock broker"
    _announcement = " is ready on "

    def __init__(
        self,
        directory: Path,
        store_dir: Path,
        namesrv: str,
        *,
        timeout: float = 30.0,
        settings: Mapping[str, str] | None = None,
        **conf: Any,
    ) -> None:
        port = apache.free_port(above=2)
        self.store_dir = store_dir
        self.name = str(conf.get("brokerName", "penstock"))
        defaults: dict[str, Any] = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": self.name,
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "listenPort": port,
            "namesrvAddr": namesrv,
            "storePathRootDir": store_dir,
        }
        super().__init__(directory, port, {**defaults, **conf}, timeout)
        self._arguments = ("-c", str(self._conf_file))
        self._settings = settings or {}


class Up(Server):
    """`penstock up`: `address` is the NameServer's, `broker_address` the first broker's."""

    _main_class = "penstock up"
    _announcement = "penstock is up"

    def __init__(
        self,
        directory: Path,
        *options: str,
        brokers: int = 1,
        replicas: int = 1,
        timeout: float = 30.0,
    ) -> None:
        port = apache.free_port()
        broker_port = apache.free_port(above=10 * brokers * replicas)
        super().__init__(directory, port, {}, timeout)
        self.broker_address = f"127.0.0.1:{broker_port}"
        self._arguments = (
            *("--data", str(directory / "data"), "--host", "127.0.0.1"),
            *("--nameserver-port", str(port), "--broker-port", str(broker_port)),
            *("--brokers", str(brokers), "--replicas", str(replicas), "--no-console"),
            *options,
        )
