"""`penstock nameserver`: runs one NameServer in this process."""

from pathlib import Path

import click

from penstock.cli.servers import startup


@click.command(short_help="Run a NameServer.")
@startup.config_option
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=startup.PORT, help="Port to listen on.  [default: 9876]")
@click.option("--data", help="Directory of the KV config.  [default: kept in memory only]")
@startup.log_option
def nameserver(
    config_file: Path | None, host: str | None, port: int | None, data: str | None, log_form: str
) -> int:
    """Run a NameServer until SIGTERM or Ctrl-C.

    One line on stdout reports that it is ready.
    """
    flags = {
        "nameserver.host": ("--host", host),
        "nameserver.port": ("--port", port),
        "nameserver.data": ("--data", data),
    }
    loaded = startup.load_settings(config_file, "nameserver", flags)
    startup.prepare(loaded, log_form, "nameserver")
    from penstock.server.services.service import serve_nameserver

    config = loaded.settings.nameserver

    def ready() -> None:
        startup.say(f"penstock nameserver is ready on {config.host}:{config.port}")

    startup.serve(lambda: serve_nameserver(loaded.settings, ready))
    return 0
