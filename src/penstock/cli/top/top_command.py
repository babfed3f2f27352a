"""`penstock top`: a live screen of brokers, topics and groups."""

import asyncio
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from penstock.cli.remote import ClusterOptions, cluster_options, json_option, print_json, run
from penstock.cli.times import to_duration

if TYPE_CHECKING:
    from penstock.cli.top.screen_snapshot import ScreenSnapshot


@click.command(short_help="Show a live view of brokers, topics and groups.")
@cluster_options
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@click.option(
    "--interval",
    default="2s",
    show_default=True,
    metavar="DURATION",
    callback=to_duration,
    help="Time between two refreshes.",
)
@click.option("-a", "--all", "system", is_flag=True, help="Include system topics and groups.")
@click.option("--once", is_flag=True, help="Print one screen and exit.")
@json_option
def top(
    cluster: ClusterOptions,
    in_cluster: str | None,
    interval: timedelta,
    system: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Show brokers with their rates, topics by rate, and groups by lag.

    Without a terminal, with --once or with --json, one screen is printed. The rates of topics need
    two readings, so this takes one interval.
    """
    seconds = max(interval.total_seconds(), 0.1)
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        snapshot = run(_read_twice(cluster, in_cluster, seconds, system=system))
        if as_json:
            print_json(snapshot.as_json())
        else:
            _print(snapshot)
    else:
        from penstock.cli.top.live_screen import show

        run(show(cluster, in_cluster, seconds, system=system))


async def _read_twice(
    cluster: ClusterOptions, in_cluster: str | None, seconds: float, *, system: bool
) -> "ScreenSnapshot":
    from penstock.cli.top.collector import Collector

    async with cluster.admin() as admin:
        collector = Collector(admin, in_cluster, system=system)
        await collector.read()
        await asyncio.sleep(seconds)
        return await collector.read(all_groups=True)


def _print(snapshot: "ScreenSnapshot") -> None:
    from rich.console import Console

    from penstock.cli.top.screen import ScreenState, screen

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width; do not cut names
    console.print(screen(snapshot, ScreenState(), None))
