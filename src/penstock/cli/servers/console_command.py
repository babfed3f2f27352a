"""`penstock console`: the web console."""

import errno
import os
from pathlib import Path

import click

from penstock.cli.remote import ClusterOptions, cluster_options
from penstock.cli.servers import startup
from penstock.errors import BadSetting
from penstock.extras import how_to_install


@click.command(short_help="Run the web console of a cluster.")
@cluster_options
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Any address except a loopback address requires logins.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("penstock-console"),
    show_default=True,
    help="Directory of accounts, audit log and saved searches.",
)
@click.option(
    "--logins",
    type=click.Choice(["none", "console", "brokers"]),
    help="Logins: none, accounts of the console, or users of the brokers.  [default: none on a "
    "loopback address, otherwise console]",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3_600),
    default=5.0,
    show_default=True,
    help="Seconds between two reads of the cluster.",
)
@click.option(
    "--pipelines",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory with the records of pipeline runs.  [default: that of penstock pipeline]",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="PEM file of the certificate, to serve HTTPS.",
)
@click.option(
    "--tls-key",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="PEM file of the key of the certificate.",
)
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are used. "
    "Can be repeated.",
)
@click.option("--supervised", type=int, hidden=True)
@startup.log_option
def console(
    cluster: ClusterOptions,
    host: str,
    port: int,
    data: Path,
    logins: str | None,
    interval: float,
    pipelines: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    trusted_proxies: tuple[str, ...],
    supervised: int | None,
    log_form: str,
) -> int:
    """Run the web console of a cluster, Penstock's or Apache's, until SIGTERM or Ctrl-C."""
    if supervised is not None:
        startup.end_with(supervised)
    startup.set_up_logging(log_form, "console")
    try:
        from penstock.console.serving import serve
    except ModuleNotFoundError as error:
        raise BadSetting(
            f"the web console needs the package {error.name}", hint=how_to_install("console")
        ) from error
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.client_options import ClientKeywords
    from penstock.console.console_settings import ConsoleSettings, Logins, is_loopback
    from penstock.console.pipeline_runs import default_directory

    chosen = logins or ("none" if is_loopback(host) else "console")
    settings = ConsoleSettings(
        host=host,
        port=port,
        data=data,
        logins=Logins(chosen),
        interval_s=interval,
        pipelines=pipelines or default_directory(),
        live_settings=_live_settings(),
        tls_certificate=tls_cert,
        tls_key=tls_key,
        trusted_proxies=trusted_proxies,
    )
    keywords = cluster.keywords()

    def client_for(name: str, password: str) -> AsyncAdmin:
        own: ClientKeywords = {**keywords, "access_key": name, "secret_key": password}
        return AsyncAdmin(cluster.nameserver, **own)

    try:
        startup.serve(lambda: serve(settings, cluster.admin, client_for, startup.say))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        raise BadSetting(
            f"the web console can't listen on {host}:{port}: {os.strerror(error.errno)}",
            hint="choose another port with --port (penstock up: --console-port)",
        ) from error
    return 0


def _live_settings() -> frozenset[str]:
    """RocketMQ's names, and Penstock's, of the settings that can change at run time."""
    from penstock.config.doc import settings_of
    from penstock.config.settings import TABLES

    names = set()
    for table, kind in TABLES.items():
        for setting in settings_of(kind):
            if setting.doc.live:
                names |= {setting.doc.apache or "", f"{table}.{setting.name}"}
    return frozenset(names - {""})
