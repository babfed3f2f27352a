"""`penstock completion`: the script that makes a shell complete commands, options and names."""

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    Topics, groups and contexts are completed too: the shell asks the cluster for them.
    """
    from click.shell_completion import get_completion_class

    from penstock.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(cli, {}, "penstock", "_PENSTOCK_COMPLETE").source())
