"""`penstock up`: a NameServer and brokers on this machine, ready to be used."""

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
"""From one broker's port to the next: +1 is for replication, +2 for the probe."""
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


@click.command(short_help="Run a NameServer and brokers, ready to be used.")
@startup.config_option
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of everything that is kept.  [default: penstock-data]",
)
@click.option(
    "--host", help="Address to listen on.  [default: 127.0.0.1; with a broker.conf 0.0.0.0]"
)
@click.option(
    "--nameserver-port", type=startup.PORT, help="Port of the NameServer.  [default: 9876]"
)
@click.option(
    "--broker-port",
    type=startup.PORT,
    help="Port of the first broker, the next +10, +20, …  [default: 10911]",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, BROKERS_MAX),
    default=1,
    show_default=True,
    help="Number of brokers; each is a process and uses a core of its own.",
)
@click.option(
    "--console-port",
    type=startup.PORT,
    default=8080,
    show_default=True,
    help="Port of the console (which is still to come).",
)
@click.option("--no-console", is_flag=True, help="Start no console.")
@click.option("--announce", metavar="HOST", help="Address that clients are told.")
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

    A line on stdout that starts with "penstock is up" says when all are ready.
    """
    from penstock.cli.supervisor import Child, supervise
    from penstock.cli.terminal import say_if_uncompiled

    flags = {
        "nameserver.host": ("--host", host),
        "nameserver.port": ("--nameserver-port", nameserver_port),
        "broker.host": ("--host", host),
        "broker.port": ("--broker-port", broker_port),
        "broker.announce": ("--announce", announce),
    }
    loaded = startup.load_settings(config_file, "broker", flags)
    plan = Plan(loaded, data, brokers)
    startup.prepare(loaded, log_form, "penstock")
    say_if_uncompiled()

    async def main() -> None:
        children = [
            Child(name, plan.command(place, config_file, log_form), plan.environ(place))
            for place, name in enumerate(plan.names)
        ]
        await supervise(plan.settings, children, lambda: startup.say(plan.announcement()))

    startup.serve(main)
    return 0


class Plan:
    """Who listens where and keeps its data where."""

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
                f"{brokers} brokers from port {broker.port} on need ports up to {last}, the "
                f"highest is {PORT_MAX}",
                hint="choose a lower --broker-port",
            )
        nameserver = settings.nameserver
        if "nameserver.host" not in loaded.given:
            nameserver = msgspec.structs.replace(nameserver, host=broker.host)
        if "nameserver.data" not in loaded.given:
            nameserver = msgspec.structs.replace(nameserver, data=str(self.base / "nameserver"))
        self.settings: Settings = msgspec.structs.replace(settings, nameserver=nameserver)

    def port(self, place: int) -> int:
        return self.settings.broker.port + PORTS_APART * place

    def folder(self, place: int) -> Path:
        if self._own_data:
            return Path(self.settings.broker.data)
        return self.base / self.names[place]

    def command(self, place: int, config_file: Path | None, log_form: str) -> list[str]:
        """`penstock broker` for one of the brokers."""
        broker = self.settings.broker
        command = [sys.executable, "-P", "-m", "penstock.cli.main", "broker"]
        if config_file is not None:
            command += ["--config", str(config_file)]
        command += ["--nameservers", self._reached(self.settings.nameserver.host)]
        command += ["--host", broker.host, "--port", str(self.port(place))]
        command += ["--name", self.names[place], "--data", str(self.folder(place))]
        command += ["--announce", broker.announce] if broker.announce else []
        return [*command, "--log", log_form, "--supervised", str(os.getpid())]

    def environ(self, place: int) -> dict[str, str]:
        """A probe port of its own for each, where the settings name one."""
        environ = dict(os.environ)
        probe = self.settings.broker.probe_port
        if probe > 0:
            environ["PENSTOCK_BROKER_PROBE_PORT"] = str(probe + PORTS_APART * place)
        return environ

    def announcement(self) -> str:
        """The ready line, and what to copy and paste."""
        broker = self.settings.broker
        address = self._reached(broker.announce or self.settings.nameserver.host)
        host = broker.announce or broker.host
        brokers = ", ".join(f"{n} {host}:{self.port(place)}" for place, n in enumerate(self.names))
        where = self.folder(0) if self._own_data else self.base
        line = f"penstock is up: NameServer {address}, {brokers}; data in {where.absolute()}"
        return line + "\n" + EXAMPLE.format(address=address, cluster=broker.cluster)

    def _reached(self, host: str) -> str:
        host = "127.0.0.1" if host in _WILDCARDS else host
        return f"{host}:{self.settings.nameserver.port}"
