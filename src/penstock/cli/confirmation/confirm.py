"""The question before a command that deletes or changes something, and questions for passwords.

`--yes` skips it. The answer is read from stdin, a terminal or a pipe. Where stdin has no answer
(cron, a container), the command is refused with exit code 2.
"""

import sys
from pathlib import Path

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


def ask_secret(what: str, option: str, *, repeat: bool = False) -> str:
    """Ask for a password at the terminal; without one, read a line from stdin.

    Raises NoAnswer, which names the option, if there is none.
    """
    if _has_terminal():
        return str(click.prompt(what, hide_input=True, err=True, confirmation_prompt=repeat))
    line = "" if sys.stdin is None else sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise NoAnswer(
            f"there is no terminal to ask for the {what.lower()}; nothing was changed. Give "
            f"{option}, or a line on stdin"
        )
    return line


def _has_terminal() -> bool:
    """Whether a password can be typed: getpass uses the controlling terminal, whatever stdin is."""
    if sys.stdin is not None and sys.stdin.isatty():
        return True
    try:
        with Path("/dev/tty").open("rb"):
            return True
    except OSError:
        return False
