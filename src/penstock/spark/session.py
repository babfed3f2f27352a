"""A Spark session that works without set-up: on this machine, on a cluster, or through Connect.

`spark_session` finds Java (`java.py`), gives Spark's Python workers this Python, keeps the state of
streams in RocksDB with a changelog, and on a single machine listens on loopback only. Whatever
`conf` or spark-submit says goes first.
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
_HERE: Final = re.compile(r"local(\[.*\])?|spark://(127\.0\.0\.1|localhost)(:\d+)?")
"""Masters that only this machine reaches."""

log = logging.getLogger(__name__)


def spark_session(
    app: str, *, master: str | None = None, conf: Mapping[str, str] | None = None
) -> "SparkSession":
    """The session called `app`; the one that runs already, with what of `conf` it takes, if any.

    `master` is `local[2]`, `spark://host:7077`, `yarn`, `k8s://…`, or `sc://host:15002` for Spark
    Connect. Without it: what spark-submit was given, else all cores of this machine.
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
        # Spark looks for sources in what is installed, not in what is shipped with a job.
        from penstock.spark.source.data_source import DefaultSource

        session.dataSource.register(DefaultSource)
    return session


def defaults(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """What a session of our own gets besides `conf`, and Java's options with ours added."""
    given = {**_STREAMING, **_QUIET}
    if _HERE.fullmatch(master):
        given |= _LOOPBACK
    if master.startswith("local"):
        # Spark's 200 suit a cluster; here each is a state store and a task of its own.
        given["spark.sql.shuffle.partitions"] = str(_cores(master))
        # Here the driver does all the work, and Spark's one gigabyte is little for that.
        given["spark.driver.memory"] = f"{_heap_mib()}m"
    given = {name: value for name, value in given.items() if name not in conf}
    options = conf.get("spark.driver.extraJavaOptions", "")
    levels = files("penstock.spark") / "log4j2.properties"
    if "log4j2.configurationFile" not in options and isinstance(levels, Path):  # not in a zip
        quiet = f"-Dlog4j2.configurationFile={levels.as_uri()}"
        given["spark.driver.extraJavaOptions"] = f"{options} {quiet}".strip()
    return given


def _prepare(master: str, conf: Mapping[str, str]) -> None:
    """The environment that Spark's launcher and its Python workers read."""
    os.environ["JAVA_HOME"] = str(java_home())
    if _HERE.fullmatch(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    python = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    # Sources that Spark finds by itself run on the driver's Python, on executors too.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python
    if shipped := conf.get("spark.submit.pyFiles"):
        # The driver's own Python workers of a stream do not get them any other way.
        paths = [*shipped.split(","), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    log.debug("Spark starts with JAVA_HOME=%s", os.environ["JAVA_HOME"])


@contextmanager
def _spark_home(master: str | None) -> Iterator[None]:
    """Let the JVM of a single machine start its Python workers quickly. They need this Python."""
    here = master is not None and master.startswith("local") and not _is_submitted()
    same = os.environ.get("PYSPARK_PYTHON") == sys.executable
    home = spark_home() if here and same else None
    if home is None:
        yield
        return
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:  # other programs that this one starts have a cluster to think of
        del os.environ["SPARK_HOME"]


def _is_submitted() -> bool:
    """Whether spark-submit (or a notebook's launcher) has started the JVM already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _heap_mib() -> int:
    """An eighth of the machine's memory, from Spark's own default up to four gigabytes."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(machine // 8 >> 20, 1024), 4096)


def _cores(master: str) -> int:
    """How many tasks `local[4]`, `local[4, 2]`, `local[*]` or `local` runs at a time."""
    inside = re.match(r"local\[\s*(\d+|\*)", master)
    if inside is None:
        return 1
    return len(os.sched_getaffinity(0)) if inside[1] == "*" else int(inside[1])
