"""`penstock explain …`: why a group has not consumed a message, and the state of a group."""

from typing import TYPE_CHECKING

import click

from penstock.cli.messages.message_text import one_line
from penstock.cli.query_options import NO, NOT_KNOWN, YES, print_partial, with_servers
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)
from penstock.cli.times import to_duration

if TYPE_CHECKING:
    from datetime import timedelta

    from penstock.client.diagnosis import Explanation, GroupExplanation


@click.group(no_args_is_help=True)
def explain() -> None:
    """Explain why a message was not consumed, or the state of a group."""


@explain.command()
@cluster_options
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", required=True, help="The consumer group.")
@click.option("--topic", help="The topic. Without it, all topics are searched.")
@json_option
def message(
    cluster: ClusterOptions, message_id: str, group: str, topic: str | None, as_json: bool
) -> int:
    """Explain why a group has not consumed a message.

    ID is a unique id, an offset id, or a place such as orders/broker-a/3@1042. The exit code is 0
    if the message is consumed, 3 if it is not, 4 if that is not known.
    """

    async def work() -> "Explanation":
        from penstock.client.diagnosis import explain_message

        async with cluster.admin() as admin:
            return await explain_message(admin, message_id, group, topic)

    found = run(work())
    place = None if found.message is None else found.message.json()
    _print(cluster, found, {"wanted": found.wanted, "message": place}, as_json=as_json)
    if found.is_consumed:
        return YES
    return NOT_KNOWN if found.verdict.value in ("unknown", "popped") else NO


@explain.command()
@cluster_options
@click.argument("name", metavar="GROUP")
@click.option(
    "--behind",
    callback=to_duration,
    default="1m",
    show_default=True,
    metavar="DURATION",
    help="The group is behind if its oldest message waits longer than this.",
)
@json_option
def group(cluster: ClusterOptions, name: str, behind: "timedelta", as_json: bool) -> int:
    """Explain the state of a group: members, subscriptions, owners, lag, retries, dead letters.

    The exit code is 0 if the group is healthy, 3 if it is not, 4 if that is not known.
    """

    async def work() -> "GroupExplanation":
        from penstock.client.diagnosis import explain_group

        async with cluster.admin() as admin:
            behind_ms = round(behind.total_seconds() * 1000)
            return await explain_group(admin, name, behind_ms=behind_ms)

    found = run(work())
    _print(cluster, found, {}, as_json=as_json)
    if found.is_healthy:
        return YES
    return NOT_KNOWN if found.verdict.value == "unknown" else NO


def _print(
    cluster: ClusterOptions,
    found: "Explanation | GroupExplanation",
    more: dict[str, object],
    *,
    as_json: bool,
) -> None:
    command = with_servers(cluster, found.command)
    if as_json:
        print_json(
            {
                **more,
                "group": found.group,
                "verdict": found.verdict.value,
                "text": found.text,
                "command": command,
                "facts": [
                    {
                        "kind": fact.kind.value,
                        "status": fact.status.value,
                        "text": fact.text,
                        "evidence": dict(fact.evidence),
                    }
                    for fact in found.facts
                ],
                "partial": list(found.partial),
            }
        )
        return
    rows = [(fact.status.value, fact.kind.value, one_line(fact.text)) for fact in found.facts]
    print_table(("STATUS", "FACT", ""), rows)
    print()
    print(f"{found.verdict.value.replace('_', ' ')}: {one_line(found.text)}")
    if command is not None:
        print(f"next: {command}")
    print_partial(found.partial)
