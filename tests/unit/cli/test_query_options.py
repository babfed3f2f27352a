"""The next command goes to the same servers as this one."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.cli.query_options import with_servers
from penstock.cli.remote import ClusterOptions, cluster_options


@click.command()
@cluster_options
def command(cluster: ClusterOptions) -> None:
    click.echo(with_servers(cluster, "penstock group list"))


@pytest.fixture
def _contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """current = "prod"
[contexts.prod]
nameserver = "10.0.0.1:9876"
access_key = "ops"
secret_key = "secret"
tls = true
[contexts.test]
nameserver = "10.0.0.2:9876"
"""
    (tmp_path / "contexts.toml").write_text(text)
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.delenv("PENSTOCK_CONTEXT", raising=False)


@pytest.mark.usefixtures("_contexts")
@pytest.mark.parametrize(
    ("given", "more"),
    [
        ([], ""),
        (["--context", "prod"], " --context prod"),
        (["--context", "test", "-n", "a:1;b:1"], " --context test -n 'a:1;b:1'"),
        (["--context", ""], " --context ''"),
        (["--tls", "--tls-ca", "ca.pem", "--namespace", "n s"],
         " --namespace 'n s' --tls --tls-ca ca.pem"),
        (["--access-key", "a", "--secret-key", "b", "--strict-signing"], " --strict-signing"),
    ],
)  # fmt: skip
def test_the_options_that_choose_servers_are_repeated(given: list[str], more: str) -> None:
    result = CliRunner().invoke(command, given, catch_exceptions=False)
    assert result.output == f"penstock group list{more}\n"


@pytest.mark.usefixtures("_contexts")
def test_what_the_environment_says_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.3:9876")
    result = CliRunner().invoke(command, [], catch_exceptions=False)
    assert result.output == "penstock group list\n"
