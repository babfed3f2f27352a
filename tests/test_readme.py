"""The README's examples run unchanged and print what the page shows.

Blocks run in the order of the page, in one empty directory. ```python blocks have a namespace each.
In ```console blocks each `$ …` line must succeed, and what stands below it must be what it prints,
where `…` stands for anything. `$ penstock up` goes on running until the page ends and must then
stop cleanly; the ports of the page become free ones. (Its Java runs in tests/compat.)
"""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ("README.md", "docs/client.md", "docs/store.md")
FEATURES = (
    "delay",
    "filters",
    "order",
    "pop",
    "request-reply",
    "retry",
    "timers",
    "trace",
    "transactions",
)
FEATURE_PAGES = tuple(f"docs/{name}.md" for name in FEATURES)
NAMESERVER_PORT, BROKER_PORT, PROBE_PORT = 9876, 10911, 10913
TIMEOUT_S = 60.0
SPARK_TIMEOUT_S = 240.0


def matches(expected: str, printed: str) -> bool:
    """Whether a line is as shown; `…` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip()) is not None


class Reader:
    """Runs the examples of a page in a terminal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = free_ports()
        ports = {NAMESERVER_PORT: first, BROKER_PORT: first + 3, PROBE_PORT: first + 5}
        self._ports = {str(known): str(free) for known, free in ports.items()}
        self._servers: list[subprocess.Popen[str]] = []
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NAMESRV_ADDR": f"127.0.0.1:{first}",
            "PENSTOCK_NAMESERVER_PORT": str(first),
            "PENSTOCK_BROKER_PORT": str(first + 3),
        }

    def run_python(self, block: str) -> None:
        command = [sys.executable, "-W", "error", "-c", self._with_free_ports(block)]
        timeout_s = SPARK_TIMEOUT_S if "spark" in block else TIMEOUT_S
        subprocess.run(command, cwd=self._folder, check=True, timeout=timeout_s)

    def run_console(self, block: str) -> None:
        block = self._with_free_ports(block)
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = part.rstrip("\n").splitlines()
            if command == "penstock up":
                printed = [self._start(command)]
            elif command.startswith("curl -s "):
                with urllib.request.urlopen(command.split()[-1], timeout=TIMEOUT_S) as answer:
                    printed = answer.read().decode().splitlines()
            else:
                printed = self._run(command)
            for line in shown:
                assert any(matches(line, p) for p in printed), f"{command} does not print {line!r}"

    def _with_free_ports(self, block: str) -> str:
        for known, free in self._ports.items():
            block = re.sub(rf"\b{known}\b", free, block)
        return block

    def stop(self) -> None:
        """Send Ctrl-C to running processes; they must stop cleanly."""
        for server in self._servers:
            server.send_signal(signal.SIGINT)
            with server:
                assert server.wait(TIMEOUT_S) == 0

    def _start(self, command: str) -> str:
        server = subprocess.Popen(
            command.split(), cwd=self._folder, env=self._environment, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._servers.append(server)
        assert server.stdout is not None
        return server.stdout.readline()

    def _run(self, command: str) -> list[str]:
        assert command.startswith("penstock "), f"nobody runs {command!r}"
        result = subprocess.run(
            command, shell=True, cwd=self._folder, env=self._environment, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.splitlines()


def free_ports(count: int = 6) -> int:
    """The first of this many consecutive free ports."""
    for first in range(21_000 + os.getpid() % 1000 * 10, 60_000, count):
        if not any(is_open(first + more) for more in range(count)):
            return first
    raise AssertionError("no free ports")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text())
    reader = Reader(tmp_path)
    try:
        for language, block in blocks:
            if language == "python":
                reader.run_python(block)
            elif language == "console":
                reader.run_console(block)
    finally:
        reader.stop()
    languages = {language for language, _ in blocks}
    assert languages >= ({"console"} if page == "docs/store.md" else {"python", "console"})


@pytest.mark.parametrize("page", FEATURE_PAGES)
def test_feature_pages_begin_with_python_and_show_java_too(page: str, features: Reader) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text())
    languages = [language for language, _ in blocks]
    assert languages[:2] == ["python", "java"]
    for language, block in blocks:
        if language == "python":
            features.run_python(block)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A running cluster for the examples of the feature pages."""
    reader = Reader(tmp_path_factory.mktemp("features"))
    reader.run_console("$ penstock up\n")
    try:
        yield reader
    finally:
        reader.stop()


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_pages_name_no_path_of_a_machine() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        for banned in ("/work/", "/home/", "/root/", "nexus", "artifactory"):
            assert banned not in text, f"{path.name}: {banned}"
