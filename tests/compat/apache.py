"""Apache RocketMQ's own name server and broker as child processes.

    with NameServer(tmp / "ns") as names, Broker(tmp / "b", store, names.address) as broker:
        ...
        broker.stop()

Both take a scratch directory for their configuration, log and "home"; nothing is written outside
it and, for the broker, outside `store_dir`. `version` is one of maven.SERVER_VERSIONS. Leaving the
context kills the process: a clean shutdown takes many seconds, so a test that wants the store
asks for it by `stop`.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from . import maven

QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

# Small files, so that a few thousand messages roll every kind of file several times.
SMALL_STORE: Mapping[str, Any] = {
    "mappedFileSizeCommitLog": 1024 * 1024,
    "mappedFileSizeConsumeQueue": 6000,  # 300 entries of 20 bytes
    "maxHashSlotNum": 500,
    "maxIndexNum": 2000,
}


_GET_ROUTE = 105
_UPDATE_BROKER_CONFIG = 25


class Server:
    """A process that has announced that it is ready; a context manager."""

    version = maven.V5_4
    jvm: Sequence[str] = ("-Xms256m", "-Xmx1g", "-XX:MaxDirectMemorySize=512m", *QUICK_START)
    tls = False
    """Whether it accepts TLS, for which it generates a key at each start: more than a second."""
    _main_class: str
    _announcement: str

    def __init__(self, directory: Path, port: int, conf: Mapping[str, Any], timeout: float) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.log = directory / "log.txt"
        self._conf_file = directory / "server.conf"
        self._conf = dict(conf)
        self._directory = directory
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self.launched = 0.0
        """When the process was started last, by time.monotonic."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process id; only while running."""
        if self._process is None:
            raise RuntimeError(f"{self._main_class} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the process and return when it accepts requests. May be used again after stop."""
        self.begin()
        self.await_ready()

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        command, environment = self.prepare()  # again on every start: the broker may rewrite it
        with self.log.open("wb") as log:
            self.launched = time.monotonic()
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def await_ready(self) -> None:
        """Return when the process accepts requests."""
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Ask the process to shut down and wait until it has."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise TimeoutError(f"{self._main_class} did not stop:\n{self._log_tail()}") from None

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def prepare(self) -> tuple[list[str], dict[str, str]]:
        """Write the configuration file; the command line and its environment."""
        lines = [f"{key}={java_text(value)}\n" for key, value in self._conf.items()]
        self._conf_file.write_text("".join(lines))
        return self._command()

    def _command(self) -> tuple[list[str], dict[str, str]]:
        flags = (
            *self.jvm,
            f"-Duser.home={self._directory}",
            f"-Drocketmq.home.dir={self._directory}",
            f"-Drmq.logback.configurationFile={maven.JAVA_DIR / 'logback.xml'}",
            f"-Dtls.server.mode={'permissive' if self.tls else 'disabled'}",
        )
        command = maven.java_command(self._main_class, "-c", str(self._conf_file), jvm=flags)
        return command, maven.java_environment(self.version)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._is_ready():
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"{self._main_class} ended with {code}:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._main_class} did not start:\n{self._log_tail()}")
            time.sleep(0.05)

    def is_announced(self) -> bool:
        """Whether the process has printed that it is ready."""
        return self._announcement in self.log.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _is_ready(self) -> bool:
        return self.is_announced()

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class NameServer(Server):
    """Apache's name server."""

    _main_class = "org.apache.rocketmq.namesrv.NamesrvStartup"
    _announcement = "The Name Server boot success"

    def __init__(
        self, directory: Path, *, version: str = maven.V5_4, timeout: float = 60.0, **conf: Any
    ) -> None:
        self.version = version
        port = free_port()
        paths = {
            "kvConfigPath": directory / "kvConfig.json",
            "configStorePath": directory / "namesrv.properties",
        }
        super().__init__(directory, port, {"listenPort": port, **paths, **conf}, timeout)


