"""Output on a terminal: progress bars, sizes and times as text, the notice of uncompiled code."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

import penstock

Progress = Callable[[str, int, int], None]


def say_if_uncompiled() -> None:
    """Print a line on stderr if the compiled core is not used; for commands that do real work."""
    if penstock.compiled():
        return
    if os.environ.get("PENSTOCK_PURE") == "1":
        text = "running uncompiled, which is slow, because PENSTOCK_PURE=1 is set"
    else:
        text = "running uncompiled, which is slow; install a C compiler and reinstall Penstock"
    print(f"penstock: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress_bars(wanted: bool | None = None) -> Iterator[Progress]:
    """Show progress bars on stderr, one per `what`; by default only on a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda what, done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    tasks = {}
    console = Console(stderr=True, force_terminal=wanted)
    with Bars(*columns, console=console, transient=True) as bars:

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done, total=of)

        yield tell


def size_text(count: float) -> str:
    """A number of bytes as text, with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


def time_text(ms: int) -> str:
    """A time as text, in local time; a dash if it is unknown."""
    if not 0 < ms < 1 << 47:
        return "-"
    return datetime.fromtimestamp(ms / 1000).isoformat(" ", "milliseconds")


def print_summary(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a framed table of names and values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
