"""Sending messages again from the command line: plan, question, progress, report."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.confirmation.confirm import confirm
from penstock.cli.known_names import find_group
from penstock.cli.messages.message_text import one_line
from penstock.cli.query_options import NO, NOT_KNOWN, YES, print_partial
from penstock.cli.remote import ClusterOptions, json_option, print_json, print_table, run
from penstock.cli.terminal import size_text, time_text
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.diagnosis import ResendPlan, ResendReport, SearchResult

F = TypeVar("F", bound=Callable[..., Any])
SHOWN_MAX = 20
"""Messages of a plan that are listed."""


def resend_options(command: F) -> F:
    """Add the options of commands that send messages again."""
    for option in (
        json_option,
        click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option(
            "--rate",
            type=click.FloatRange(0, min_open=True),
            help="Maximum number of messages per second.  [default: no limit]",
        ),
        click.option("--dry-run", is_flag=True, help="Print the plan and send nothing."),
    ):
        command = option(command)
    return command


def plan_and_send(
    cluster: ClusterOptions,
    select: "Callable[[AsyncAdmin], Awaitable[SearchResult]]",
    group: str | None,
    *,
    dry_run: bool,
    rate: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Select messages, print the plan, ask, send, and print the report; returns the exit code."""
    found, plan = run(_plan(cluster, select, group))
    print_partial(found.partial)
    if as_json and dry_run:
        print_json(_plan_json(plan, found))
    elif not as_json:
        _print_plan(plan, dry_run=dry_run)
    elif not plan.items:
        print_json(_report_json(None, plan))
    if not plan.items:
        click.echo(f"penstock: there is nothing to send; {found.how}", err=True)
        return NOT_KNOWN if found.is_incomplete else NO
    if dry_run:
        return _found_code(found)
    confirm(
        f"Send {count_text(len(plan.items), 'message')} to {_targets(plan)}?",
        yes=yes,
        unchanged="nothing was sent",
    )
    report = run(_send(cluster, plan, rate))
    if as_json:
        print_json(_report_json(report, plan))
    else:
        _print_report(report)
    return 1 if report.failed or len(report.sent) < len(plan.items) else _found_code(found)


def _found_code(found: "SearchResult") -> int:
    """Whether everything that was asked for by its id was found."""
    return NO if found.missing else YES


async def _plan(
    cluster: ClusterOptions,
    select: "Callable[[AsyncAdmin], Awaitable[SearchResult]]",
    group: str | None,
) -> "tuple[SearchResult, ResendPlan]":
    from penstock.client.diagnosis import plan_resend

    async with cluster.admin() as admin:
        found = await select(admin)
        if group is not None:
            await find_group(admin, group)
        return found, await plan_resend(admin, found.messages, group=group)


async def _send(cluster: ClusterOptions, plan: "ResendPlan", rate: float | None) -> "ResendReport":
    from penstock.cli.terminal import progress_bars
    from penstock.client.diagnosis import ResendProgress, resend

    async with cluster.admin() as admin:
        with progress_bars() as tell:

            def show(progress: ResendProgress) -> None:
                tell("sending", progress.sent + progress.failed, progress.total)

            return await resend(admin, plan, rate=rate, progress=show)


def _targets(plan: "ResendPlan") -> str:
    return ", ".join(f"{topic} ({count:,})" for topic, count in plan.targets.items())


def _print_plan(plan: "ResendPlan", *, dry_run: bool) -> None:
    items = plan.items
    whose = "all groups of the topic" if plan.group is None else f"the group {plan.group} only"
    print(f"plan: send {count_text(len(items), 'message')} ({size_text(plan.bytes)}) to {whose}")
    if items:
        print()
        rows = [
            (
                time_text(item.place.store_ms),
                one_line(item.place.message_id),
                one_line(item.place.text),
                one_line(item.target),
            )
            for item in items[:SHOWN_MAX]
        ]
        print_table(("STORED", "ID", "FROM", "TO"), rows)
        if len(items) > SHOWN_MAX:
            print(f"… and {len(items) - SHOWN_MAX:,} more")
        print()
    for one in plan.skipped[:SHOWN_MAX]:
        print(f"skipped {one_line(one.place.message_id)} of {one.place.text}: {one.reason}")
    for warning in plan.warnings:
        print(f"warning: {one_line(warning)}")
    if dry_run:
        print("dry run: nothing was sent")


def _print_report(report: "ResendReport") -> None:
    seconds = report.spent_ms / 1000
    print(f"sent {count_text(len(report.sent), 'message')} in {seconds:.2f} s", end="")
    print(f"; {len(report.failed):,} failed, {len(report.skipped):,} skipped")
    for failure in report.failed[:SHOWN_MAX]:
        print(f"failed {failure.item.place.message_id}: {one_line(failure.error.remark())}")
    for one in report.skipped[:SHOWN_MAX]:
        print(f"skipped {one.place.message_id}: {one.reason}")


def _item_json(plan: "ResendPlan") -> list[dict[str, object]]:
    return [{**item.place.json(), "target": item.target} for item in plan.items]


def _skipped_json(skipped: Any) -> list[dict[str, object]]:
    return [{**one.place.json(), "reason": one.reason} for one in skipped]


def _plan_json(plan: "ResendPlan", found: "SearchResult") -> dict[str, object]:
    return {
        "group": plan.group,
        "targets": dict(plan.targets),
        "messages": _item_json(plan),
        "skipped": _skipped_json(plan.skipped),
        "warnings": list(plan.warnings),
        "partial": list(found.partial),
    }


def _report_json(report: "ResendReport | None", plan: "ResendPlan") -> dict[str, object]:
    if report is None:
        return {"sent": [], "failed": [], "skipped": _skipped_json(plan.skipped), "spent_ms": 0}
    return {
        "sent": [
            {
                "message_id": receipt.message_id,
                "offset_id": receipt.offset_id,
                "topic": receipt.queue.topic,
                "broker": receipt.queue.broker_name,
                "queue": receipt.queue.queue_id,
                "offset": receipt.queue_offset,
            }
            for _, receipt in report.sent
        ],
        "failed": [
            {**failure.item.place.json(), "error": failure.error.remark()}
            for failure in report.failed
        ],
        "skipped": _skipped_json(report.skipped),
        "spent_ms": report.spent_ms,
    }
