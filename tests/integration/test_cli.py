"""The command line: help is fast, output is text or JSON, errors are one line."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.store.store import MessageStore
from penstock.wire.record import Record
from tests import json_kit
from tests.unit.store.tools import inspect_kit as kit

HELP_CPU_SECONDS_MAX = 0.3


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "store"
    kit.make_store(folder)
    return folder


@pytest.mark.parametrize("arguments", [("--help",), ("store", "--help")])
def test_help_is_fast(arguments: tuple[str, ...]) -> None:
    best = 10.0
    for _ in range(6):  # the machine may be busy, so the least CPU time of a few runs is measured
        began = children_cpu_seconds()
        result = run(*arguments)
        best = min(best, children_cpu_seconds() - began)
        assert result.returncode == 0
        assert "Usage: penstock" in result.stdout
    assert best < HELP_CPU_SECONDS_MAX


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from penstock.cli.main import main; main(['--help']); "
        "main(['store', '--help']); "
        "print([m for m in ('rich', 'msgspec', 'penstock.store.tools.verify') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_characters_that_the_locale_lacks_are_escaped() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "up", "--help"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert rb"HOST:PORT,\u2026" in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"penstock, version {penstock.__version__}\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("broker.conf", bytes(range(1, 256)) * 40, "has no setting of Penstock or RocketMQ"),
        ("broker.conf", b"", "has no setting of Penstock or RocketMQ"),
        ("pyproject.toml", b"[tool.x]\ny = 1\n", "has no setting of Penstock or RocketMQ"),
        ("broker.yaml", b"brokerName: a\n", "settings are not read from .yaml files"),
        ("broker.json", b'{"brokerName": "a"}', "settings are not read from .json files"),
    ],
)
def test_a_file_without_settings_is_refused(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    result = run("broker", "-c", tmp_path / name, "--data", tmp_path / "data")
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr) < 600
    assert not (tmp_path / "data").exists()


def test_stat_shows_the_store(root: Path) -> None:
    text = run("store", "stat", root).stdout
    assert "closed cleanly" in text
    assert "orders" in text
    statistics_json = json.loads(run("store", "stat", root, "--json", "--exact").stdout)
    assert statistics_json["records"] == kit.COUNT
    assert statistics_json["records_exact"] is True
    assert len(statistics_json["queues"]) == 3


@pytest.mark.parametrize(
    ("command", "options"),
    [("stat", ()), ("verify", ()), ("scrub", ("--rate", "1000")), ("dump", ("--bodies",))],
)
def test_json_output_matches_its_schema(root: Path, command: str, options: tuple[str, ...]) -> None:
    result = run("store", command, root, *options, "--json")
    assert json_kit.check(f"store {command}", result.stdout)


def test_verify_reports_no_problems_in_an_intact_store(root: Path) -> None:
    result = run("store", "verify", root)
    assert result.returncode == 0
    assert penstock.compiled() is (result.stderr == "")
    assert result.stdout.splitlines()[-1] == "good: no damage, 0 notes"
    answer = json.loads(run("store", "verify", root, "--json").stdout)
    assert answer["good"] is True
    assert answer["totals"]["records"] == kit.COUNT


def test_verify_reports_damage(tmp_path: Path) -> None:
    placed = kit.make_store(tmp_path)
    for number in range(20, 40):
        kit.flip_log(tmp_path, placed[number][0] + 95)
    result = run("store", "verify", tmp_path, "--limit", 3)
    assert result.returncode == 2
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["damage"] * 3
    assert f"commitlog/{0:020d} @{placed[20][0]}" in lines[0]
    assert lines[3].startswith("… and ")
    assert lines[-1].startswith("DAMAGED")
    answer = json.loads(run("store", "verify", tmp_path, "--json").stdout)
    assert answer["good"] is False
    assert answer["problems"][0]["kind"] == "log.crc"


def test_progress_goes_to_stderr_and_only_on_request(root: Path) -> None:
    shown = run("store", "verify", root, "--json", "--progress")
    assert "log" in shown.stderr
    assert json.loads(shown.stdout)["good"] is True


def test_dump_by_queue_key_and_log_offset(root: Path) -> None:
    lines = run("store", "dump", root, "--topic", "orders", "--queue", 1, "--from", 5,
                "--count", 2, "--json", "--bodies").stdout.splitlines()  # fmt: skip
    messages = [json.loads(line) for line in lines]
    assert [m["queue_offset"] for m in messages] == [5, 6]
    assert messages[0]["body"] == kit.body(16).decode()
    assert messages[0]["keys"] == ["k16", "shared"]
    by_key = json.loads(run("store", "dump", root, "--topic", "orders", "--key", "k16",
                            "--json", "--bodies").stdout)  # fmt: skip
    assert by_key == messages[0]
    at = run("store", "dump", root, "--at", messages[0]["physical_offset"], "--count", 1,
             "--bodies", "--body-bytes", 7)  # fmt: skip
    assert at.stdout.splitlines()[0].startswith("orders/1 #5  at ")
    assert at.stdout.splitlines()[1] == "    message…"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic", "oders"], "the store has no queue of a topic oders; did you mean orders?"),
        (["--topic", "zzz", "--key", "k1"], "the store has no queue of a topic zzz"),
        (["--topic", "orders", "--queue", "99"], "the topic orders has no queue 99; it has 0, 1"),
    ],
)
def test_dump_of_an_unknown_queue_is_an_error(
    root: Path, arguments: list[str], message: str
) -> None:
    result = run("store", "dump", root, *arguments)
    assert result.returncode == 1
    assert message.partition(";")[0] in result.stderr
    assert message.partition("; ")[2] in result.stderr


def test_dump_decompresses_and_shows_hex(tmp_path: Path) -> None:
    store = MessageStore(tmp_path, kit.CONFIG, now_ms=kit.START_MS)
    kit.fill(store, kit.COMPRESSED + 1)
    record = Record()
    record.fill(b"raw", b"\x00\xff\x10")
    store.put(record, kit.START_MS)
    store.close()
    lines = run("store", "dump", tmp_path, "--json", "--bodies").stdout.splitlines()
    assert json.loads(lines[kit.COMPRESSED])["body"] == kit.body(kit.COMPRESSED).decode()
    assert json.loads(lines[-1])["body_hex"] == "00ff10"


def test_dump_skips_damaged_records(tmp_path: Path) -> None:
    placed = kit.make_store(tmp_path)
    kit.flip_log(tmp_path, placed[3][0] + 5)
    stopped = run("store", "dump", tmp_path)
    assert stopped.returncode == 2
    assert len(stopped.stdout.splitlines()) == 3
    assert f"log offset {placed[3][0]}: the magic number is unknown" in stopped.stderr
    salvaged = run("store", "dump", tmp_path, "--salvage", "--count", 0, "--json")
    assert len(salvaged.stdout.splitlines()) == kit.COUNT - 1


def test_a_closed_pipe_is_not_an_error(root: Path) -> None:
    command = f"{sys.executable} -m penstock.cli.main store dump {root} --count 0 | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in result.stderr


def test_an_error_is_one_line_with_the_next_step(tmp_path: Path) -> None:
    result = run("store", "verify", tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"penstock: {tmp_path} is not a store")
    assert "give the directory" in line


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in run("store", "verify", tmp_path, "--debug").stderr
    result = run("store", "verify", tmp_path, env={"PENSTOCK_DEBUG": "1"})
    assert "Traceback" in result.stderr


def test_wrong_usage_is_explained(root: Path) -> None:
    result = run("store", "dump", root, "--key", "k1")
    assert result.returncode == 2
    assert "--key require --topic" in result.stderr
    assert run("nonsense").returncode == 2


def test_uncompiled_code_is_reported_once(root: Path) -> None:
    result = run("store", "verify", root, env={"PENSTOCK_PURE": "1"})
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert "running uncompiled" in line
    assert run("store", "--help", env={"PENSTOCK_PURE": "1"}).stderr == ""
