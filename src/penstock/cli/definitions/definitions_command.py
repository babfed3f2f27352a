"""`penstock export` and `penstock import`."""

from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.cli.definitions.import_plan import Item
    from penstock.cli.schemas.definitions_output import Definitions
    from penstock.errors import PenstockError


@click.command(name="export")
@cluster_options
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. With --secrets, only its owner can read it.  [default: stdout]",
)
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@click.option("--offsets", is_flag=True, help="Include the committed offsets of groups.")
@click.option(
    "--secrets",
    is_flag=True,
    help="Include passwords that the broker sends; Penstock's brokers send none.",
)
@click.option(
    "--kv-namespace",
    "kv_namespaces",
    multiple=True,
    metavar="NAME",
    help="Include this namespace of the KV configuration. Can be repeated.",
)
def export_definitions(
    cluster: ClusterOptions,
    output: Path | None,
    in_cluster: str | None,
    offsets: bool,
    secrets: bool,
    kv_namespaces: tuple[str, ...],
) -> None:
    """Write the definitions of a cluster as JSON: topics, groups, users, rules, KV configuration.

    All brokers must answer. Messages are not part of it.
    """
    from penstock.cli.contexts.config_directory import write_private
    from penstock.cli.definitions.collect import collect
    from penstock.cli.terminal import progress_bars

    async def work() -> "Definitions":
        with progress_bars() as tell:
            async with cluster.admin() as admin:
                return await collect(
                    admin,
                    in_cluster,
                    kv_namespaces=kv_namespaces,
                    secrets=secrets,
                    offsets=offsets,
                    tell=tell,
                )

    found = run(work())
    for note in found.notes:
        click.echo(f"penstock: not exported: {note}", err=True)
    if output is None:
        print_json(found)
        return
    text = _json_text(found)
    if secrets:
        write_private(output, text)
    else:
        output.write_text(text, encoding="utf-8")
    parts: dict[str, Sized] = {
        "topic": found.topics,
        "group": found.groups,
        "user": found.users,
        "rule": found.rules,
    }
    counts = ", ".join(count_text(len(part), noun) for noun, part in parts.items())
    print(f"wrote {counts} to {output}")


@click.command(name="import")
@cluster_options
@click.argument("file", type=click.File("rb"))
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@click.option("--offsets", is_flag=True, help="Also set the committed offsets of groups.")
@click.option(
    "--skip-access",
    is_flag=True,
    help="Leave out users and rules, for example if you are not a super user.",
)
@click.option(
    "--new-passwords",
    is_flag=True,
    help="Create users whose password is not in the file with a random one, and print it.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@yes_option
@json_option
def import_definitions(
    cluster: ClusterOptions,
    file: BinaryIO,
    in_cluster: str | None,
    offsets: bool,
    skip_access: bool,
    new_passwords: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Create or change what FILE defines. FILE is `-` for stdin.

    Prints a plan and asks for confirmation. Nothing is deleted. A second import of the same file
    changes nothing.
    """
    from penstock.cli.definitions.apply_import import apply_items, plan_offsets, read_present
    from penstock.cli.definitions.import_plan import plan_import, read_definitions
    from penstock.cli.terminal import progress_bars

    wanted = read_definitions(file.read(), file.name)
    access = not skip_access and bool(wanted.users or wanted.rules)

    async def plan() -> "list[Item]":
        async with cluster.admin() as admin:
            present = await read_present(admin, in_cluster, wanted, access=access)
            items = plan_import(wanted, present, new_passwords=new_passwords)
            moved, _ = await plan_offsets(admin, wanted.offsets if offsets else [])
            return [*items, *moved]

    async def work(items: "list[Item]") -> "dict[Item, PenstockError]":
        with progress_bars() as tell:
            async with cluster.admin() as admin:
                return await apply_items(admin, [i for i in items if i.kind != "offset"], tell)

    items = run(plan())
    changes = [item for item in items if item.is_change]
    if not (dry_run and as_json):
        _print_plan(items, err=as_json)
    if dry_run or not changes:
        if as_json:
            print_json(_report(items, {}, applied=not dry_run))
        return 0
    if file.name == "<stdin>" and not yes:
        raise click.UsageError("add --yes: the definitions are read from stdin, so is the answer")
    confirm(f"Make {count_text(len(changes), 'change')}?", yes=yes)
    failed = run(work(items))
    if offsets:
        failed |= run(_set_offsets(cluster, wanted, items))
    if as_json:
        print_json(_report(items, failed, applied=True))
    else:
        _print_result(items, failed)
    return 1 if failed else 0


async def _set_offsets(
    cluster: ClusterOptions, wanted: "Definitions", items: "list[Item]"
) -> "dict[Item, PenstockError]":
    """Plan the offsets again: their topics and groups may be new. Replaces their items."""
    from penstock.cli.definitions.apply_import import apply_offsets, plan_offsets

    async with cluster.admin() as admin:
        moved, plans = await plan_offsets(admin, wanted.offsets)
        items[:] = [item for item in items if item.kind != "offset"] + moved
        return await apply_offsets(admin, moved, plans)


def _print_plan(items: "list[Item]", *, err: bool) -> None:
    rows = [
        (item.change, item.kind, item.name, item.where, item.details)
        for item in items
        if item.change != "unchanged"
    ]
    if rows:
        print_table(("CHANGE", "KIND", "NAME", "WHERE", "DETAILS"), rows, err=err)
    counts = {
        change: sum(item.change == change for item in items)
        for change in ("create", "change", "unchanged", "skip")
    }
    click.echo(
        f"{counts['create']} to create, {counts['change']} to change, "
        f"{counts['unchanged']} unchanged, {counts['skip']} skipped",
        err=err,
    )


def _print_result(items: "list[Item]", failed: "dict[Item, PenstockError]") -> None:
    for item, error in failed.items():
        click.echo(f"penstock: {item.kind} {item.name} on {item.where}: {error}", err=True)
    passwords = {}
    for item in items:
        password = getattr(item.value, "password", None)
        if item.kind == "user" and item.change == "create" and item not in failed and password:
            passwords[item.name] = password
    done = sum(item.is_change for item in items) - len(failed)
    print(f"made {count_text(done, 'change')}, {len(failed)} failed")
    for name, password in passwords.items():
        print(f"user {name} has the password {password}")


def _report(items: "list[Item]", failed: "dict[Item, PenstockError]", *, applied: bool) -> object:
    from penstock.cli.schemas.definitions_output import ImportItem, ImportReport

    return ImportReport(
        applied=applied,
        items=[
            ImportItem(
                kind=item.kind,
                name=item.name,
                where=item.where,
                change=item.change,
                details=item.details,
                error=str(failed[item]) if item in failed else None,
                password=getattr(item.value, "password", None) if applied else None,
            )
            for item in items
        ],
    )


def _json_text(value: object) -> str:
    import json

    import msgspec

    return (
        json.dumps(msgspec.to_builtins(value, str_keys=True), indent=2, ensure_ascii=False) + "\n"
    )
