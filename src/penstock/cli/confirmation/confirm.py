"""The question before a command that deletes or changes something.

`--yes` skips it. The answer is read from stdin, a terminal or a pipe. Where stdin has no answer
(cron, a container), the command is refused with exit code 2.
"""

import sys

import click

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


def confirm(text: str = "Continue?", *, yes: bool) -> None:
    """Ask, unless `yes`; raises click.Abort after No, and UsageError without an answer."""
    if yes:
        return
    try:
        answer = click.confirm(text, err=True)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise click.UsageError(
            "there is no terminal to ask for confirmation; nothing was changed. Add --yes to run "
            "the command without a question"
        ) from None
    if not answer:
        raise click.Abort
