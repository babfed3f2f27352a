"""`penstock controller`: runs one controller in this process."""

from pathlib import Path

import click

from penstock.cli.servers import startup


@click.command(short_help="Run a controller.")
@startup.config_option
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=startup.PORT, help="Port to listen on.  [default: 9878]")
@click.option("--data", help="Directory of its state.  [default: penstock-data/controller]")
@click.option(
    "--etcd", metavar="HOST:PORT,…", help="Members of an etcd cluster that keeps the state."
)
@click.option("--announce", metavar="HOST", help="Address that brokers connect to.")
@startup.log_option
def controller(
    config_file: Path | None,
    host: str | None,
    port: int | None,
    data: str | None,
    etcd: str | None,
    announce: str | None,
    log_form: str,
) -> int:
    """Run a controller until SIGTERM or Ctrl-C.

    It decides which replica of a broker is the master. With --etcd, several controllers may share
    their state. One line on stdout reports that it is ready.
    """
    flags = {
        "controller.host": ("--host", host),
        "controller.port": ("--port", port),
        "controller.data": ("--data", data),
        "controller.etcd": ("--etcd", etcd),
        "controller.announce": ("--announce", announce),
    }
    loaded = startup.load_settings(config_file, "controller", flags)
    startup.prepare(loaded, log_form, "controller")
    from penstock.server.services.service import serve_controller

    config = loaded.settings.controller

    def ready() -> None:
        startup.say(f"penstock controller is ready on {config.host}:{config.port}")

    startup.serve(lambda: serve_controller(loaded.settings, ready))
    return 0
