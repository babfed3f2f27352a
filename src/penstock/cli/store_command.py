"""`penstock store …`: inspects store files, read-only, even of a running broker."""

import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from penstock.store.tools.inspection import StoreFiles
    from penstock.store.tools.problem import Problem
    from penstock.store.tools.scrub import Scrub
    from penstock.store.tools.verify_log import Totals

F = TypeVar("F", bound=Callable[..., Any])
DAMAGED = 2


@click.group(no_args_is_help=True)
def store() -> None:
    """Inspect the files of a store. Nothing is written or locked.

    The broker may be running, and the store may be corrupt. DIR is the directory that contains
    commitlog/.
    """


def _store_options(command: F) -> F:
    """Add the argument and options that all store commands have."""
    options = (
        click.argument("directory", metavar="DIR", type=click.Path(path_type=Path)),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
        click.option(
            "--segment-bytes",
            type=int,
            default=0,
            help="Bytes per CommitLog file.  [default: detected]",
        ),
        click.option(
            "--queue-entries",
            type=int,
            default=0,
            help="Entries per queue file.  [default: detected]",
        ),
        click.option(
            "--index-slots", type=int, default=0, help="Slots per index file.  [default: detected]"
        ),
        click.option(
            "--index-entries",
            type=int,
            default=0,
            help="Entries per index file.  [default: detected]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


_limit = click.option(
    "--limit", type=int, default=50, show_default=True, help="Maximum number of problems to print."
)
_progress = click.option(
    "--progress/--no-progress", default=None, help="Show progress bars.  [default: on a terminal]"
)


@store.command(short_help="Show the contents and the state of a store.")
@_store_options
@click.option("--exact", is_flag=True, help="Count the records by reading the whole CommitLog.")
@_progress
def stat(directory: Path, as_json: bool, exact: bool, progress: bool | None, **sizes: int) -> None:
    """Show the CommitLog, queues, index, checkpoint and shutdown state of a store."""
    from penstock.cli.terminal import progress_bars, say_if_uncompiled
    from penstock.store.tools.survey import survey

    files = _open(directory, sizes)
    if exact:
        say_if_uncompiled()
    with progress_bars(progress) as tell:
        statistics = survey(files, exact=exact, progress=tell)
    if as_json:
        _print_json(statistics)
    else:
        from penstock.cli.store_text import print_statistics

        print_statistics(statistics)


@store.command(short_help="Check every record, queue entry and index entry.")
@_store_options
@_limit
@_progress
def verify(directory: Path, as_json: bool, limit: int, progress: bool | None, **sizes: int) -> int:
    """Check every record, queue entry and index entry.

    The exit code is 0 if the store is good, and 2 if it is damaged. An incomplete end of the log of
    a crashed or running broker is a note, not damage: recovery truncates it.
    """
    from penstock.cli.store_text import print_verification
    from penstock.cli.terminal import progress_bars, say_if_uncompiled
    from penstock.store.tools.verify import Verification

    files = _open(directory, sizes)
    say_if_uncompiled()
    with progress_bars(progress) as tell:
        verification = Verification(files, tell)
        problems, unprinted = _limited(verification.run(), limit)
    return _finish_check(
        files, verification.totals, problems, unprinted, None if as_json else print_verification
    )


@store.command(short_help="Check every record of the log at a limited rate.")
@_store_options
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=16,
    show_default=True,
    help="Maximum number of MB to read per second.",
)
@_limit
@_progress
def scrub(
    directory: Path, as_json: bool, rate: float, limit: int, progress: bool | None, **sizes: int
) -> int:
    """Check every record of the CommitLog at a limited rate, even of a running broker.

    The log of a running broker is checked up to its last checkpoint. The exit code is 0 if the log
    is good, and 2 if it is damaged.
    """
    from penstock.cli.store_text import print_scrub
    from penstock.cli.terminal import progress_bars, say_if_uncompiled
    from penstock.store.tools.scrub import Scrub

    files = _open(directory, sizes)
    say_if_uncompiled()
    with progress_bars(progress) as tell:
        checking = Scrub(files, tell)
        problems, unprinted = _limited(_paced(checking, rate), limit)
    return _finish_check(
        files, checking.totals, problems, unprinted, None if as_json else print_scrub
    )


def _paced(checking: "Scrub", rate: float) -> "Iterator[Problem]":
    """Run a scrub at this many MB per second."""
    from penstock.store.tools.scrub import MEGABYTE

    started = time.monotonic()
    for found in checking.run():
        if found is not None:
            yield found
        ahead_s = checking.checked_bytes / (rate * MEGABYTE) - (time.monotonic() - started)
        if ahead_s > 0:
            time.sleep(ahead_s)


def _limited(found: "Iterator[Problem]", limit: int) -> "tuple[list[Problem], int]":
    """The first problems, and how many more there are."""
    problems = list(islice(found, limit))
    return problems, sum(1 for _ in found)


def _finish_check(
    files: "StoreFiles",
    totals: "Totals",
    problems: "list[Problem]",
    unprinted: int,
    show: "Callable[[StoreFiles, Totals, list[Problem], int], None] | None",
) -> int:
    """Print the result of a check, as JSON without `show`; returns the exit code."""
    if show is not None:
        show(files, totals, problems, unprinted)
    else:
        _print_json(
            {
                "good": not totals.damage,
                "totals": totals,
                "problems": problems,
                "unprinted": unprinted,
            }
        )
    return DAMAGED if totals.damage else 0


@store.command(short_help="Print messages by queue, log offset or key.")
@_store_options
@click.option("--topic", help="Only messages of this topic.")
@click.option("--queue", "queue_id", type=int, help="Only messages of this queue. Needs --topic.")
@click.option("--from", "offset", type=int, help="Start at this queue offset.")
@click.option("--at", "physical", type=int, help="Start at this CommitLog offset.")
@click.option("--key", help="Messages with this key or unique id, newest first. Needs --topic.")
@click.option(
    "--count",
    type=int,
    default=10,
    show_default=True,
    help="Maximum number of messages to print; 0 for all.",
)
@click.option("--bodies", is_flag=True, help="Print bodies, as text or hex.")
@click.option(
    "--body-bytes",
    type=int,
    default=400,
    show_default=True,
    help="Maximum number of bytes to print of a body.",
)
@click.option("--salvage", is_flag=True, help="Scan the CommitLog and skip damaged records.")
def dump(
    directory: Path,
    as_json: bool,
    topic: str | None,
    queue_id: int | None,
    offset: int | None,
    physical: int | None,
    key: str | None,
    count: int,
    bodies: bool,
    body_bytes: int,
    salvage: bool,
    **sizes: int,
) -> int:
    """Print messages of a queue or topic, from a CommitLog offset, or with a key.

    Unreadable records are reported on stderr, and the exit code is then 2.
    """
    from penstock.cli import store_text
    from penstock.store.tools import dump as find

    if (queue_id is not None or key or offset is not None) and not topic:
        raise click.UsageError("--queue, --from and --key require --topic")
    files = _open(directory, sizes)
    if topic and physical is None and not salvage:
        _require_topic(files, topic, queue_id)
    if key and topic:
        found = find.find_key(files, topic, key)
    elif topic and physical is None and not salvage:
        if queue_id is None:
            found = find.walk_topic(files, topic, offset)
        else:
            found = find.walk_queue(files, topic, queue_id, offset)
    else:
        found = find.walk_log(files, physical or 0, salvage=salvage)
    wanted = (
        f
        for f in found
        if f.message is None
        or (
            topic in (None, f.message.topic)
            and queue_id in (None, f.message.queue_id)
            and (offset is None or f.message.queue_offset >= offset)
        )
    )
    bad = 0
    for one in islice(wanted, count or None):
        if one.message is None:
            bad += 1
            where = f"log offset {one.offset}: " if one.offset >= 0 else ""
            print(f"penstock: {where}{one.problem}", file=sys.stderr)
        elif as_json:
            _print_json(store_text.as_dict(one.message, bodies=bodies, cut_bytes=body_bytes))
        else:
            store_text.print_message(one.message, bodies=bodies, cut_bytes=body_bytes)
    return DAMAGED if bad else 0


def _require_topic(files: "StoreFiles", topic: str, queue_id: int | None) -> None:
    """Raise StoreError if the store has no such topic or queue."""
    from difflib import get_close_matches

    from penstock.errors import StoreError

    queues: dict[str, list[int]] = {}
    for name, number in files.queues():
        queues.setdefault(name, []).append(number)
    if topic not in queues:
        similar = get_close_matches(topic, queues, 1)
        hint = f"did you mean {similar[0]}?" if similar else "penstock store stat lists the topics"
        raise StoreError(f"the store has no queue of a topic {topic}", hint=hint)
    if queue_id is not None and queue_id not in queues[topic]:
        known = ", ".join(map(str, sorted(queues[topic])))
        raise StoreError(f"the topic {topic} has no queue {queue_id}", hint=f"it has {known}")


def _open(directory: Path, sizes: dict[str, int]) -> "StoreFiles":
    from penstock.store.tools.inspection import SizeHints, StoreFiles

    hints = SizeHints(
        sizes["segment_bytes"],
        sizes["queue_entries"],
        sizes["index_slots"],
        sizes["index_entries"],
    )
    return StoreFiles(directory, hints)


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
