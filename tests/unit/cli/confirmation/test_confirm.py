"""The question before a destructive command."""

import io

import pytest

from penstock.cli.confirmation.confirm import Declined, NoAnswer, confirm


def test_yes_does_not_ask(capsys: pytest.CaptureFixture[str]) -> None:
    confirm("Delete it?", yes=True)
    assert capsys.readouterr() == ("", "")


def test_a_piped_answer_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    confirm("Delete it?", yes=False)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    with pytest.raises(Declined, match="nothing was changed"):
        confirm("Delete it?", yes=False)


def test_without_an_answer_the_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(NoAnswer, match="--yes") as refused:
        confirm("Delete it?", yes=False)
    assert refused.value.exit_code == 2
