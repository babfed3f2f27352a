"""Named contexts: the file, and which value a command gets."""

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from penstock.cli.context_command import context
from penstock.cli.contexts.config_directory import config_directory, write_private
from penstock.cli.contexts.context_file import (
    Contexts,
    chosen_context,
    contexts_path,
    read_contexts,
    write_contexts,
)
from penstock.cli.remote import BrokerOptions, ClusterOptions, broker_options, cluster_options
from penstock.errors import BadSetting
from tests import json_kit


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PENSTOCK_CONTEXT", "NAMESRV_ADDR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def run(*arguments: str, code: int = 0, stdin: str = "") -> str:
    result = CliRunner().invoke(context, list(arguments), input=stdin)
    assert result.exit_code == code, result.output
    return result.output


# --- the file


def test_the_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG_DIR")
    monkeypatch.setenv("HOME", "/home/me")
    assert config_directory() == Path("/home/me/.config/penstock")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    assert config_directory() == Path("/xdg/penstock")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_directory() == Path("/home/me/.config/penstock")


def test_a_user_without_a_home_directory_has_the_root_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that runs as any user id."""
    monkeypatch.delenv("PENSTOCK_CONFIG_DIR")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 123_456_789)
    assert config_directory() == Path("/.config/penstock")


def test_files_are_private_and_replaced_in_one_step(directory: Path) -> None:
    path = directory / "contexts.toml"
    write_private(path, "one")
    inode = path.stat().st_ino
    write_private(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_ino != inode
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert os.listdir(directory) == ["contexts.toml"]


def test_a_failed_write_leaves_the_old_file(directory: Path) -> None:
    path = directory / "contexts.toml"
    write_private(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(directory) == ["contexts.toml"]


def test_contexts_survive_writing_and_reading() -> None:
    strange = 'a "quoted" näme\\ \x7f \t]'
    contexts = Contexts(
        strange, {strange: {"nameserver": "h:1", "secret_key": strange, "tls": True}, "empty": {}}
    )
    write_contexts(contexts)
    assert read_contexts() == contexts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("current = [", "is not valid TOML"),
        ("colour = 1", "unknown entries: colour"),
        ("[contexts.a]\nport = 1", "invalid entry port = 1"),
        ('[contexts.a]\ntls = "yes"', "invalid entry tls = 'yes'"),
        ("[contexts]\na = 1", "invalid entry"),
        ('current = "gone"', "there is no context 'gone'"),
    ],
)
def test_a_broken_file_is_refused(text: str, message: str) -> None:
    write_private(contexts_path(), text)
    with pytest.raises(BadSetting, match=message):
        chosen_context(None)


# --- which value counts


def parse(command: Any, *arguments: str, **environment: str) -> Any:
    result = CliRunner().invoke(command, list(arguments), env=environment, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value


@click.command()
@cluster_options
def clustered(cluster: ClusterOptions) -> ClusterOptions:
    return cluster


@click.command()
@broker_options
def brokered(brokers: BrokerOptions) -> BrokerOptions:
    return brokers


@pytest.fixture
def two_contexts() -> None:
    write_contexts(
        Contexts(
            "one",
            {
                "one": {"nameserver": "one:1", "namespace": "n1", "tls": True},
                "two": {"nameserver": "two:2", "access_key": "k", "secret_key": "s"},
            },
        )
    )


@pytest.mark.usefixtures("two_contexts")
def test_option_then_environment_then_context_then_default() -> None:
    current = parse(clustered)
    assert (current.nameserver, current.namespace, current.tls) == ("one:1", "n1", True)
    assert current.timeout_ms == 5_000
    chosen = parse(clustered, "--context", "two")
    assert (chosen.nameserver, chosen.namespace, chosen.tls) == ("two:2", "", False)
    assert (chosen.access_key, chosen.secret_key) == ("k", "s")
    assert parse(clustered, PENSTOCK_CONTEXT="two") == chosen
    assert parse(clustered, "--context", "one", PENSTOCK_CONTEXT="two") == current
    assert parse(clustered, NAMESRV_ADDR="env:3").nameserver == "env:3"
    assert parse(clustered, "-n", "opt:4", NAMESRV_ADDR="env:3").nameserver == "opt:4"
    assert parse(clustered, "--context", "").nameserver is None
    with pytest.raises(BadSetting, match="there is no context 'three'"):
        parse(clustered, "--context", "three")


@pytest.mark.usefixtures("two_contexts")
def test_broker_addresses_come_before_a_context() -> None:
    assert parse(brokered).nameserver == "one:1"
    chosen = parse(brokered, "-b", "broker:1", "--context", "two")
    assert (chosen.nameserver, chosen.addresses, chosen.access_key) == (None, ("broker:1",), "k")
    assert parse(brokered, NAMESRV_ADDR="env:3").nameserver is None, "it is read later"
    with pytest.raises(click.UsageError):
        parse(brokered, "-b", "broker:1", "-n", "names:1")


# --- the command


def test_add_use_show_and_remove() -> None:
    assert "(current)" in run("add", "a", "-n", "h:1;i:2", "--namespace", "ns")
    run("add", "b", "--access-key", "ops", "--tls", "--tls-ca", "/ca.pem", stdin="hush\n")
    assert read_contexts().contexts["b"]["secret_key"] == "hush"
    assert "hush" not in run("show", "b") + run("list") + run("list", "--json")
    shown = json_kit.check("context show", run("show", "b", "--json", "--show-secrets"))
    assert (shown["secret_key"], shown["tls"], shown["in_use"]) == ("hush", True, False)
    assert [row["context"] for row in json_kit.check("context list", run("list", "--json"))] == [
        "a",
        "b",
    ]
    run("use", "b")
    assert run("show").startswith("context:        b\n")
    run("add", "b", "--tls-ca", "", "--no-tls", "--use")
    assert read_contexts().contexts["b"] == {
        "access_key": "ops", "secret_key": "hush", "tls": False,
    }  # fmt: skip
    run("remove", "b", code=1, stdin="n\n")
    run("remove", "b", "--yes")
    assert read_contexts() == Contexts(None, {"a": {"nameserver": "h:1;i:2", "namespace": "ns"}})
    run("use", "a")
    run("use", "--none")
    assert read_contexts().current is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("use",),
        ("use", "a", "--none"),
        ("show",),
        ("remove", "a"),
        ("add", "a", "--secret-key", "only"),
        ("add", "a\n"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(context, list(arguments))
    assert result.exit_code != 0
    assert not contexts_path().exists()


def test_a_bad_address_is_not_saved() -> None:
    with pytest.raises(BadSetting):
        CliRunner().invoke(context, ["add", "a", "-n", "no port"], catch_exceptions=False)
    assert not contexts_path().exists()
