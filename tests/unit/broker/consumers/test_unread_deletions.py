"""What the log says about messages that retention has deleted."""

from pathlib import Path

import pytest

from penstock.broker.consumers.unread_deletions import GROUPS_MAX, UnreadDeletions
from penstock.store.retention import Deletion
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture
from tests.unit.broker.consumers.membership_kit import NOW_MS, make_fixture


def test_a_deletion_names_the_groups_that_had_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = make_fixture(tmp_path)
    for group, offset in (("slow", 3), ("fast", 10), ("lost", 0), ("CID_RMQ_SYS_TRANS", 0)):
        fixture.offsets.commit(group, "T", 0, offset, NOW_MS)
    deletion = Deletion(2, 2 << 30, 4096, [("T", 0, 1, 9), ("T", 1, 0, 4), ("U", 0, 0, 5)])
    UnreadDeletions(fixture.offsets).log(deletion)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "deleted 2 segments (2,048 MiB, 17 messages of 3 queues): the log now begins at 4096; "
        "not read by: lost (8 messages of topic T), slow (6 messages of topic T)"
    )
    fixture.store.close()


def test_the_number_of_named_groups_is_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = make_fixture(tmp_path)
    for number in range(GROUPS_MAX + 2):
        fixture.offsets.commit(f"g{number}", "T", 0, 0, NOW_MS)
    UnreadDeletions(fixture.offsets).log(Deletion(1, 1, 1, [("T", 0, 0, 1)]))
    assert caplog.messages[0].endswith(" and 2 more")
    fixture.store.close()


def test_a_broker_logs_deletions_with_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with broker_fixture(tmp_path / "store") as env:
        _fill(env)
        env.context.offsets.commit("late", "T", 0, 1, env.now_ms)
        env.store.expire(1)
        assert "not read by: late (" in caplog.text
    caplog.clear()
    with broker_fixture(tmp_path / "store") as env:
        env.context.offsets.commit("late", "T", 0, 100, env.now_ms)
        env.store.expire(1)
        assert "no group had messages left to read" in caplog.text


def _fill(env: BrokerFixture) -> None:
    while len(env.store.log.segments.items) < 4:
        assert env.send(body=bytes(3000), queue_id=0).code == 0
    env.store.publish()
