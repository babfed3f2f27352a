"""The files in deploy/ use commands, options, settings, ports and probes that exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from penstock.cli.main import COMMANDS, cli
from penstock.config.settings import Settings
from penstock.config.sources import from_environment, from_toml, merge_layers

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*/*.yaml"))
PATHS = ("/metrics", "/healthz", "/readyz")
GRACE_S = 60
"""Brokers need up to 35 s to hand over, and some seconds to close."""


class Server(NamedTuple):
    """A server that a file starts."""

    where: str
    words: list[str]
    environment: dict[str, str]


def image_environment() -> dict[str, str]:
    text = (DEPLOY / "container" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("ENV ")]
    return dict(word.split("=", 1) for word in shlex.split(" ".join(lines)) if "=" in word)


def composed(path: Path) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return services


def substituted(text: object) -> str:
    """A value of a compose file, with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))
    return re.sub(r"\$\{\w+:\?[^}]*\}", "secret", text)


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in KUBERNETES:
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.parent.name}/{path.name} {document['kind']}", document


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods of base/ and of etcd/etcd.yaml, not the patches."""
    for where, document in manifests():
        template = document.get("spec", {}).get("template")
        if template is not None and "selector" in document["spec"]:
            yield f"{where} {document['metadata']['name']}", document


def value(entry: dict[str, Any]) -> str:
    if "value" in entry:
        return str(entry["value"]).replace("$(POD_NAME)", "pod-0")
    return "from-" + next(iter(entry["valueFrom"]))


def unit_lines(path: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.MULTILINE)


def servers() -> Iterator[Server]:
    image = image_environment()
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    (last,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    yield Server("container", json.loads(last), image)
    for path in COMPOSE:
        own = image if "container/Dockerfile" in path.read_text() else {}
        for name, service in composed(path).items():
            given = {k: substituted(v) for k, v in service.get("environment", {}).items()}
            words = shlex.split(substituted(service["command"]))
            yield Server(f"{path.name} {name}", words, {**own, **given})
    for path in UNITS:
        (command,) = unit_lines(path, "ExecStart")
        words = shlex.split(command.replace("$NAMESRV_ADDR", "127.0.0.1:9876"))
        assert words[0] == "/opt/penstock/bin/penstock"
        yield Server(path.name, ["penstock", *words[1:]], {})
    for where, document in pods():
        for container in document["spec"]["template"]["spec"]["containers"]:
            given = {entry["name"]: value(entry) for entry in container.get("env", ())}
            words = [str(word) for word in container.get("args") or container["command"]]
            yield Server(where, words, {**image, **given})


OURS = [server for server in servers() if server.words[0] == "penstock"]


def settings(server: Server) -> Settings:
    layer = from_environment(server.environment)
    assert layer.warnings == [], server.where
    return merge_layers([layer]).settings


def test_all_kinds_of_files_are_found() -> None:
    kinds = {server.where.split()[0].partition(".")[0].partition("@")[0] for server in OURS}
    assert kinds == {
        "container", "compose", "single", "penstock-nameserver", "penstock-broker",
        "penstock-controller", "penstock-console", "base/nameserver", "base/controller",
        "base/broker", "base/console",
    }  # fmt: skip


@pytest.mark.parametrize("server", OURS, ids=lambda server: server.where)
def test_commands_and_settings_exist(server: Server, tmp_path: Path) -> None:
    _, name, *words = server.words
    if name == "console" and name not in COMMANDS:
        pytest.skip("this installation has no console")
    assert name in COMMANDS
    words = [str(tmp_path) if word.endswith(".toml") else word for word in words]
    if str(tmp_path) in words:
        (tmp_path / "settings.toml").touch()
        words = [f"{word}/settings.toml" if word == str(tmp_path) else word for word in words]
    with click.Context(cli) as context:
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, words, parent=context)  # raises for a wrong option
    settings(server)


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.toml")), ids=lambda p: p.name)
def test_settings_files_are_valid(path: Path) -> None:
    text = path.read_text()
    merge_layers([from_toml(text.encode(), path.name)])
    # The examples in comments are valid, too.
    shown = re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.M)
    merge_layers([from_toml(shown.encode(), path.name)])


def test_health_checks_ask_for_the_port_of_their_server() -> None:
    checked = 0
    for name, service in composed(DEPLOY / "compose" / "single.yaml").items():
        text = " ".join(service["healthcheck"]["test"])
        compile(service["healthcheck"]["test"][-1], name, "exec")
        given = {k: substituted(v) for k, v in service.get("environment", {}).items()}
        found = settings(Server(name, [], given))
        port = {
            "nameserver": found.nameserver.port,
            "controller": found.controller.port + 2,
            "broker": found.broker.port + 2,
            "console": 8080,
        }[name.partition("-")[0]]
        assert re.search(rf"\b{port}\b", text), name
        assert "/healthz" in text or "create_connection" in text
        checked += 1
    assert checked == 6
    dockerfile = (DEPLOY / "container" / "Dockerfile").read_text()
    (command,) = re.findall(r"^    CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert f":{Settings().broker.port + 2}/healthz" in json.loads(command)[-1]
    exposed = {int(port) for port in re.findall(r"^EXPOSE (.*)$", dockerfile, re.M)[0].split()}
    broker = Settings().broker.port
    assert exposed == {9876, 9878, 9880, 8080, broker - 2, broker, broker + 1, broker + 2}


@pytest.mark.parametrize(("where", "document"), list(pods()), ids=lambda part: str(part)[:40])
def test_pods_have_probes_limits_and_no_privileges(where: str, document: dict[str, Any]) -> None:
    spec = document["spec"]["template"]["spec"]
    labels = document["spec"]["template"]["metadata"]["labels"]
    assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert spec["securityContext"]["runAsNonRoot"] is True
    (container,) = spec["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"]["memory"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {"readinessProbe", "livenessProbe"} <= container.keys()
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        if "tcpSocket" in probe:
            assert probe["tcpSocket"]["port"] in ports
        elif "httpGet" in probe and container["name"] != "etcd":
            path, port = probe["httpGet"]["path"], probe["httpGet"]["port"]
            assert path == ("/readyz" if kind == "readinessProbe" else "/healthz")
            assert path in PATHS
            assert port == "probe"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    templates = document["spec"].get("volumeClaimTemplates", ())
    claims = {claim["metadata"]["name"] for claim in templates}
    assert mounted == claims | {volume["name"] for volume in spec.get("volumes", ())}


def test_ports_of_kubernetes_are_those_of_the_settings() -> None:
    found = {where.split()[-1]: document for where, document in pods()}
    defaults = Settings()
    wanted = {
        "nameserver": {"nameserver": defaults.nameserver.port},
        "controller": {
            "controller": defaults.controller.port,
            "probe": defaults.controller.port + 2,
        },
        "broker-a": {
            "broker": defaults.broker.port,
            "vip": defaults.broker.port - 2,
            "ha": defaults.broker.port + 1,
            "probe": defaults.broker.port + 2,
        },
    }
    services = {d["metadata"]["name"]: d["spec"] for _, d in manifests() if d["kind"] == "Service"}
    for name, ports in wanted.items():
        (container,) = found[name]["spec"]["template"]["spec"]["containers"]
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
        assert {port["name"]: port["port"] for port in services[name]["ports"]} == ports
        labels = found[name]["spec"]["template"]["metadata"]["labels"]
        assert services[name]["selector"].items() <= labels.items()


def test_addresses_in_kubernetes_name_pods_that_exist() -> None:
    sets = {
        document["metadata"]["name"]: document
        for _, document in manifests()
        if document["kind"] == "StatefulSet" and "serviceName" in document["spec"]
    }
    replicas = {name: document["spec"]["replicas"] for name, document in sets.items()}
    replicas["controller"] = 3  # in the variant with etcd
    text = "\n".join(path.read_text() for path in KUBERNETES)
    named = set(re.findall(r"\b([a-z-]+)-(\d)\.([a-z-]+)\.penstock\.svc\.cluster\.local", text))
    assert {(name, service) for name, _, service in named} == {
        ("nameserver", "nameserver"), ("controller", "controller"), ("etcd", "etcd"),
    }  # fmt: skip
    for name, number, service in named:
        assert int(number) < replicas[name]
        assert sets[name]["spec"]["serviceName"] == service


def test_brokers_have_time_to_hand_over() -> None:
    (broker,) = (document for where, document in pods() if where.endswith("broker-a"))
    assert broker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= GRACE_S
    assert broker["spec"]["podManagementPolicy"] == "Parallel"
    for path in COMPOSE:
        for name, service in composed(path).items():
            if name.startswith("broker"):
                assert service["stop_grace_period"] == f"{GRACE_S}s"
    (stop_s,) = unit_lines(DEPLOY / "systemd" / "penstock-broker@.service", "TimeoutStopSec")
    assert int(stop_s) >= GRACE_S


def test_budgets_select_pods() -> None:
    budgets = [d["spec"] for _, d in manifests() if d["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 3
    all_labels = [document["spec"]["template"]["metadata"]["labels"] for _, document in pods()]
    for budget in budgets:
        wanted = budget["selector"]["matchLabels"].items()
        assert sum(wanted <= labels.items() for labels in all_labels) == 1


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize(("variant", "controllers"), [("base", 1), ("etcd", 3)])
@pytest.mark.slow
def test_kustomize_builds_both_variants(variant: str, controllers: int) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / variant)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(done.stdout)}
    assert built["StatefulSet", "controller"]["spec"]["replicas"] == controllers
    (broker,) = built["StatefulSet", "broker-a"]["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in broker["env"]}
    assert environment["PENSTOCK_REPLICATION_CONTROLLERS"].count(":9878") == controllers
    assert environment["PENSTOCK_BROKER_NAME"] == "broker-a"
    assert all(
        document["metadata"].get("namespace") == "penstock"
        for (kind, _), document in built.items()
        if kind != "Namespace"
    )


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
@pytest.mark.slow
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "penstock"
    checked = []
    for path in UNITS:
        unit = tmp_path / path.name
        unit.write_text(path.read_text().replace("/opt/penstock/bin/penstock", str(program)))
        checked.append(str(unit).replace("@.", "@broker-a."))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *checked],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for unit in tmp_path.glob("*.service"):
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-300:]


def test_units_stop_restart_and_protect() -> None:
    for path in UNITS:
        assert unit_lines(path, "Restart") == ["always"]
        assert unit_lines(path, "KillSignal") == ["SIGTERM"]
        assert unit_lines(path, "ProtectSystem") == ["strict"]
        assert int(unit_lines(path, "LimitNOFILE")[0]) >= 1 << 20
        (directory,) = unit_lines(path, "WorkingDirectory")
        (state,) = unit_lines(path, "StateDirectory")
        assert directory == f"/var/lib/{state}"


PAGES = ("backup.md", "deployment.md", "upgrading.md", "sizing.md", "telemetry.md")


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_files_on_the_pages_exist(page: str) -> None:
    text = (DEPLOY.parent / "docs" / page).read_text()
    for path in re.findall(r"deploy/[\w./@-]*\w", text):
        assert (DEPLOY.parent / path).exists(), path
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if "penstock" not in words or words[:2] == ["docker", "build"] or words[0] == "kubectl":
            continue
        name, *rest = words[len(words) - words[::-1].index("penstock") :] or ["broker"]
        assert name in COMMANDS, line
        with click.Context(cli) as context:
            command = cli.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                command = command.commands[rest.pop(0)]
            command.make_context(name, [_existing(word) for word in rest], parent=context)


def _existing(word: str) -> str:
    """Some options name a directory that must exist."""
    return str(DEPLOY) if word.startswith(("/backup/", "$")) else word
