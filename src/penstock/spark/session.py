"""A Spark session without configuration: on this machine, on a cluster, or through Spark Connect.

`spark_session` finds Java (`java.py`), runs Spark's Python workers with this Python, keeps the
state of streams in RocksDB with a changelog, and on a single machine listens on loopback only.
`conf` and spark-submit take precedence.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.spark.java import java_home
from penstock.spark.spark_home import spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
_STREAMING: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
_QUIET: Final = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
_LOOPBACK: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?|spark://(127\.0\.0\.1|localhost)(:\d+)?")
"""Masters that can be reached from this machine only."""

log = logging.getLogger(__name__)


def spark_session(
    app: str, *, master: str | None = None, conf: Mapping[str, str] | None = None
) -> "SparkSession":
    """A session called `app`, or the active one with those settings of `conf` that can change.

    `master` is `local[2]`, `spark://host:7077`, `yarn`, `k8s://…`, or `sc://host:15002` for Spark
    Connect. The default is the master of spark-submit, or else all cores of this machine.
    """
    from pyspark.sql import SparkSession

    wanted = dict(conf or {})
    active = SparkSession.getActiveSession()
    if active is not None:
        for name, value in wanted.items():
            if active.conf.isModifiable(name):
                active.conf.set(name, value)
        return active
    builder = SparkSession.builder.appName(app)
    if master is not None and master.startswith("sc://"):
        builder = builder.remote(master)
        wanted = {**_STREAMING, **wanted}
    elif _is_submitted():
        if master is not None:
            builder = builder.master(master)
        wanted = {**_STREAMING, **wanted}
    else:
        master = master or LOCAL
        builder = builder.master(master)
        _prepare(master, wanted)
        wanted |= defaults(master, wanted)
    for name, value in wanted.items():
        builder = builder.config(name, value)
    with _spark_home(master):
        session = builder.getOrCreate()
    if session.conf.get("spark.submit.pyFiles", ""):
        # Spark looks for data sources in installed packages only, not in the files of a job.
        from penstock.spark.source.data_source import DefaultSource

        session.dataSource.register(DefaultSource)
    return session


def defaults(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Settings of a session that we start, besides `conf`; Java's options have ours added."""
    given = {**_STREAMING, **_QUIET}
    if _LOCAL_MASTER.fullmatch(master):
        given |= _LOOPBACK
    if master.startswith("local"):
        # Spark's default of 200 suits a cluster; each is a task and a state store.
        given["spark.sql.shuffle.partitions"] = str(_cores(master))
        # The driver does all the work, and Spark's default of one gigabyte is too little for it.
        given["spark.driver.memory"] = f"{_heap_mib()}m"
    given = {name: value for name, value in given.items() if name not in conf}
    options = conf.get("spark.driver.extraJavaOptions", "")
    levels = files("penstock.spark") / "log4j2.properties"
    if "log4j2.configurationFile" not in options and isinstance(levels, Path):  # not in a zip
        quiet = f"-Dlog4j2.configurationFile={levels.as_uri()}"
        given["spark.driver.extraJavaOptions"] = f"{options} {quiet}".strip()
    return given


def _prepare(master: str, conf: Mapping[str, str]) -> None:
    """Set the environment variables that Spark's launcher and its Python workers read."""
    os.environ["JAVA_HOME"] = str(java_home())
    if _LOCAL_MASTER.fullmatch(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    python = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    # Data sources run with the driver's Python, on executors too.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python
    if shipped := conf.get("spark.submit.pyFiles"):
        # A stream's Python workers on the driver get these files in no other way.
        paths = [*shipped.split(","), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    log.debug("starting Spark with JAVA_HOME=%s", os.environ["JAVA_HOME"])


@contextmanager
def _spark_home(master: str | None) -> Iterator[None]:
    """Set SPARK_HOME so that Python workers start faster, if they run here with this Python."""
    is_local = master is not None and master.startswith("local") and not _is_submitted()
    same_python = os.environ.get("PYSPARK_PYTHON") == sys.executable
    home = spark_home() if is_local and same_python else None
    if home is None:
        yield
        return
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:  # programs started later may use a cluster
        del os.environ["SPARK_HOME"]


def _is_submitted() -> bool:
    """Whether spark-submit (or the launcher of a notebook) has started the JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _heap_mib() -> int:
    """An eighth of the machine's memory, between Spark's default of 1 GiB and 4 GiB."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(machine // 8 >> 20, 1024), 4096)


def _cores(master: str) -> int:
    """The number of tasks that `local[4]`, `local[4, 2]`, `local[*]` or `local` runs at a time."""
    inside = re.match(r"local\[\s*(\d+|\*)", master)
    if inside is None:
        return 1
    return len(os.sched_getaffinity(0)) if inside[1] == "*" else int(inside[1])
