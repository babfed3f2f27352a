"""`penstock up`: runs a NameServer and brokers on this machine."""

import os
import string
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from penstock.cli.servers import startup
from penstock.config.doc import PORT_MAX
from penstock.config.settings import Settings
from penstock.config.sources import LoadedSettings
from penstock.errors import BadSetting
from penstock.extras import how_to_install

PORTS_APART = 10
"""The distance between the ports of two brokers: +1 is for replication, +2 for the probe, -2 for
the VIP channel."""
BROKERS_MAX = len(string.ascii_lowercase)
REPLICAS_MAX = 8
CONTROLLED_REPLICAS = 3
"""From this number of replicas on, a controller elects masters. With two, nothing could be accepted
after a failure: each message must have two copies."""
CONTROLLER_PORT_APART = 2
"""From the port of the NameServer to that of the controller, as in RocketMQ."""
_WILDCARDS = ("0.0.0.0", "::", "")

EXAMPLE = """
Try it from Python:

  from penstock import Consumer, Message, Producer

  with Producer("{address}") as producer:
      print(producer.send(Message("Greetings", "Hello, Penstock")))

  consumer = Consumer("{address}", group="greeted", start_at="first")

  @consumer.on("Greetings")
  def greet(message):
      print(message.body.decode())

  consumer.run()  # until Ctrl-C

or from a shell:
  penstock send -n {address} Greetings "Hello, Penstock"

or with RocketMQ's mqadmin:
  mqadmin updateTopic -n {address} -c {cluster} -t Greetings
"""


@click.command(short_help="Run a NameServer and brokers on this machine.")
@startup.config_option
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of all stored data.  [default: penstock-data]",
)
@click.option(
    "--host", help="Address to listen on.  [default: 127.0.0.1, or 0.0.0.0 with a broker.conf]"
)
@click.option(
    "--nameserver-port", type=startup.PORT, help="Port of the NameServer.  [default: 9876]"
)
@click.option(
    "--broker-port",
    type=startup.PORT,
    help="Port of the first broker; the others use +10, +20, …  [default: 10911]",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, BROKERS_MAX),
    default=1,
    show_default=True,
    help="Number of brokers. Each is a process and uses one core.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, REPLICAS_MAX),
    default=1,
    show_default=True,
    help="Number of copies of each message: a master and its slaves. Each is a process. With 3 or "
    "more, a controller elects another master if the master fails.",
)
@click.option(
    "--etcd",
    metavar="HOST:PORT,…",
    help="Keep the state of the controller in this etcd instead of a file.",
)
@click.option(
    "--console-port",
    type=startup.PORT,
    default=8080,
    show_default=True,
    help="Port of the web console, which listens on 127.0.0.1.",
)
@click.option("--no-console", is_flag=True, help="Do not start the web console.")
@click.option("--announce", metavar="HOST", help="Address that clients connect to.")
@startup.log_option
def up(
    config_file: Path | None,
    data: Path | None,
    host: str | None,
    nameserver_port: int | None,
    broker_port: int | None,
    brokers: int,
    replicas: int,
    etcd: str | None,
    console_port: int,
    no_console: bool,
    announce: str | None,
    log_form: str,
) -> int:
    """Run a NameServer and brokers until SIGTERM or Ctrl-C.

    A line on stdout that starts with "penstock is up" reports that all servers are ready.
    """
    from penstock.cli.servers.supervisor import ChildProcess, ConsoleProcess, supervise
    from penstock.cli.terminal import say_if_uncompiled

    flags = {
        "nameserver.host": ("--host", host),
        "nameserver.port": ("--nameserver-port", nameserver_port),
        "broker.host": ("--host", host),
        "broker.port": ("--broker-port", broker_port),
        "broker.announce": ("--announce", announce),
        "controller.etcd": ("--etcd", etcd),
    }
    loaded = startup.load_settings(config_file, "broker", flags)
    layout = ClusterLayout(loaded, data, brokers, replicas)
    startup.prepare(loaded, log_form, "penstock")
    say_if_uncompiled()

    async def main() -> None:
        children: list[ChildProcess] = []
        for number, member in enumerate(layout.members):
            # Slaves are started later: the NameServer tells them where their master is. Replicas
            # with a controller are started together, because it elects one of them.
            later = member.slave and not layout.controlled
            after = children[layout.master_of(member)] if later else None
            command = layout.command(number, config_file, log_form)
            children.append(ChildProcess(str(member), command, layout.environ(number), after))
        wanted = not no_console and _has_console()
        await supervise(
            layout.settings,
            children,
            lambda: startup.say(layout.announcement()),
            with_controller=layout.controlled,
            console=ConsoleProcess(
                layout.console_command(console_port, log_form), layout.console_environ()
            )
            if wanted
            else None,
        )

    startup.serve(main)
    return 0


