"""The harness itself: Apache's servers start, serve Apache's clients, and stop cleanly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from . import apache, clients, maven

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.usefixtures("java")]

COUNTS = {"peer-a": 1500, "peer-b": 1000, "peer-c": 500}


def test_apache_serves_its_own_clients(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with (
        apache.NameServer(tmp_path / "namesrv") as names,
        apache.Broker(tmp_path / "broker", store, names.address) as broker,
    ):
        acked = clients.produce(names.address, COUNTS)
        assert Counter(line["topic"] for line in acked) == COUNTS
        assert (store / "abort").exists()

        read = clients.consume_all(names.address, COUNTS)
        where = ("topic", "queue_id", "queue_offset")
        what = ("flag", "keys", "tags", "body_crc", "body_length")
        assert _by(read, where, what) == _by(acked, where, what)
        assert any(line["store_size"] < line["body_length"] for line in read)  # compressed ones

        found = clients.query_keys(names.address, "peer-b", ["peer-b-7", "group-5", "nothing"])
        assert Counter(line["key"] for line in found) == {"peer-b-7": 1, "group-5": 10}

        assert "apache" in clients.mqadmin(names.address, "clusterList")

        old = clients.consume_all(names.address, ["peer-c"], version=maven.V4_9)
        assert _by(old, where, what) == _by(
            [line for line in acked if line["topic"] == "peer-c"], where, what
        )

        broker.kill()
        assert (store / "abort").exists()
        broker.start()
        again = clients.consume_all(names.address, COUNTS, commit_as="peer-group")
        assert _by(again, where, what) == _by(acked, where, what)

    assert not (store / "abort").exists()
    assert len(list((store / "commitlog").iterdir())) > 1
    assert len(list((store / "index").iterdir())) > 1
    assert '"peer-a@peer-group"' in (store / "config" / "consumerOffset.json").read_text()


def _by(
    lines: list[clients.Line], key: tuple[str, ...], value: tuple[str, ...]
) -> dict[tuple[object, ...], tuple[object, ...]]:
    found = {tuple(line[k] for k in key): tuple(line[v] for v in value) for line in lines}
    assert len(found) == len(lines)
    return found
