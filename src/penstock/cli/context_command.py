"""`penstock context …`: named contexts with servers and credentials."""

from typing import Any

import click

from penstock.cli.confirmation.confirm import ask_secret, confirm, yes_option
from penstock.cli.contexts.context_file import (
    FLAGS,
    SECRETS,
    TEXTS,
    Contexts,
    Values,
    chosen_context,
    contexts_path,
    read_contexts,
    write_contexts,
)
from penstock.cli.name_completion import context_names
from penstock.cli.remote import json_option, print_json, print_table

_HIDDEN = "******"


@click.group(no_args_is_help=True)
def context() -> None:
    """Manage named contexts: the servers and credentials of clusters.

    Commands use the context of --context, of PENSTOCK_CONTEXT, or the current one. Options
    and environment variables replace its values.
    """


@context.command()
@click.argument("name")
@click.option("-n", "--nameserver", metavar="HOST:PORT[;...]", help="NameServer addresses.")
@click.option("--namespace", help="Namespace of topics and groups.")
@click.option("--access-key", help="User name.")
@click.option("--secret-key", help="Password. Prompted for if it is omitted after --access-key.")
@click.option(
    "--strict-signing/--no-strict-signing",
    default=None,
    help="Sign the request code and the time too. Penstock's servers only.",
)
@click.option("--tls/--no-tls", default=None, help="Connect with TLS.")
@click.option("--tls-ca", metavar="FILE", help="PEM file of trusted CAs.")
@click.option("--use", "select", is_flag=True, help="Make it the current context.")
@json_option
def add(name: str, select: bool, as_json: bool, **given: Any) -> None:
    """Add the context NAME. If it exists, change the given values; an empty value removes one."""
    from penstock.cli.schemas.context_output import ContextRow
    from penstock.client.client_options import ClientOptions

    if not name or not name.isprintable():
        raise click.UsageError("the name of a context must consist of printable characters")
    if given["access_key"] and given["secret_key"] is None:
        given["secret_key"] = ask_secret("Secret key", "--secret-key")
    known = read_contexts()
    values: Values = dict(known.contexts.get(name, {}))
    for key, value in given.items():
        if value == "":
            values.pop(key, None)
        elif value is not None:
            values[key] = value
    if bool(values.get("access_key")) != bool(values.get("secret_key")):
        raise click.UsageError("--access-key and --secret-key must be given together")
    nameserver = values.get("nameserver")
    if nameserver is not None:
        ClientOptions(str(nameserver))  # raises BadSetting
    current = name if select or not known.contexts else known.current
    write_contexts(Contexts(current, {**known.contexts, name: values}))
    if as_json:
        print_json(ContextRow.of(name, _chosen_name(), values))
        return
    print(f"saved context {name} in {contexts_path()}" + (" (current)" * (current == name)))


@context.command(name="list")
@json_option
def list_contexts(as_json: bool) -> None:
    """List contexts. The one in use is marked with *."""
    from penstock.cli.schemas.context_output import ContextRow

    known = read_contexts()
    chosen = _chosen_name()
    if as_json:
        print_json([ContextRow.of(name, chosen, known.contexts[name]) for name in known.contexts])
        return
    if not known.contexts:
        print("there is no context\nnext: penstock context add NAME -n HOST:PORT")
        return
    rows = [
        (
            "*" if name == chosen else "",
            name,
            str(values.get("nameserver", "-")),
            str(values.get("namespace", "-")),
            str(values.get("access_key", "-")),
            "yes" if values.get("tls") else "no",
        )
        for name, values in sorted(known.contexts.items())
    ]
    print_table(("", "CONTEXT", "NAMESERVER", "NAMESPACE", "ACCESS KEY", "TLS"), rows)


@context.command()
@click.argument("name", required=False, shell_complete=context_names)
@click.option("--none", "no_context", is_flag=True, help="Use no context from now on.")
@json_option
def use(name: str | None, no_context: bool, as_json: bool) -> None:
    """Make NAME the current context."""
    if (name is None) is not no_context:
        raise click.UsageError("give the name of a context, or --none")
    known = read_contexts()
    if name is not None:
        known.get(name)
    write_contexts(Contexts(name, known.contexts))
    if as_json:
        from penstock.cli.schemas.context_output import ContextRow

        values = {} if name is None else known.get(name)
        print_json(None if name is None else ContextRow.of(name, _chosen_name(), values))
        return
    print("no context is current" if name is None else f"the current context is {name}")


@context.command()
@click.argument("name", required=False, shell_complete=context_names)
@click.option("--show-secrets", is_flag=True, help="Show the secret key.")
@json_option
def show(name: str | None, show_secrets: bool, as_json: bool) -> None:
    """Show the context NAME, or the one in use."""
    from penstock.cli.schemas.context_output import ContextRow

    found = chosen_context(name)
    if found is None:
        raise click.UsageError("no context is in use; give the name of one")
    shown, values = found
    if as_json:
        print_json(ContextRow.of(shown, _chosen_name(), values, secrets=show_secrets))
        return
    rows = [("context", shown), ("file", str(contexts_path()))]
    for key in (*TEXTS, *FLAGS):
        if key in values:
            text = str(values[key]) if key in TEXTS else "yes" if values[key] else "no"
            hidden = key in SECRETS and not show_secrets
            rows.append((key.replace("_", " "), _HIDDEN if hidden else text))
    for label, text in rows:
        print(f"{label + ':':16}{text}")


@context.command()
@click.argument("name", shell_complete=context_names)
@yes_option
@json_option
def remove(name: str, yes: bool, as_json: bool) -> None:
    """Remove the context NAME with its credentials."""
    known = read_contexts()
    known.get(name)
    confirm(f"Remove the context {name} with its credentials from {contexts_path()}?", yes=yes)
    left = {key: values for key, values in known.contexts.items() if key != name}
    write_contexts(Contexts(None if known.current == name else known.current, left))
    if as_json:
        from penstock.cli.schemas.context_output import RemovedContext

        print_json(RemovedContext(context=name))
        return
    print(f"removed context {name}")


def _chosen_name() -> str | None:
    """The name of the context that commands use without --context."""
    import os

    from penstock.cli.contexts.context_file import VARIABLE

    chosen = os.environ.get(VARIABLE)
    return read_contexts().current if chosen is None else chosen or None
