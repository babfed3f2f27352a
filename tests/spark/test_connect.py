"""Spark Connect: source and sink through a server that the client reaches by gRPC only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark import kit
from tests.spark.standalone import Connect, run_job

if TYPE_CHECKING:
    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_read_write_and_stream_through_connect(cluster: Up, fresh: str, tmp_path: Path) -> None:
    topic = kit.create_topic(cluster, fresh)
    copy = kit.create_topic(cluster, f"{fresh}-copy")
    kit.send_numbers(cluster, topic, 200)
    with Connect(tmp_path / "connect") as connect:
        found = run_job(
            "pipe", master=connect.url, conf={}, source=kit.source_options(cluster, topic),
            sink={"nameserver": cluster.address, "topic": copy}, checkpoint=tmp_path / "checkpoint",
        )  # fmt: skip
    assert (found["count"], found["sum"]) == (200, sum(range(200)))
    bodies = sorted(int(message.body) for message in kit.read_topic(cluster, copy, 200))
    assert bodies == list(range(200))
