"""Targets of a reset on the command line."""

from datetime import datetime, timedelta

import click
import pytest
from click.testing import CliRunner

from penstock.cli.group.group_command import group
from penstock.cli.group.reset_target import read_target
from penstock.wire.bodies.client_bodies import MessageQueue


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("first", "first"),
        ("last", "last"),
        ("+10", 10),
        ("-3", -3),
        ("1794804755000", datetime.fromtimestamp(1794804755).astimezone()),
        ("2026-08-01T12:00:00+00:00", datetime.fromisoformat("2026-08-01T12:00:00+00:00")),
    ],
)
def test_targets(text: str, target: object) -> None:
    assert read_target(text, (), "t") == target


def test_an_age() -> None:
    target = read_target("1h30m", (), "t")
    assert isinstance(target, datetime)
    age = datetime.now().astimezone() - target
    assert timedelta(minutes=90) <= age < timedelta(minutes=95)


def test_offsets_by_queue() -> None:
    assert read_target(None, ("broker-a/0=5", "b.c/12=0"), "t") == {
        MessageQueue("t", "broker-a", 0): 5,
        MessageQueue("t", "b.c", 12): 0,
    }


@pytest.mark.parametrize("text", ["20", "soon", "", "1794804755", "first ", "+", "99999999999d"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="is not a target"):
        read_target(text, (), "t")


@pytest.mark.parametrize("text", ["b0=1", "b/x=1", "b/0=-1", "b/0"])
def test_a_malformed_offset_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="BROKER/QUEUE=OFFSET"):
        read_target(None, (text,), "t")


@pytest.mark.parametrize(
    "arguments",
    [
        ("reset", "g", "-t", "t"),
        ("reset", "g", "-t", "t", "--to", "first", "--offset", "b/0=1"),
        ("reset", "g", "--to", "first"),
        ("clone", "g", "-t", "t"),
        ("create", "g", "--retries-max", "-1"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(group, list(arguments))
    assert result.exit_code == 2
    assert "Usage: group" in result.output