class Broker(Server):
    """Apache's broker over the store in `store_dir` (created where missing).

    `conf` are lines of the broker's configuration file; they override what is set here: a master
    without timer wheel and with the file sizes of SMALL_STORE. The broker also binds port - 2
    and port + 1. It counts as started once it is known at `namesrv`. After `stop` the store is
    clean: `abort` is gone.
    """

    _main_class = "org.apache.rocketmq.broker.BrokerStartup"
    _announcement = " boot success"

    def __init__(
        self,
        directory: Path,
        store_dir: Path,
        namesrv: str,
        *,
        version: str = maven.V5_4,
        timeout: float = 60.0,
        **conf: Any,
    ) -> None:
        self.version = version
        port = free_port(below=2, above=1)
        self.store_dir = store_dir
        self.name = str(conf.get("brokerName", "apache"))
        self._namesrv = namesrv
        defaults: dict[str, Any] = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": self.name,
            "brokerId": 0,
            "brokerRole": "ASYNC_MASTER",
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "listenPort": port,
            "namesrvAddr": namesrv,
            "storePathRootDir": store_dir,
            "storePathCommitLog": store_dir / "commitlog",
            "flushDiskType": "ASYNC_FLUSH",
            "autoCreateTopicEnable": True,
            "autoCreateSubscriptionGroup": True,
            "timerWheelEnable": False,
            # A flush compares all slots of the wheel: a fifth of a core with the default of 1 s.
            "timerFlushIntervalMs": 60_000,
            # 5.4 spins until the first flush: ten seconds of a core by default.
            "transactionMetricFlushInterval": 200,
            # On a disk that is rather full it would delete our files.
            "cleanFileForciblyEnable": False,
            **SMALL_STORE,
        }
        super().__init__(directory, port, {**defaults, **conf}, timeout)

    def _is_ready(self) -> bool:
        if not super()._is_ready():
            return False
        # A broker has a topic of its own name.
        if request(self._namesrv, _GET_ROUTE, {"topic": self.name}) == 0:
            return True
        # Its first registration mostly comes before its connection to the name server, and the
        # next one ten seconds later. Setting this (to the default) makes it register at once.
        request(self.address, _UPDATE_BROKER_CONFIG, {}, b"brokerPermission=6\n")
        return False

    def stop(self) -> None:
        """As for any server; raises if the broker left `abort` behind."""
        running = self._process is not None
        super().stop()
        if running and (self.store_dir / "abort").exists():
            raise RuntimeError(f"the broker did not shut down cleanly:\n{self._log_tail()}")


def access_control(user: str, password: str, *, enabled: bool = True) -> dict[str, Any]:
    """The settings of a broker with access control, whose first super user is this one."""
    conf: dict[str, Any] = {
        "authenticationEnabled": enabled,
        "authorizationEnabled": enabled,
        "initAuthenticationUser": json.dumps({"username": user, "password": password}),
    }
    for area, noun in (("authentication", "Authentication"), ("authorization", "Authorization")):
        provider = f"org.apache.rocketmq.auth.{area}.provider"
        conf[f"{area}Provider"] = f"{provider}.Default{noun}Provider"
        conf[f"{area}MetadataProvider"] = f"{provider}.Local{noun}MetadataProvider"
    return conf


def free_port(below: int = 0, above: int = 0) -> int:
    """A port that, with so many ports below and above it, nobody is listening on just now."""
    for _ in range(200):
        # Under the range from which the kernel hands out client ports.
        port = random.randrange(12_000, 30_000)
        if all(_is_free(p) for p in range(port - below, port + above + 1)):
            return port
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def request(address: str, code: int, ext: dict[str, str], body: bytes = b"") -> int:
    """Send one request and return the response code."""
    header = json.dumps({"code": code, "opaque": 1, "extFields": ext, "version": 493}).encode()
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        sizes = (4 + len(header) + len(body), len(header))
        connection.sendall(b"".join(n.to_bytes(4, "big") for n in sizes) + header + body)
        with connection.makefile("rb") as stream:
            answer = stream.read(int.from_bytes(stream.read(4), "big"))
    size = int.from_bytes(answer[:4], "big") & 0xFFFFFF
    return int(json.loads(answer[4 : 4 + size])["code"])


def java_text(value: object) -> str:
    """A value as a line of RocketMQ's configuration has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class ControllerPorts(NamedTuple):
    """Where a controller listens: for brokers and DLedger, and for JRaft."""

    port: int
    raft_port: int


def controller_group(count: int) -> tuple[ControllerPorts, ...]:
    """The controllers of a group."""
    return tuple(ControllerPorts(free_port(), free_port()) for _ in range(count))


class Controller(Server):
    """Apache's controller, alone or one of a group, with the log of DLedger or of JRaft."""

    _main_class = "org.apache.rocketmq.controller.ControllerStartup"
    _announcement = "The Controller Server boot success"

    def __init__(
        self,
        directory: Path,
        *,
        version: str = maven.V5_4,
        kind: str = "DLedger",
        group: Sequence[ControllerPorts] = (),
        number: int = 0,
        timeout: float = 60.0,
        **conf: Any,
    ) -> None:
        self.version = version
        group = group or controller_group(1)
        addresses = [f"127.0.0.1:{one.port}" for one in group]
        raft = [f"127.0.0.1:{one.raft_port}" for one in group]
        peers = [f"n{index}-{address}" for index, address in enumerate(addresses)]
        defaults: dict[str, Any] = {
            "controllerType": kind,
            "controllerDLegerGroup": "group1",
            "controllerDLegerPeers": ";".join(peers),
            "controllerDLegerSelfId": f"n{number}",
            "controllerStorePath": directory / "store",
            "configStorePath": directory / "controller.properties",
            "mappedFileSize": 1024 * 1024,
            "scanInactiveMasterInterval": 500,
            "scanNotActiveBrokerInterval": 500,
            "jRaftServerId": raft[number],
            "jRaftInitConf": ",".join(raft),
            "jRaftControllerRPCAddr": ",".join(addresses),
        }
        super().__init__(directory, group[number].port, {**defaults, **conf}, timeout)