def _has_console() -> bool:
    """Whether the packages of the web console are installed; says how to get them if not."""
    if all(find_spec(name) is not None for name in ("starlette", "uvicorn")):
        return True
    print(
        f"penstock: the web console is not installed: {how_to_install('console')}", file=sys.stderr
    )
    return False


class LocalBroker(NamedTuple):
    """A broker of `penstock up`; `slave` is the broker id of a slave, and 0 for a master."""

    name: str
    slave: int

    def __str__(self) -> str:
        return f"{self.name}-slave-{self.slave}" if self.slave else self.name


class ClusterLayout:
    """The addresses and data directories of the servers of `penstock up`."""

    def __init__(
        self, loaded: LoadedSettings, data: Path | None, brokers: int, replicas: int
    ) -> None:
        settings = loaded.settings
        self._replicas = replicas
        self._given = loaded.given
        own_roles = {"replication.role", "replication.controllers"} & set(loaded.given)
        self.controlled = not own_roles and (
            replicas >= CONTROLLED_REPLICAS or (replicas > 1 and "controller.etcd" in loaded.given)
        )
        """Whether a controller elects the masters."""
        broker = settings.broker
        self.base = data or Path("penstock-data")
        self._own_data = "broker.data" in loaded.given and data is None and brokers == 1
        if brokers == 1:
            self.names = [broker.name]
        else:
            self.names = [f"broker-{letter}" for letter in string.ascii_lowercase[:brokers]]
        self.members = [
            LocalBroker(name, slave) for slave in range(replicas) for name in self.names
        ]
        """The masters first, so that their ports do not depend on the number of replicas."""
        last = broker.port + PORTS_APART * (len(self.members) - 1) + 2
        if last > PORT_MAX:
            raise BadSetting(
                f"{len(self.members)} brokers from port {broker.port} need ports up to {last}; the "
                f"highest port is {PORT_MAX}",
                hint="choose a lower --broker-port",
            )
        nameserver = settings.nameserver
        if "nameserver.host" not in loaded.given:
            nameserver = msgspec.structs.replace(nameserver, host=broker.host)
        if "nameserver.data" not in loaded.given:
            nameserver = msgspec.structs.replace(nameserver, data=str(self.base / "nameserver"))
        controller = settings.controller
        if "controller.host" not in loaded.given:
            controller = msgspec.structs.replace(controller, host=broker.host)
        if "controller.port" not in loaded.given:
            port = nameserver.port + CONTROLLER_PORT_APART
            controller = msgspec.structs.replace(controller, port=port)
        if "controller.data" not in loaded.given:
            controller = msgspec.structs.replace(controller, data=str(self.base / "controller"))
        self.settings: Settings = msgspec.structs.replace(
            settings, nameserver=nameserver, controller=controller
        )

    def port(self, number: int) -> int:
        return self.settings.broker.port + PORTS_APART * number

    def master_of(self, member: LocalBroker) -> int:
        """The number of a member's master."""
        return self.names.index(member.name)

    def directory(self, number: int) -> Path:
        member = self.members[number]
        if not self._own_data:
            return self.base / str(member)
        own = Path(self.settings.broker.data)
        return own.with_name(f"{own.name}-slave-{member.slave}") if member.slave else own

    def command(self, number: int, config_file: Path | None, log_form: str) -> list[str]:
        """The command line of one broker."""
        broker = self.settings.broker
        command = [sys.executable, "-P", "-m", "penstock.cli.main", "broker"]
        if config_file is not None:
            command += ["--config", str(config_file)]
        command += ["--nameservers", self._nameserver_address(self.settings.nameserver.host)]
        command += ["--host", broker.host, "--port", str(self.port(number))]
        command += ["--name", self.members[number].name, "--data", str(self.directory(number))]
        command += ["--announce", broker.announce] if broker.announce else []
        return [*command, "--log", log_form, "--supervised", str(os.getpid())]

    def console_command(self, port: int, log_form: str) -> list[str]:
        """The command line of the web console."""
        command = [sys.executable, "-P", "-m", "penstock.cli.main", "console"]
        command += ["--nameserver", self._nameserver_address(self.settings.nameserver.host)]
        command += ["--port", str(port), "--data", str(self.base / "console")]
        # The console has the rights of the servers' own user, so its users must log in.
        command += ["--logins", "brokers"] if self.settings.access.authentication else []
        command += ["--strict-signing"] if self.settings.access.strict_signing else []
        command += ["--tls"] if self.settings.tls.mode == "enforcing" else []
        return [*command, "--log", log_form, "--supervised", str(os.getpid())]

    def console_environ(self) -> dict[str, str]:
        """The environment of the web console: the credentials of the servers' own user."""
        environ = dict(os.environ)
        access = self.settings.access
        user, _, password = (access.internal_user or access.initial_user).partition(":")
        if access.authentication and password:
            environ["PENSTOCK_CLIENT_ACCESS_KEY"] = user
            environ["PENSTOCK_CLIENT_SECRET_KEY"] = password
        return environ

    def environ(self, number: int) -> dict[str, str]:
        """The environment of one broker: its own ports and, with slaves, its role."""
        environ = dict(os.environ)
        for name, port in (
            ("PENSTOCK_BROKER_PROBE_PORT", self.settings.broker.probe_port),
            ("PENSTOCK_BROKER_VIP_PORT", self.settings.broker.vip_port),
            ("PENSTOCK_REPLICATION_PORT", self.settings.replication.port),
        ):
            if port > 0:
                environ[name] = str(port + PORTS_APART * number)
        if self.controlled:
            controller = self.settings.controller
            host = "127.0.0.1" if controller.host in _WILDCARDS else controller.host
            environ["PENSTOCK_REPLICATION_CONTROLLERS"] = f"{host}:{controller.port}"
            environ["PENSTOCK_REPLICATION_PROTOCOL"] = "epochs"
        elif self._replicas > 1:
            environ |= self._role(self.members[number])
        return environ

    def _role(self, member: LocalBroker) -> dict[str, str]:
        """The settings of a master or a slave."""
        replication = self.settings.replication
        if member.slave:
            role = "slave"
        else:
            own = "replication.role" in self._given and replication.role != "slave"
            role = replication.role if own else "sync_master"
        protocol = replication.protocol if "replication.protocol" in self._given else "epochs"
        return {
            "PENSTOCK_BROKER_ID": str(member.slave),
            "PENSTOCK_REPLICATION_ROLE": role,
            "PENSTOCK_REPLICATION_PROTOCOL": protocol,
        }

    def announcement(self) -> str:
        """The ready line, followed by examples to copy."""
        broker = self.settings.broker
        address = self._nameserver_address(broker.announce or self.settings.nameserver.host)
        host = broker.announce or broker.host
        brokers = ", ".join(
            f"{member} {host}:{self.port(number)}" for number, member in enumerate(self.members)
        )
        where = self.directory(0) if self._own_data else self.base
        line = f"penstock is up: NameServer {address}, {brokers}; data in {where.absolute()}"
        return line + "\n" + EXAMPLE.format(address=address, cluster=broker.cluster)

    def _nameserver_address(self, host: str) -> str:
        host = "127.0.0.1" if host in _WILDCARDS else host
        return f"{host}:{self.settings.nameserver.port}"
