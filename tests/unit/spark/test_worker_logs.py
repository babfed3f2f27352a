"""Warnings of Penstock in Spark's Python workers are shown."""

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.arrow import cluster_metadata
from penstock.errors import NoNameServer
from penstock.spark.source.batch_readers import prepare_worker
from penstock.spark.source.data_source import DefaultSource
from penstock.spark.worker_logs import PACKAGE, WorkerLog

OPTIONS = {"subscribe": "orders", "nameserver": "127.0.0.1:1"}


def worker_logs() -> list[logging.Handler]:
    return [each for each in logging.getLogger(PACKAGE).handlers if isinstance(each, WorkerLog)]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = worker_logs()
    yield
    for handler in set(worker_logs()) - set(before):
        logging.getLogger(PACKAGE).removeHandler(handler)


def test_warnings_go_to_stderr_unless_another_handler_is_configured() -> None:
    code = """
    import logging
    import penstock.client
    from penstock.spark.worker_logs import show_warnings

    log = logging.getLogger("penstock.arrow.range_reader")
    log.warning("not yet")
    for _ in range(2):
        show_warnings()
    log.warning("%d messages", 7)
    log.info("more")
    logging.getLogger("pyspark").info("others")
    taken = logging.FileHandler("/dev/null")
    logging.getLogger().addHandler(taken)
    log.warning("taken")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    [line] = done.stderr.splitlines()
    assert line.endswith(" WARNING penstock.arrow.range_reader: 7 messages")


def test_warnings_of_plans_streams_writes_and_tasks_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_metadata, "FIRST_CONTACT_MS", 0)  # of the planned write
    source = DefaultSource(OPTIONS)
    sink = DefaultSource({"topic": "orders", "nameserver": "127.0.0.1:1"})
    body = DefaultSource({"columns": "body"}).schema()
    for begin in (
        lambda: source.reader(source.schema()),
        lambda: source.streamReader(source.schema()),
        lambda: sink.writer(body, overwrite=False),
        lambda: sink.streamWriter(body, overwrite=False),
        prepare_worker,
    ):
        for handler in worker_logs():
            logging.getLogger(PACKAGE).removeHandler(handler)
        with suppress(NoNameServer):
            begin()
        assert len(worker_logs()) == 1
