"""The services of a compose file as processes of this machine, at loopback addresses."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"


class ComposedServices:
    """The services of a file.

    `environment` is that of the image. Services with `network_mode: host` share an address.
    """

    def __init__(
        self, file: Path, directory: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._directory = directory
        self._environment = environment or {}
        self._services: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["services"]
        self.addresses = {
            name: "127.0.54.1" if "network_mode" in service else f"127.0.53.{number}"
            for number, (name, service) in enumerate(self._services.items(), start=1)
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def names(self, kind: str) -> list[str]:
        return [name for name in self._services if name.startswith(f"{kind}-")]

    def start(self, name: str) -> None:
        service = self._services[name]
        words = [self._here(name, word) for word in shlex.split(service["command"])]
        if words[0] == "etcd":
            from tests.compat.etcd_cluster import ETCD_DIR
            from tests.compat.go_program import program

            words[0] = str(program(ETCD_DIR, "etcd"))
        else:
            words[:1] = [sys.executable, "-m", "penstock.cli.main"]
        settings = {**self._environment, **service.get("environment", {})}
        environment = {**os.environ, **{k: self._here(name, str(v)) for k, v in settings.items()}}
        (self._directory / name).mkdir(exist_ok=True)
        with (self._directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log, cwd=self._directory / name
            )

    def _here(self, service: str, text: str) -> str:
        """A value of the file as it is needed on this machine."""
        text = re.sub(r"\$\{PENSTOCK_SECRET:\?[^}]*\}", "a long random text", text)
        text = re.sub(r"\$\{PENSTOCK_ANNOUNCE:-([^}]*)\}", r"\1", text)
        text = re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1)", self.addresses[service], text)
        # In `etcd-1=http://etcd-1:2380` the first is a name, and so is the value of ETCD_NAME.
        host = r"(?<=//)[a-z]+-\d" if service.startswith("etcd-") else r"[a-z]+-\d"
        text = re.sub(host, lambda found: self.addresses[found[0]], text)
        return text.replace("/data", str(self._directory / service))

    def run(self, name: str, command: list[str]) -> int:
        """Run a command of a service's file, such as its health check; returns the exit code."""
        words = [self._here(name, word) for word in command]
        if words[0] == "python":
            words[0] = sys.executable
        return subprocess.run(words, capture_output=True, timeout=60).returncode

    def health_check(self, name: str) -> list[str]:
        """The command of a service's health check."""
        kind, *words = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return words

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def restart(self, name: str) -> int:
        """Stop a service with SIGTERM and start it again; returns its exit code."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        self.start(name)
        return code

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-800:] for path in self._directory.glob("*.log"))
