"""The output of the store tools: text, and messages as values for JSON."""

import sys
from typing import Any

from penstock.cli.terminal import size_text, time_text
from penstock.plurals import count_text
from penstock.store.tools.dump import plain_body
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.problem import Problem
from penstock.store.tools.survey import StoreStatistics, state_of
from penstock.store.tools.verify_log import Totals
from penstock.wire.message import StoredMessage


def print_statistics(statistics: StoreStatistics) -> None:
    """Print the output of `store stat`."""
    exact = "" if statistics.records_exact else " (estimated from the queues; --exact counts them)"
    sizes = statistics.sizes
    rows = [
        ("store", statistics.root),
        ("state", statistics.state),
        (
            "log",
            f"{count_text(statistics.segments, 'segment')} of {size_text(sizes.segment_bytes)}, "
            f"offsets {statistics.log_begin:,} to {statistics.log_end:,} "
            f"({size_text(statistics.log_end - statistics.log_begin)})",
        ),
        ("records", f"{statistics.records:,}{exact}"),
        ("times", f"{time_text(statistics.first_ms)} to {time_text(statistics.last_ms)}"),
        ("on disk", size_text(statistics.disk_bytes)),
        (
            "sizes",
            f"queue files of {sizes.queue_file_entries:,} entries, index files of "
            f"{sizes.index_slots:,} slots and {sizes.index_entries:,} entries (from "
            f"{statistics.sizes_from})",
        ),
    ]
    checkpoint = statistics.checkpoint
    if checkpoint is None:
        rows.append(("checkpoint", "none"))
    else:
        rows.append(
            (
                "checkpoint",
                f"log {time_text(checkpoint.log_ms)}, queues "
                f"{time_text(checkpoint.queues_ms)}, index {time_text(checkpoint.index_ms)}, "
                f"confirm offset {checkpoint.confirm_offset:,}",
            )
        )
    rows.append(("tables", ", ".join(statistics.tables) or "none"))
    for name, text in rows:
        print(f"{name:>10}  {text}")
    _print_queues(statistics)
    for index in statistics.index:
        print(
            f"{'index':>10}  {index.name}: {index.entries:,} entries, {index.slots_used:,} slots "
            f"used, {time_text(index.begin_ms)} to {time_text(index.end_ms)}"
        )


def _print_queues(statistics: StoreStatistics) -> None:
    topics = {queue.topic for queue in statistics.queues}
    print(f"{'queues':>10}  {len(statistics.queues)} of {count_text(len(topics), 'topic')}")
    if not statistics.queues:
        return
    width = max(5, *(len(queue.topic) for queue in statistics.queues))
    print(f"\n{'topic':<{width}}  queue  {'min offset':>12}  {'max offset':>12}  {'messages':>12}")
    for q in statistics.queues:
        print(
            f"{q.topic:<{width}}  {q.queue_id:>5}  {q.min_offset:>12,}  {q.max_offset:>12,}  "
            f"{q.count:>12,}"
        )
    if statistics.index:
        print()


def print_verification(
    files: StoreFiles, totals: Totals, problems: list[Problem], unprinted: int
) -> None:
    """Print the output of `store verify`."""
    others = (
        f", {count_text(totals.queue_entries, 'entry', 'entries')} of "
        f"{count_text(totals.queues, 'queue')}, "
        f"{count_text(totals.index_entries, 'index entry', 'index entries')}"
    )
    _print_check(files, totals, problems, unprinted, others)


def print_scrub(files: StoreFiles, totals: Totals, problems: list[Problem], unprinted: int) -> None:
    """Print the output of `store scrub`."""
    _print_check(files, totals, problems, unprinted, "")


def _print_check(
    files: StoreFiles, totals: Totals, problems: list[Problem], unprinted: int, others: str
) -> None:
    for problem in problems:
        count = f" [{problem.count}x]" if problem.count > 1 else ""
        print(
            f"{problem.severity}: {problem.file} @{problem.offset}: {problem.text} "
            f"({problem.kind}){count}"
        )
    if unprinted:
        print(f"… and {unprinted} more (see --limit)")
    print(
        f"{count_text(totals.records, 'record')} ({size_text(totals.record_bytes)}){others} "
        f"checked; {state_of(files)}"
    )
    if totals.damage:
        print(
            f"DAMAGED: {count_text(totals.damage, 'problem')}, {count_text(totals.notes, 'note')}"
        )
    else:
        print(f"good: no damage, {count_text(totals.notes, 'note')}")


def print_message(message: StoredMessage, *, bodies: bool, cut_bytes: int) -> None:
    """Print a line per message for `store dump`, and optionally its body below."""
    parts = [
        f"{message.topic}/{message.queue_id} #{message.queue_offset}",
        f"at {message.physical_offset}",
        time_text(message.store_ms),
    ]
    if message.tags:
        parts.append(f"tags={message.tags}")
    if message.keys:
        parts.append(f"keys={','.join(message.keys)}")
    parts += [f"id={message.message_id}", count_text(len(message.body), "byte")]
    print("  ".join(parts))
    if bodies:
        shown = _body(message, cut_bytes)
        text = shown.get("body", shown.get("body_hex", ""))
        for line in str(text).splitlines() or [""]:
            print(f"    {line}")
        if "body_problem" in shown:
            print(f"penstock: {shown['body_problem']}", file=sys.stderr)


def as_dict(message: StoredMessage, *, bodies: bool, cut_bytes: int) -> dict[str, Any]:
    """A message of `store dump --json`."""
    fields = {name: getattr(message, name) for name in StoredMessage.__dataclass_fields__}
    del fields["body"]
    fields |= {
        "tags": message.tags,
        "keys": message.keys,
        "message_id": message.message_id,
        "offset_id": message.offset_id,
        "body_bytes": len(message.body),
    }
    return fields | (_body(message, cut_bytes) if bodies else {})


def _body(message: StoredMessage, cut_bytes: int) -> dict[str, Any]:
    """The decompressed body, as text if it is printable, else as hex; truncated if it is long."""
    body, problem = plain_body(message)
    shown: dict[str, Any] = {}
    if problem is not None:
        shown["body_problem"] = problem
    piece = body[:cut_bytes]
    cut = "…" if len(body) > len(piece) else ""
    try:
        # The end may be inside a character, of which up to three bytes may be missing.
        text = piece.decode() if not cut else piece.decode("utf-8", "ignore")
        if cut and len(text.encode()) < len(piece) - 3:
            text = "\0"
    except UnicodeDecodeError:
        text = "\0"
    if all(c.isprintable() or c in "\r\n\t" for c in text):
        shown["body"] = text + cut
    else:
        shown["body_hex"] = piece.hex() + cut
    return shown
