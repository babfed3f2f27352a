"""The question before a command that deletes or changes something.

`--yes` skips it. The answer is read from stdin, a terminal or a pipe. Where stdin has no answer
(cron, a container), the command is refused with exit code 2.
"""

import sys

import click

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


class Declined(click.Abort):
    """The answer was no; the text says what was not done."""


class NoAnswer(click.ClickException):
    """There is nobody to answer the question; an exit code as for wrong usage."""

    exit_code = 2


def confirm(text: str = "Continue?", *, yes: bool, unchanged: str = "nothing was changed") -> None:
    """Ask, unless `yes`; raises Declined after No, and NoAnswer without an answer.

    `unchanged` says what the command has not done then.
    """
    if yes:
        return
    try:
        answer = click.confirm(text, err=True)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise NoAnswer(
            f"there is no terminal to ask for confirmation; {unchanged}. Add --yes to run the "
            "command without a question"
        ) from None
    if not answer:
        raise Declined(unchanged)
