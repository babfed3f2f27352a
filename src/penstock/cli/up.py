"""`penstock up`: runs a NameServer and brokers on this machine."""

import os
import string
import sys
from pathlib import Path

import click
import msgspec

from penstock.cli import startup
from penstock.config.doc import PORT_MAX
from penstock.config.settings import Settings
from penstock.config.sources import LoadedSettings
from penstock.errors import BadSetting

PORTS_APART = 10
"""The distance between the ports of two brokers: +1 is for replication, +2 for the probe."""
BROKERS_MAX = len(string.ascii_lowercase)
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
    "--console-port",
    type=startup.PORT,
    default=8080,
    show_default=True,
    help="Port of the web console (not available yet).",
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
    console_port: int,
    no_console: bool,
    announce: str | None,
    log_form: str,
) -> int:
    """Run a NameServer and brokers until SIGTERM or Ctrl-C.

    A line on stdout that starts with "penstock is up" reports that all servers are ready.
    """
    from penstock.cli.supervisor import ChildProcess, supervise
    from penstock.cli.terminal import say_if_uncompiled

    flags = {
        "nameserver.host": ("--host", host),
        "nameserver.port": ("--nameserver-port", nameserver_port),
        "broker.host": ("--host", host),
        "broker.port": ("--broker-port", broker_port),
        "broker.announce": ("--announce", announce),
    }
    loaded = startup.load_settings(config_file, "broker", flags)
    layout = ClusterLayout(loaded, data, brokers)
    startup.prepare(loaded, log_form, "penstock")
    say_if_uncompiled()

    async def main() -> None:
        children = [
            ChildProcess(
                name, layout.command(number, config_file, log_form), layout.environ(number)
            )
            for number, name in enumerate(layout.names)
        ]
        await supervise(layout.settings, children, lambda: startup.say(layout.announcement()))

    startup.serve(main)
    return 0


class ClusterLayout:
    """The addresses and data directories of the servers of `penstock up`."""

    def __init__(self, loaded: LoadedSettings, data: Path | None, brokers: int) -> None:
        settings = loaded.settings
        broker = settings.broker
        self.base = data or Path("penstock-data")
        self._own_data = "broker.data" in loaded.given and data is None and brokers == 1
        if brokers == 1:
            self.names = [broker.name]
        else:
            self.names = [f"broker-{letter}" for letter in string.ascii_lowercase[:brokers]]
        last = broker.port + PORTS_APART * (brokers - 1) + 2
        if last > PORT_MAX:
            raise BadSetting(
                f"{brokers} brokers from port {broker.port} need ports up to {last}; the highest "
                f"port is {PORT_MAX}",
                hint="choose a lower --broker-port",
            )
        nameserver = settings.nameserver
        if "nameserver.host" not in loaded.given:
            nameserver = msgspec.structs.replace(nameserver, host=broker.host)
        if "nameserver.data" not in loaded.given:
            nameserver = msgspec.structs.replace(nameserver, data=str(self.base / "nameserver"))
        self.settings: Settings = msgspec.structs.replace(settings, nameserver=nameserver)

    def port(self, number: int) -> int:
        return self.settings.broker.port + PORTS_APART * number

    def directory(self, number: int) -> Path:
        if self._own_data:
            return Path(self.settings.broker.data)
        return self.base / self.names[number]

    def command(self, number: int, config_file: Path | None, log_form: str) -> list[str]:
        """The command line of one broker."""
        broker = self.settings.broker
        command = [sys.executable, "-P", "-m", "penstock.cli.main", "broker"]
        if config_file is not None:
            command += ["--config", str(config_file)]
        command += ["--nameservers", self._nameserver_address(self.settings.nameserver.host)]
        command += ["--host", broker.host, "--port", str(self.port(number))]
        command += ["--name", self.names[number], "--data", str(self.directory(number))]
        command += ["--announce", broker.announce] if broker.announce else []
        return [*command, "--log", log_form, "--supervised", str(os.getpid())]

    def environ(self, number: int) -> dict[str, str]:
        """The environment of one broker: each needs its own probe port."""
        environ = dict(os.environ)
        probe = self.settings.broker.probe_port
        if probe > 0:
            environ["PENSTOCK_BROKER_PROBE_PORT"] = str(probe + PORTS_APART * number)
        return environ

    def announcement(self) -> str:
        """The ready line, followed by examples to copy."""
        broker = self.settings.broker
        address = self._nameserver_address(broker.announce or self.settings.nameserver.host)
        host = broker.announce or broker.host
        brokers = ", ".join(
            f"{name} {host}:{self.port(number)}" for number, name in enumerate(self.names)
        )
        where = self.directory(0) if self._own_data else self.base
        line = f"penstock is up: NameServer {address}, {brokers}; data in {where.absolute()}"
        return line + "\n" + EXAMPLE.format(address=address, cluster=broker.cluster)

    def _nameserver_address(self, host: str) -> str:
        host = "127.0.0.1" if host in _WILDCARDS else host
        return f"{host}:{self.settings.nameserver.port}"
