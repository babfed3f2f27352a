"""A real standalone cluster of a master and two workers, with the package installed or shipped."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from tests.spark import kit
from tests.spark.standalone import ROOT, Master, Worker, run_job

if TYPE_CHECKING:
    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

CONF = {
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    # The job starts when both workers are registered, so that both take part.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a master with two workers of one core each."""
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as servers, ThreadPoolExecutor(2) as pool:
        url = servers.enter_context(Master(folder / "master")).url
        workers = [Worker(folder / f"worker-{n}", url) for n in (1, 2)]
        for started in [pool.submit(servers.enter_context, worker) for worker in workers]:
            started.result()
        yield url


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python with Penstock's dependencies, and without Penstock."""
    venv = tmp_path / "bare"
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    site = venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    # The folder itself, without what its own .pth files add: there our sources stand.
    (site / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = venv / "bin" / "python"
    found = subprocess.run([python, "-c", "import pyspark, pyarrow, lz4; import penstock"])
    assert found.returncode == 1, "this Python must not have Penstock"
    return python


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package as a zip: modules on top, as in a wheel."""
    source = ROOT / "src"
    path = tmp_path / "penstock.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source / "pyspark_penstock.py", "pyspark_penstock.py")
        for module in sorted((source / "penstock").rglob("*")):
            if module.suffix in (".py", ".so"):
                archive.write(module, module.relative_to(source))
    return path


def run_pipe(cluster: Up, master: str, folder: Path, topic: str, **more: Any) -> dict[str, Any]:
    """A batch and a stream over the cluster; everything must have arrived."""
    kit.create_topic(cluster, topic)
    copy = kit.create_topic(cluster, f"{topic}-copy")
    kit.send_numbers(cluster, topic, 1_000)
    conf = {**CONF, **more.pop("conf", {})}
    found: dict[str, Any] = run_job(
        "pipe", master=master, conf=conf, checkpoint=folder / "checkpoint",
        source=kit.source_options(cluster, topic, minPartitions=4),
        sink={"nameserver": cluster.address, "topic": copy}, **more,
    )  # fmt: skip
    assert (found["count"], found["sum"], found["rows"]) == (1_000, sum(range(1_000)), 1_000)
    assert found["executors"] == 2
    bodies = sorted(int(message.body) for message in kit.read_topic(cluster, copy, 1_000))
    assert bodies == list(range(1_000))
    return found


def test_pipelines_run_with_the_package_installed_on_the_workers(
    cluster: Up, master: str, fresh: str, tmp_path: Path
) -> None:
    found = run_pipe(cluster, master, tmp_path, fresh)
    assert found["queues"] == 4
    assert found["workers"] == [[sys.executable, penstock.compiled()]]


@pytest.mark.proof
def test_a_package_shipped_as_a_zip_runs_uncompiled(
    cluster: Up, master: str, fresh: str, tmp_path: Path, bare_python: Path, package: Path
) -> None:
    """Extension modules can't be loaded from a zip, so the code runs uncompiled."""
    found = run_pipe(
        cluster, master, tmp_path, fresh, environment={"PYSPARK_PYTHON": str(bare_python)},
        conf={"spark.submit.pyFiles": str(package)},
    )  # fmt: skip
    assert found["workers"] == [[str(bare_python), False]]


@pytest.mark.proof
def test_an_executor_that_dies_is_replaced(
    cluster: Up, master: str, fresh: str, tmp_path: Path
) -> None:
    """Spark repeats the task on another executor; no row is missing or duplicated."""
    topic = kit.create_topic(cluster, fresh)
    kit.send_numbers(cluster, topic, 1_000)
    found = run_job(
        "count_with_a_loss", master=master, conf=CONF, source=kit.source_options(cluster, topic),
        mark=tmp_path / "lost",
    )  # fmt: skip
    assert found == {"count": 1_000, "lost": True}
    assert os.path.exists(tmp_path / "lost")
