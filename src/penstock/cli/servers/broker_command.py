"""`penstock broker`: runs one broker in this process."""

from pathlib import Path

import click

from penstock.cli.servers import startup


@click.command(short_help="Run a broker.")
@startup.config_option
@click.option("-n", "--nameservers", help="NameServers: host:port, separated by ;")
@click.option(
    "--host", help="Address to listen on.  [default: 127.0.0.1, or 0.0.0.0 with a broker.conf]"
)
@click.option("--port", type=startup.PORT, help="Port to listen on.  [default: 10911]")
@click.option("--name", help="Broker name.  [default: broker-a]")
@click.option("--cluster", help="Cluster name.  [default: DefaultCluster]")
@click.option("--data", help="Directory of the store.  [default: penstock-data/broker-a]")
@click.option("--announce", metavar="HOST", help="Address that clients connect to.")
@startup.log_option
@click.option(
    "--supervised", type=int, hidden=True, metavar="PID", help="Stop when this parent process ends."
)
def broker(
    config_file: Path | None,
    nameservers: str | None,
    host: str | None,
    port: int | None,
    name: str | None,
    cluster: str | None,
    data: str | None,
    announce: str | None,
    log_form: str,
    supervised: int | None,
) -> int:
    """Run a broker until SIGTERM or Ctrl-C.

    One line on stdout reports that it is ready.
    """
    if supervised is not None:
        startup.end_with(supervised)
    flags = {
        "broker.nameservers": ("--nameservers", nameservers),
        "broker.host": ("--host", host),
        "broker.port": ("--port", port),
        "broker.name": ("--name", name),
        "broker.cluster": ("--cluster", cluster),
        "broker.data": ("--data", data),
        "broker.announce": ("--announce", announce),
    }
    loaded = startup.load_settings(config_file, "broker", flags)
    config = loaded.settings.broker
    process = f"{config.name}-slave-{config.id}" if config.id else config.name
    startup.prepare(loaded, log_form, process, warn=supervised is None)
    if supervised is None:
        from penstock.cli.terminal import say_if_uncompiled

        say_if_uncompiled()
    from penstock.server.services.service import serve_broker

    def ready(registration: str) -> None:
        nowhere = "registered with no NameServer (clients can't find it; use --nameservers)"
        startup.say(
            f"penstock broker {config.name} is ready on {config.host}:{config.port}, data in "
            f"{config.data}, {registration or nowhere}"
        )

    startup.serve(lambda: serve_broker(loaded.settings, ready))
    return 0
