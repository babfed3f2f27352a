"""The next commands that explanations name can be parsed by the program."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from penstock.cli.main import cli
from penstock.client.diagnosis import message_decision
from penstock.client.diagnosis.group import group_decision
from tests.unit.client.diagnosis import test_message_decision
from tests.unit.client.diagnosis.group import test_group_decision


def next_commands() -> Iterator[str]:
    """Those of all test cases of the decisions."""
    for _, changes, _ in test_message_decision.CASES:
        yield (
            message_decision.decide_message(test_message_decision.evidence(**changes)).command or ""
        )
    for _, changes, _ in test_group_decision.CASES:
        yield group_decision.decide_group(test_group_decision.evidence(**changes)).command or ""


COMMANDS = sorted(set(next_commands()) - {""})


@pytest.mark.parametrize("line", COMMANDS)
def test_the_program_accepts_the_command(line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "penstock"
    command: click.Command = cli
    context = cli.make_context(program, words)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        context = command.make_context(name, list(words), parent=context)
    assert not context.args


def test_the_cases_have_every_command_of_the_decisions() -> None:
    source = "".join(
        Path(module.__file__).read_text() for module in (message_decision, group_decision)
    )
    written = set(re.findall(r'command_line\(\s*"(\w+)", "(\w+)"', source))
    assert len(re.findall(r"command_line\(", source)) == len(
        re.findall(r'command_line\(\s*"\w+", "\w+"', source)
    )
    assert written == {tuple(line.split()[1:3]) for line in COMMANDS}
